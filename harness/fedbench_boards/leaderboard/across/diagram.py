"""The critical-difference diagram of Demšar (JMLR 2006), as scikit-posthocs draws it."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from fedbench_boards.statistics.across import Across


def critical_differences(overall: Across, labels: Mapping[str, str]) -> Figure:
    """Mean ranks on a line, bars over rows that Nemenyi's test does not tell apart. ``labels``: row -> its name."""
    import scikit_posthocs  # takes seconds to import

    ranks = overall.mean_ranks.rename(index=dict(labels))
    apart = scikit_posthocs.posthoc_nemenyi_friedman(overall.ranks.rename(columns=dict(labels)).reset_index(drop=True))
    fig = Figure(figsize=(7.0, 1.1 + 0.105 * len(ranks)), layout="constrained")
    axes = fig.subplots()
    scikit_posthocs.critical_difference_diagram(
        ranks,
        apart,
        ax=axes,
        label_fmt_left="{label} {rank:.1f} ",
        label_fmt_right=" {rank:.1f} {label}",
        label_props={"fontsize": 7},
        crossbar_props={"linewidth": 2.5, "color": "#808890"},
        elbow_props={"linewidth": 0.7},
        marker_props={"s": 9},
        color_palette=["#000000"] * len(ranks),
    )
    axes.set_title(
        f"mean rank over {len(overall.ranks)} settings; critical difference {overall.critical_difference:.2f}",
        fontsize=8,
    )
    return fig
