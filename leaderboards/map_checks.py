"""How far forecasts of the map are off where nothing was measured.

    python leaderboards/map_checks.py federations FOLDER   # runs them, hours; writes map/federations.csv
    python leaderboards/map_checks.py forecasts            # minutes; writes map/forecasts.md

Fifteen federations, five as users describe theirs and ten drawn at random, get advice by the map without the data set
that they are of. Every row with labels then runs on exactly their counts, at its best rate, with `FIRST`
seeds; rows that the advice names, and those within `CLOSE` points of the best, run with `SEEDS`.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fedbench.datasets import load_dataset
from fedbench.tracking.schema import store_uri
from fedbench_boards.advice.advising import NEAR, Advice, Forecaster, rows_to_try, write_replay
from fedbench_boards.advice.evidence import GLOBAL, SHIPPED, Evidence, evidence_of, measures_of, read_evidence
from fedbench_boards.leaderboard.results import load_results

MAP = Path(__file__).parent / "map"
CACHE = Path.home() / ".cache" / "fedbench"
BASELINE, BACKBONE, UNLABELLED = "fedavg", "clip:lite0-minilm", " (no labels)"
DATA = {"CIFAR-10": "hf:data/cifar10", "Fashion-MNIST": "fashion-mnist", "PACS": "imagefolder:data/pacs.tar"}
CLOSE, FIRST, SEEDS = 2.0, 3, 15


@dataclass(frozen=True)
class Federation:
    """Counts are drawn from these."""

    name: str
    data: str
    clients: int
    concentration: float
    """Of the Dirichlet distribution of a client's classes."""
    spread: float
    """Standard deviation of the log of client sizes."""
    largest: int
    """Samples of the largest class."""
    tail: float
    """Largest class over smallest."""
    participation: float

    def counts(self, rng: np.random.Generator, classes: list[str]) -> pd.DataFrame:
        """Counts (clients, classes); clients without a sample are dropped."""
        skew = rng.dirichlet([self.concentration] * len(classes), self.clients) + 1e-9
        shares = skew * rng.lognormal(0.0, self.spread, (self.clients, 1))
        sizes = [round(self.largest * self.tail ** (-place / (len(classes) - 1))) for place in range(len(classes))]
        drawn = [rng.multinomial(size, share / share.sum()) for size, share in zip(sizes, shares.T, strict=True)]
        table = pd.DataFrame(np.stack(drawn, axis=1), columns=classes)
        return table[table.sum(axis=1) > 0].reset_index(drop=True)


NAMED = (
    Federation("a hundred very skewed clients", "CIFAR-10", 100, 0.05, 0.3, 1000, 1, 0.2),
    Federation("a long tail over twenty clients", "Fashion-MNIST", 20, 0.5, 0.5, 1000, 50, 0.5),
    Federation("five hospitals of unequal size", "PACS", 5, 1.0, 0.8, 500, 3, 1.0),
    Federation("a thousand tiny clients", "CIFAR-10", 1000, 0.3, 0.3, 800, 1, 0.05),
    Federation("ten clients alike", "Fashion-MNIST", 10, 100.0, 0.1, 500, 1, 1.0),
)


def drawn_at_random(number: int, seed: int) -> Iterator[Federation]:
    """Federations on the data sets in turn."""
    rng = np.random.default_rng(seed)
    for place in range(number):
        data = [*DATA][place % len(DATA)]
        yield Federation(
            name=f"drawn at random, {place + 1}",
            data=data,
            clients=round(10 ** rng.uniform(0.7, 2.5)),
            concentration=round(10 ** rng.uniform(-1.7, 0.7), 2),
            spread=round(rng.uniform(0, 1), 1),
            largest=round(10 ** rng.uniform(2.3, 2.7 if data == "PACS" else 3.0)),
            tail=round(10 ** max(0.0, rng.uniform(-0.5, 2.0)), 1),
            participation=round(rng.uniform(0.1, 1.0), 2),
        )


def without(evidence: Evidence, data: str) -> Evidence:
    """The evidence of the other data sets."""
    return Evidence(evidence.runs[evidence.runs["dataset"] != data])


def measured(store: Path) -> pd.DataFrame:
    """Accuracy in percent, seeds x rows."""
    uri = store_uri(str(store), to_write=False)
    return evidence_of(uri, load_results(uri, "advised")).runs.pivot(index="seed", columns="label", values=GLOBAL)


def run(evidence: Evidence, number: int, one: Federation, folder: Path) -> dict[str, Any]:
    """Advise, measure, and compare; a line of the table."""
    dataset = DATA[one.data]
    classes = list(load_dataset(dataset, data_dir=Path("data"), cache_dir=CACHE).classnames)
    counts = one.counts(np.random.default_rng([58, number]), classes)
    share = max(one.participation, 1 / len(counts))
    forecaster = Forecaster(without(evidence, dataset), BASELINE)
    advice = forecaster.advise(measures_of(counts.to_numpy(), share))
    store, labelled = folder / "store", [choice.row for choice in advice.choices if UNLABELLED not in choice.row]
    rows = [BASELINE, *(row for row in labelled if row != BASELINE)]

    def fedbench(command: str, rows: list[str], count: int, *options: str) -> None:
        suite = write_replay(evidence.runs, rows, counts, share, dataset, BACKBONE, folder)
        seeds = [word for seed in range(count) for word in ("--seed", str(seed))]
        words = [command, "--suite", str(suite), "--store", str(store), "--jobs", "1", *seeds, *options]
        subprocess.run([sys.executable, "-m", "fedbench", *words], check=True)

    fedbench("map", rows, FIRST, "--output", str(folder))
    means = measured(store).mean()
    named = [choice.row for choice in advice.to_try]
    close = [row for row in rows if row in (BASELINE, *named) or means[row] >= means.max() - CLOSE]
    fedbench("run", close, SEEDS, "--tuned", str(folder / "advised" / "rates.csv"))
    return compared(one, len(counts), advice, measured(store))


def compared(one: Federation, clients: int, advice: Advice, scores: pd.DataFrame) -> dict[str, Any]:
    """What was advised beside what was measured."""
    margins = scores.sub(scores[BASELINE], axis=0).mean()
    fully = margins[scores.notna().sum() == SEEDS]
    named = [choice.row for choice in advice.to_try if choice.row in fully]
    run = [choice for choice in advice.choices if choice.row in margins]
    within = [abs(margins[choice.row] - choice.margin) <= choice.half_width for choice in run]
    gap = fully.max() - fully[named].max()
    settings = {name: getattr(one, name) for name in ("concentration", "spread", "largest", "tail", "participation")}
    return (
        {"federation": one.name, "data": one.data, "clients": clients}
        | settings
        | {
            "steps to the nearest setting": round(min(advice.nearest.values()), 2),
            "far": advice.is_far,
            "named": ", ".join(named),
            "best measured": fully.idxmax(),
            "its margin": round(fully.max(), 2),
            "best of the named": fully[named].idxmax(),
            "points below the best": round(gap, 2),
            "holds": bool(gap <= NEAR),
            "rows": len(within),
            "of them within their interval": sum(within),
        }
    )


def federations(folder: Path) -> None:
    """Write federations.csv, two federations at a time; those that it has are not run again."""
    evidence, file = read_evidence(MAP / SHIPPED), MAP / "federations.csv"
    every = [*NAMED, *drawn_at_random(10, seed=58)]
    lines = pd.read_csv(file).to_dict("records") if file.is_file() else []
    left = [number for number, one in enumerate(every) if one.name not in {line["federation"] for line in lines}]
    with ProcessPoolExecutor(2) as pool:
        for done in as_completed([pool.submit(run, evidence, n, every[n], folder / str(n)) for n in left]):
            lines.append(done.result())
            order = {one.name: place for place, one in enumerate(every)}
            lines.sort(key=lambda line: order[line["federation"]])
            pd.DataFrame(lines).to_csv(file, index=False)


def models(columns: int) -> dict[str, Callable[[], Any]]:
    """What may forecast margins, by name; the forest of `fedbench advise` comes with its own name."""
    from sklearn.dummy import DummyRegressor
    from sklearn.ensemble import ExtraTreesRegressor, GradientBoostingRegressor
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
    from sklearn.linear_model import RidgeCV
    from sklearn.multioutput import MultiOutputRegressor
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def process(lengths: Any) -> Any:
        kernel = ConstantKernel() * RBF(lengths) + WhiteKernel()
        each = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
        return make_pipeline(StandardScaler(), MultiOutputRegressor(each))

    boosting = GradientBoostingRegressor(n_estimators=150, max_depth=2, learning_rate=0.05, random_state=0)
    return {
        "each row's mean": DummyRegressor,
        "ridge regression": lambda: make_pipeline(StandardScaler(), RidgeCV(np.logspace(-2, 3, 12))),
        "5 nearest settings": lambda: make_pipeline(StandardScaler(), KNeighborsRegressor(5, weights="distance")),
        "Gaussian process, one length": lambda: process(2.0),
        "Gaussian process, a length a measure": lambda: process(np.ones(columns)),
        "gradient boosting": lambda: MultiOutputRegressor(boosting),
        "forest (fedbench advise)": lambda: ExtraTreesRegressor(300, min_samples_leaf=2, random_state=0),
    }


def compared_models(evidence: Evidence) -> pd.DataFrame:
    """Each model's forecasts of a data set by the others, over rows that all settings have."""
    margins = Forecaster(evidence, BASELINE).margins.dropna(axis=1)
    inputs = pd.DataFrame([asdict(evidence.places[setting]) for setting in margins.index], margins.index)
    data = evidence.runs.drop_duplicates("setting").set_index("setting")["dataset"].loc[margins.index]
    lines = []
    for name, model in models(inputs.shape[1]).items():
        parts = []
        for each in data.unique():
            out = data == each
            with warnings.catch_warnings(action="ignore"):  # lengths of a process at the end of their range
                fitted = model().fit(inputs[~out], margins[~out])
            parts.append(pd.DataFrame(fitted.predict(inputs[out]), margins.index[out], margins.columns))
        forecasts = pd.concat(parts).loc[margins.index]
        best = [margins.loc[setting, row] for setting, row in forecasts.idxmax(axis=1).items()]
        lines.append(
            {
                "model": name,
                "mean error, points": (forecasts - margins).abs().to_numpy().mean(),
                "first row below the best, points": (margins.max(axis=1) - best).mean(),
                "rows to try for 90 %": rows_to_try(forecasts, margins),
            }
        )
    return pd.DataFrame(lines)


def coverage(evidence: Evidence) -> pd.DataFrame:
    """By data set: what advice by the others alone, with its intervals and numbers of rows, says of each setting."""
    margins = Forecaster(evidence, BASELINE).margins
    data = evidence.runs.drop_duplicates("setting").set_index("setting")["dataset"].loc[margins.index]
    lines = []
    for each in data.unique():
        forecaster = Forecaster(without(evidence, each), BASELINE)
        held, inside, width, numbers = [], [], [], []
        for setting in margins.index[data == each]:
            advice, true = forecaster.advise(evidence.places[setting]), margins.loc[setting].dropna()
            choices = [choice for choice in advice.choices if choice.row in true]
            tried = [choice.row for choice in advice.to_try if choice.row in true]
            held.append(true[[choice.row for choice in choices]].max() - true[tried].max() <= NEAR)
            inside += [abs(true[choice.row] - choice.margin) <= choice.half_width for choice in choices]
            width += [choice.half_width for choice in choices]
            numbers.append(len(advice.to_try))
        lines.append(
            {
                "data left out": each.partition("?")[0],
                "settings": len(held),
                "rows to try": float(np.mean(numbers)),
                "held one near the best": float(np.mean(held)),
                "margins within their interval": float(np.mean(inside)),
                "half an interval, points": float(np.mean(width)),
            }
        )
    return pd.DataFrame(lines)


def markdown(table: pd.DataFrame) -> str:
    """The table as Markdown, with two decimals."""
    rows = [[f"{cell:.2f}" if isinstance(cell, float) else str(cell) for cell in row] for row in table.to_numpy(object)]
    lines = [[*map(str, table.columns)], ["---"] * table.shape[1], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def forecasts() -> None:
    """Write forecasts.md."""
    evidence = read_evidence(MAP / SHIPPED)
    parts = [
        "# How far forecasts of the map are off on data that it does not have",
        f"Every data set is forecast by the others. `python leaderboards/{Path(__file__).name} forecasts` writes this.",
        "## Models",
        compared_models(evidence).pipe(markdown),
        "## What `fedbench advise` says",
        "Intervals and numbers of rows are those that it would have given without the data set, at 90 %.",
        coverage(evidence).pipe(markdown),
    ]
    (MAP / "forecasts.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["federations", folder]:
            federations(Path(folder))
        case ["forecasts"]:
            forecasts()
        case _:
            sys.exit(__doc__)
