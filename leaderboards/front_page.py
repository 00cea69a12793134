"""The two figures of the README, from the committed map: python leaderboards/front_page.py

``which-method.png``: points over FedAvg by method and kind of federation, means over the settings of that kind; grey
where paired seeds can't tell (t-test, Holm over the figure). ``accuracy-and-traffic.png``: the same points over all
settings against what is sent, for all methods that ran in all of them.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedbench_boards.advice.evidence import GLOBAL, SHIPPED, read_evidence
from fedbench_boards.statistics import holm, paired

HERE = Path(__file__).parent
KINDS = {
    "label skew": {
        "none": ", iid",
        "α 0.5": ", α 0.5,",
        "α 0.1": ", α 0.1,",
        "α 0.02": ", α 0.02,",
        "shards": "shards",
    },
    "long tail": {"1": "tail 1,", "10": "tail 10,", "100": "tail 100,"},
    "clients": {"5": " 5 clients", "20": " 20 clients", "100": " 100 clients", "1,000": " 1000 clients"},
    "domains": {"a client": "a domain each"},
    "data": {"toy": "embedded", "CIFAR": "CIFAR-10", "Fashion": "Fashion-MNIST", "PACS": "PACS"},
}
"""Group -> kind -> what the names of its settings have. Settings with domains count there and under data only."""
DOMAINS = "a domain each"
METHODS = {
    "ccvr": "CCVR",
    "fedpft": "FedPFT",
    "tau-norm": "τ-norm",
    "fedadam": "FedAdam",
    "fedrod": "FedRoD",
    "logit-adjustment": "logit adjustment",
    "scaffold": "SCAFFOLD",
    "creff": "CReFF",
    "clip2fl": "CLIP2FL",
    "fedglcl": "FedGLCL",
    "fedclip": "FedCLIP",
    "taskres": "TaskRes",
    "capt": "CAPT (toy only)",
    "promptfl": "PromptFL (toy only)",
    "fst-cbdg (no labels)": "FST-CBDG, no labels",
    "clip-zs": "zero-shot, no training",
}
LABELLED = {
    **{
        name: METHODS[name]
        for name in ("clip-zs", "ccvr", "fedpft", "tau-norm", "creff", "clip2fl", "fedglcl", "fedclip")
    },
    **{"fedavg": "FedAvg's head", "feddyn": "FedDyn", "fst-cbdg (no labels)": METHODS["fst-cbdg (no labels)"]},
}
BASELINE = "fedavg"
STYLE = {"font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def margins(runs: pd.DataFrame) -> pd.DataFrame:
    """Points over `BASELINE`, (setting, seed) x methods."""
    scores = runs.pivot_table(index=["setting", "seed"], columns="label", values=GLOBAL)
    return scores.sub(scores[BASELINE], axis=0)


def by_kind(gaps: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Means over the settings of a kind, (methods x (group, kind)), and whether Holm's p over all is below 0.05.

    NaN where a method ran in fewer than three settings of a kind.
    """
    kinds = [(group, kind, part) for group, parts in KINDS.items() for kind, part in parts.items()]
    names = gaps.index.get_level_values("setting")
    means, p_values = np.full((len(METHODS), len(kinds)), np.nan), np.ones((len(METHODS), len(kinds)))
    for column, (group, _, part) in enumerate(kinds):
        with_domains = group in ("domains", "data")
        of_kind = gaps[[part in name and (with_domains or DOMAINS not in name) for name in names]]
        for row, method in enumerate(METHODS):
            values = of_kind[method].dropna()
            if values.index.get_level_values("setting").nunique() >= 3:
                by_seed = values.groupby("seed").mean().tolist()
                means[row, column] = values.mean()
                p_values[row, column] = paired(by_seed, [0.0] * len(by_seed)).p_value
    columns = pd.MultiIndex.from_tuples([(group, kind) for group, kind, _ in kinds])
    told = np.reshape(holm(p_values.ravel().tolist()), means.shape) < 0.05
    return pd.DataFrame(means, [*METHODS], columns), pd.DataFrame(told, [*METHODS], columns)


def heat_map(axes: Axes, gaps: pd.DataFrame, told: pd.DataFrame) -> None:
    """A cell each: its number, on red or blue where it is told from zero, on grey where not."""
    colours, most, gap_between = mpl.colormaps["RdBu"], 12.0, 0.25
    groups = [group for group, _ in gaps.columns]
    starts = np.cumsum([0.0] + [1 + gap_between * (a != b) for a, b in zip(groups, groups[1:], strict=False)])
    for y, method in enumerate(gaps.index):
        for x, column in zip(starts, gaps.columns, strict=True):
            gap = gaps.loc[method, column]
            if np.isnan(gap):
                continue
            fill = colours(0.5 + max(-1.0, min(1.0, gap / most)) * 0.42) if told.loc[method, column] else "0.90"
            axes.add_patch(mpl.patches.Rectangle((x, y), 1, 1, facecolor=fill, edgecolor="white", linewidth=2))
            shade = "0.45" if not told.loc[method, column] else "white" if abs(gap) > 0.75 * most else "0.1"
            axes.text(x + 0.5, y + 0.5, f"{gap:+.1f}", ha="center", va="center", color=shade, fontsize=7.5)
    for group in KINDS:
        middle = np.mean([x for x, of in zip(starts, groups, strict=True) if of == group]) + 0.5
        axes.text(middle, -0.95, group, ha="center", va="bottom", weight="bold")
    axes.set(xlim=(0, starts[-1] + 1), ylim=(len(gaps), 0))
    axes.set_xticks(starts + 0.5, [kind for _, kind in gaps.columns], fontsize=8)
    axes.set_yticks([y + 0.5 for y in range(len(gaps))], [METHODS[method] for method in gaps.index])
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.spines[:].set_visible(False)


def front(points: pd.DataFrame) -> list[str]:
    """The methods that no other beats at the same traffic or less, by traffic."""
    best, names = float("-inf"), []
    for name, point in points.sort_values(["traffic", "margin"], ascending=[True, False]).iterrows():
        if point["margin"] > best:
            best = point["margin"]
            names.append(str(name))
    return names


def traffic(axes: Axes, points: pd.DataFrame) -> None:
    """Mean margins against traffic; the Pareto front is joined, `LABELLED` have their names."""
    best = front(points)
    axes.scatter(points["traffic"], points["margin"], s=22, color="0.65", zorder=2)
    axes.plot(points.loc[best, "traffic"], points.loc[best, "margin"], "o-", color="#2166ac", zorder=3)
    for name, words in LABELLED.items():
        color, at = "#2166ac" if name in best else "0.35", tuple(points.loc[name, ["traffic", "margin"]])
        is_above = name in best and at[0] > 0
        place = {"xytext": (0, 8), "ha": "center"} if is_above else {"xytext": (7, -3), "ha": "left"}
        axes.annotate(words, at, textcoords="offset points", color=color, **place)
    axes.set_xscale("symlog", linthresh=0.4, linscale=0.4)
    axes.set_xlim(-0.05, 200)
    axes.set_xticks([0, 1, 3, 10, 30, 100], ["0", "1", "3", "10", "30", "100"])
    axes.set(xlabel="sent in a run, as a multiple of FedAvg's head", ylabel="points over FedAvg's head")
    axes.grid(alpha=0.25)


def main() -> None:
    """Write both figures."""
    runs = read_evidence(HERE / "map" / SHIPPED).runs
    gaps = margins(runs)
    settings = gaps.groupby("setting").mean()
    sent = runs.pivot_table(index="setting", columns="label", values="megabytes")
    everywhere = settings.dropna(axis=1).columns
    ratio = sent.div(sent[BASELINE], axis=0).mean()
    points = pd.DataFrame({"traffic": ratio[everywhere].round(2), "margin": settings[everywhere].mean()})
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10.5, 5.4), dpi=160, layout="constrained")
        heat_map(figure.subplots(), *by_kind(gaps))
        figure.suptitle(
            "Points of accuracy over FedAvg's head, each at its best rate; grey: five seeds can't tell", fontsize=10
        )
        figure.savefig(HERE / "which-method.png")
        figure = Figure(figsize=(8.2, 4.2), dpi=160, layout="constrained")
        traffic(figure.subplots(), points)
        figure.suptitle(f"Accuracy and traffic, means over {len(settings)} federations", fontsize=10)
        figure.savefig(HERE / "accuracy-and-traffic.png")


if __name__ == "__main__":
    main()
