"""The kinds of figures of stored runs, for ``fedbench figure`` and ``Results.plot``."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.rounds.loop import predict, start
from fedbench.rounds.run import Run
from fedbench.rounds.state import RunState
from fedbench.runs.prepare import Settings
from fedbench.suites.suite import Suite
from fedbench.toolkit.fedavg import EVALUATION_BATCH
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard import drawing
from fedbench_boards.leaderboard.drawing import by_row, rows_of, swept
from fedbench_boards.leaderboard.own_models import OF_GROUPS, ranks_own_models, with_global_models
from fedbench_boards.leaderboard.reading import metric_named
from fedbench_boards.leaderboard.results import GROUPS, load_curves, load_measured, load_rounds

MOST_POINTS = 1000
"""The number of samples whose features are embedded: the first of the test split."""
_CLUSTERS = re.compile(r"(.*?)\.?clusters")


def entropies(run: Run, state: RunState) -> NDArray[np.float64]:
    """Entropy in bits of the prediction for every test sample, (n,). FedbenchError for a model without scores."""
    scores = predict(run, state, run.test).scores
    if scores is None:
        raise FedbenchError(f"{run.spec.method} gives no scores of its predictions; choose other rows.")
    bits: NDArray[np.float64] = (torch.special.entr(scores.double().softmax(1)).sum(1) / math.log(2)).cpu().numpy()
    return bits


@torch.no_grad()
def embedded(run: Run, state: RunState) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """t-SNE's plane (n, 2) of test samples as the model sees them, and their classes (n,).

    It embeds a sample's features, or its logits if the encoder is frozen, since prompts and heads differ only in these;
    both at unit length. Van der Maaten and Hinton, JMLR 2008, as in scikit-learn, with a fixed seed. FedbenchError for
    too few samples.
    """
    from sklearn.manifold import TSNE

    rows = torch.arange(min(len(run.test), MOST_POINTS))
    tensors = {**state.weights, **state.buffers}
    parts = [run.model.forward(tensors, run.test.read(some), False) for some in torch.split(rows, EVALUATION_BATCH)]
    seen = [part.features.flatten(1) if run.model.encoder is None else part.logits for part in parts]
    features = normalize(torch.cat(seen), dim=1).cpu().numpy()
    perplexity = min(30.0, (len(rows) - 1) / 3)
    if perplexity < 1:
        raise FedbenchError(f"{len(rows)} test samples are too few to embed.")
    plane = TSNE(perplexity=perplexity, init="pca", random_state=0).fit_transform(features)
    return plane, run.scored.test.labels[rows].numpy()


def clusters(run: Run) -> dict[str, NDArray[np.int64]]:
    """The cluster of every client (N,), by the tensors that are averaged within clusters; empty if a method forms
    none."""
    state = run.initial_state()
    start(run, state)
    by_tensor = {}
    for tensors in state.server.values():
        for name, tensor in tensors.items():
            named = _CLUSTERS.fullmatch(name)
            if named and tensor.shape == (len(run.federation.clients),):
                by_tensor[named[1] or "clusters"] = tensor.cpu().numpy()
    return by_tensor


ACCURACY = "accuracy"
"""The kind with one accuracy by round, a line a row."""
_OF_MODELS = ("entropies", "embedding", "holdings")
_ONE_SETTING = (ACCURACY, "rounds", "gains", "layers", *_OF_MODELS)
_MOST_PANELS = 4
KINDS = ("sweep", "rounds", "gains", "gap", "layers", *_OF_MODELS)


def drawn(
    kind: str,
    uri: str,
    suite: Suite,
    results: pd.DataFrame,
    settings: Settings,
    *,
    by: tuple[str, ...] = (),
    metric: str | None = None,
    setting: str | None = None,
    methods: tuple[str, ...] = (),
    baseline: str | None = None,
) -> Figure:
    """The figure, one of `KINDS` or `ACCURACY`, of ``results``, finished runs in the store at ``uri``.

    ``by`` are the settings on the axes; the suite decides what is None. FedbenchError for what the runs don't have.
    """
    if kind not in (ACCURACY, *KINDS):
        raise unknown_name("kind of figure", kind, (ACCURACY, *KINDS))
    results = _chosen(results, setting, methods)
    if kind in _ONE_SETTING and results["setting"].nunique() > 1:
        raise FedbenchError(f"{kind} are of one setting; choose one with --setting.")
    headline = suite.headline_of(setting or "")
    with drawing.style():
        if kind in _OF_MODELS:
            return _of_models(kind, uri, results, settings)
        if kind in (ACCURACY, "rounds"):
            return _of_rounds(uri, results, metric, headline, () if kind == ACCURACY else GROUPS)
        if kind == "layers":
            return _of_layers(uri, results, metric or "cka_global")
        return _of_results(kind, results, metric or headline, by, baseline or suite.baseline)


def _chosen(results: pd.DataFrame, setting: str | None, methods: Collection[str]) -> pd.DataFrame:
    if setting is not None:
        if setting not in set(results["setting"]):
            raise unknown_name("setting of these runs", setting, sorted(set(results["setting"])))
        results = results[results["setting"] == setting]
    for method in methods:
        if method not in set(results["method"]):
            raise unknown_name("method of these runs", method, sorted(set(results["method"])))
    return results[results["method"].isin(methods)] if methods else results


def owners_of(results: pd.DataFrame) -> dict[str, str]:
    """MLflow id -> name of the row, as in `rows_of`."""
    return {str(run): name for name, runs in rows_of(results).items() for run in runs["mlflow_id"]}


def _of_rounds(uri: str, results: pd.DataFrame, metric: str | None, headline: str, groups: Sequence[str]) -> Figure:
    """An accuracy by round with those of the ``groups``, or a metric that a method reports or measures."""
    if metric is not None and not ranks_own_models(metric):
        names = [metric, *(f"{metric}/{group.removesuffix('_accuracy')}" for group in groups)]
        measured = load_rounds(uri, results, names)
        if metric in measured:
            return drawing.rounds(measured, owners_of(results), names)
    ranked = metric_named(results, metric) if metric else headline
    names = list(dict.fromkeys([ranked, *(OF_GROUPS if groups and ranks_own_models(ranked) else groups)]))
    curves = load_curves(uri, results, *names)
    if metric is None and (ranked not in curves or curves.dropna(subset=[ranked])["mlflow_id"].is_unique):
        # what is ranked is of one round of every run, such as the one that is best on validation data
        names = ["global_accuracy", *groups]
    return drawing.rounds(curves, owners_of(results), names)


def _of_layers(uri: str, results: pd.DataFrame, metric: str) -> Figure:
    prefix = f"{metric.rstrip('/')}/"
    values = load_measured(uri, results, prefix)
    rows = {row: values.loc[runs.index].dropna(axis=1) for row, runs in rows_of(results).items()}
    rows = {row: of for row, of in rows.items() if not of.empty}
    if not rows:
        raise FedbenchError(f"these runs have measured no {metric} of layers; run cka+METHOD.")
    return drawing.layers(rows, prefix)


def _of_models(kind: str, uri: str, results: pd.DataFrame, settings: Settings) -> Figure:
    """Figures of the rows' recorded models, those of each row's first seed."""
    from fedbench.tracking.evaluation import recorded_model

    first = {row: str(runs["mlflow_id"].iloc[0]) for row, runs in rows_of(results).items()}
    if len(first) > _MOST_PANELS:
        raise FedbenchError(f"{len(first)} rows are too many panels; choose up to {_MOST_PANELS} by --method.")
    recorded = {row: recorded_model(uri, run, settings) for row, run in first.items()}
    info = next(iter(recorded.values())).run.info
    if kind == "entropies":
        values = {row: entropies(model.run, model.state) for row, model in recorded.items()}
        return drawing.entropies(values, len(info.classnames))
    if kind == "embedding":
        planes = {row: embedded(model.run, model.state) for row, model in recorded.items()}
        return drawing.embedding(planes, info.classnames)
    ways = {way: own for model in recorded.values() for way, own in clusters(model.run).items()}
    return drawing.holdings(info.class_counts, info.classnames, ways)


def _of_results(kind: str, results: pd.DataFrame, metric: str, by: tuple[str, ...], baseline: str) -> Figure:
    # rows with one model for all are there by it, as in tables
    results = with_global_models(results, ("personal_mean_client_accuracy",))
    metric = metric if kind == "gap" else metric_named(results, metric)
    if kind == "gains":
        metrics = list(dict.fromkeys([metric, *GROUPS]))
        return drawing.gains(by_row(results, metrics), baseline, metrics)
    if not 1 <= len(by) <= (2 if kind == "sweep" else 1):
        raise FedbenchError(f"a figure of the kind {kind} needs --by KEY, a setting that has several values.")
    if kind == "gap":
        results = results.assign(**{FINAL + "head minus tail": results.get(f"{FINAL}head_accuracy", float("nan"))})
        results[FINAL + "head minus tail"] -= results.get(f"{FINAL}tail_accuracy", float("nan"))
        metric = "head minus tail"
        if results[FINAL + metric].isna().all():
            raise FedbenchError("no run has an accuracy of head and tail classes.")
    series = swept(results[results[FINAL + metric].notna()], by, metric)
    if len(by) == 1:
        return drawing.lines(series, by[0], metric)
    if len(series) > 1:
        raise FedbenchError(f"a grid is of one method; choose one of {', '.join(series)} with --method and --setting.")
    ((name, points),) = series.items()
    return drawing.grid(points, by, metric, name)
