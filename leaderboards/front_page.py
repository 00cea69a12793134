"""The two figures of the README, from the committed results of the suite `vlm`: python leaderboards/front_page.py

``which-method.png``: points over FedAvg by method and kind of heterogeneity; grey where paired seeds can't tell
(t-test, Holm over the figure). ``accuracy-and-traffic.png``: accuracy against the megabytes of a run, for all methods.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbench_boards.statistics import holm, paired

HERE = Path(__file__).parent
KINDS = {
    "iid": "iid",
    "label skew": "label\nskew",
    "feature skew": "feature\nskew",
    "long tail": "long\ntail",
    "label + feature skew": "label +\nfeature",
    "label skew + long tail": "label +\ntail",
    "feature skew + long tail": "feature\n+ tail",
    "all three": "all\nthree",
}
METHODS = {
    "clip-zs": "zero-shot CLIP, no training",
    "capt": "CAPT",
    "cocoop": "CoCoOp",
    "promptfl": "PromptFL",
    "fedpgp": "FedPGP",
    "tip-adapter-f": "Tip-Adapter-F",
    "taskres": "TaskRes",
    "clip-adapter": "CLIP-Adapter",
    "fedclip": "FedCLIP",
    "fedglcl": "FedGLCL",
    "clip2fl": "CLIP2FL",
    "fst-cbdg": "FST-CBDG (no labels)",
}
LABELLED = {
    "clip-zs": "zero-shot",
    "kgcoop": "KgCoOp",
    "fedpgp": "FedPGP",
    "capt": "CAPT",
    "fedavg": "FedAvg's head",
    "clip-adapter": "CLIP-Adapter",
    "fedglcl": "FedGLCL",
    "fedclip": "FedCLIP",
    "maple": "MaPLe",
    "vpt": "VPT",
}
BASELINE = "fedavg"
SETTING = "label skew + long tail"
STYLE = {"font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def results() -> pd.DataFrame:
    """Accuracy in percent and megabytes by method, setting and seed; every method in its plain form."""
    table = pd.read_csv(HERE / "vlm" / "results.csv.gz", low_memory=False)
    plain = ~table["row"].str.contains(" with ")
    columns = ["method", "setting", "seed", "final/global_accuracy", "final/megabytes"]
    return table.loc[plain, columns].set_axis(["method", "setting", "seed", "accuracy", "megabytes"], axis=1)


def margins(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Points over `BASELINE` (methods x kinds), and whether Holm's p over all of them is below 0.05."""
    by_seed = table.pivot_table(index=["method", "setting"], columns="seed", values="accuracy")
    cells = [(method, kind) for method in METHODS for kind in KINDS]
    gaps, p_values = [], []
    for method, kind in cells:
        both = by_seed.loc[[(method, kind), (BASELINE, kind)]].dropna(axis=1)
        ours, theirs = both.to_numpy()
        gaps.append(float((ours - theirs).mean()))
        p_values.append(paired(ours.tolist(), theirs.tolist()).p_value)
    shape = {"index": list(METHODS), "columns": list(KINDS)}
    size = len(KINDS)

    def framed(values: list[float]) -> pd.DataFrame:
        return pd.DataFrame([values[at : at + size] for at in range(0, len(values), size)], **shape)

    return framed(gaps), framed(holm(p_values)) < 0.05


def heat_map(axes: Axes, gaps: pd.DataFrame, told: pd.DataFrame) -> None:
    """A cell each: its number, on red or blue where it is told from zero, on grey where not."""
    colours, most = mpl.colormaps["RdBu"], 12.0
    for y, method in enumerate(gaps.index):
        for x, kind in enumerate(gaps.columns):
            gap = gaps.loc[method, kind]
            fill = colours(0.5 + max(-1.0, min(1.0, gap / most)) * 0.42) if told.loc[method, kind] else "0.90"
            axes.add_patch(mpl.patches.Rectangle((x, y), 1, 1, facecolor=fill, edgecolor="white", linewidth=2))
            shade = "0.45" if not told.loc[method, kind] else "white" if abs(gap) > 0.75 * most else "0.1"
            axes.text(x + 0.5, y + 0.5, f"{gap:+.1f}", ha="center", va="center", color=shade)
    axes.set(xlim=(0, len(gaps.columns)), ylim=(len(gaps), 0))
    axes.set_xticks([x + 0.5 for x in range(len(gaps.columns))], [KINDS[kind] for kind in gaps.columns])
    axes.set_yticks([y + 0.5 for y in range(len(gaps))], [METHODS[method] for method in gaps.index])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def front(points: pd.DataFrame) -> list[str]:
    """The methods that no other beats at the same traffic or less, by traffic."""
    best, names = float("-inf"), []
    for name, point in points.sort_values(["megabytes", "accuracy"], ascending=[True, False]).iterrows():
        if point["accuracy"] > best:
            best = point["accuracy"]
            names.append(str(name))
    return names


def traffic(axes: Axes, points: pd.DataFrame, named: dict[str, str]) -> None:
    """Mean accuracy against the mean megabytes of a run; the Pareto front is joined and labelled."""
    best = front(points)
    axes.scatter(points["megabytes"], points["accuracy"], s=22, color="0.65", zorder=2)
    axes.plot(points.loc[best, "megabytes"], points.loc[best, "accuracy"], "o-", color="#2166ac", zorder=3)
    for name, point in points.iterrows():
        is_best = name in best
        if is_best or name in named:
            place = {"xytext": (0, 7), "ha": "center"} if is_best else {"xytext": (6, -11), "ha": "left"}
            color = "#2166ac" if is_best else "0.35"
            at = (point["megabytes"], point["accuracy"])
            axes.annotate(named.get(str(name), str(name)), at, textcoords="offset points", color=color, **place)
    axes.set_xscale("symlog", linthresh=0.1)
    axes.set_xlim(left=-0.02)
    axes.set_xticks([0, 0.1, 1, 10, 100], ["0", "0.1", "1", "10", "100"])
    axes.set_ylim(top=points["accuracy"].max() + 5)
    axes.set(xlabel="MB sent in a run, up and down", ylabel="accuracy, %")
    axes.grid(alpha=0.25)


def main() -> None:
    """Write both figures."""
    table = results()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.2, 4.9), dpi=160, layout="constrained")
        heat_map(figure.subplots(), *margins(table))
        figure.suptitle("Points of accuracy over FedAvg's head; grey: 15 seeds can't tell", fontsize=10)
        figure.savefig(HERE / "which-method.png")
        figure = Figure(figsize=(8.2, 4.2), dpi=160, layout="constrained")
        points = table[table["setting"] == SETTING].groupby("method")[["megabytes", "accuracy"]].mean()
        traffic(figure.subplots(), points, LABELLED)
        figure.suptitle("Label skew with a long tail: what accuracy costs", fontsize=10)
        figure.savefig(HERE / "accuracy-and-traffic.png")


if __name__ == "__main__":
    main()
