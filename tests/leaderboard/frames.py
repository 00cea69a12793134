"""Boards as frames, which tests read and change by column, and back."""

import json
import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from fedbench.suites.suite import single
from fedbench_boards.leaderboard import board
from fedbench_boards.leaderboard.comparable import Difference
from fedbench_boards.leaderboard.formats import flat
from fedbench_boards.leaderboard.model import (
    FINISHED,
    Board,
    Delta,
    Failure,
    Line,
    Milestone,
    Printed,
    PrintedNumber,
    RowStatus,
    ScoreCell,
    Table,
)
from fedbench_boards.leaderboard.reading import ReadResults
from fedbench_boards.leaderboard.results import StoredResults

_TEXTS = ("setting", "scale", "dataset", "scenario", "method", "backbone", "server_data", "not_on_unseen")
_COSTS = ("bytes_up", "bytes_down", "train_seconds", "seconds")
_NO_METRICS = (*_COSTS, "delta", *(f"{cost}_to_target" for cost in ("rounds", "bytes", "seconds")))


def leaderboard(*arguments: Any, **given: Any) -> pd.DataFrame:
    """The leaderboard as a frame."""
    return flat(board.leaderboard(*arguments, **given))


def board_of(frame: pd.DataFrame) -> Board:
    """The board that a frame, as `flat` makes it, stands for; what the frame lacks has its default."""
    blocks = [block.to_dict("records") for _, block in frame.groupby("block", sort=False)] if len(frame) else []
    return Board(tuple(_table(block) for block in blocks))


def _table(block: list[dict[Any, Any]]) -> Table:
    headline = _of(block[0], "headline", "global_accuracy")
    shown = tuple(json.loads(_of(block[0], "shown", json.dumps([headline]))))
    return Table(block[0]["caption"], block[0]["baseline"], headline, shown, tuple(_line(line) for line in block))


def _line(line: Mapping[Any, Any]) -> Line:
    means = [name.removesuffix("_mean") for name in line if name.endswith("_mean")]
    metrics = [name for name in means if name not in _NO_METRICS]
    rank = _of(line, "rank", None)
    return Line(
        row=line["row"],
        label=_of(line, "label", line["row"]),
        **{name: _of(line, name, "") for name in _TEXTS},
        tuned=bool(_of(line, "tuned", False)),
        tuning=json.loads(_of(line, "tuning", "{}")),
        runs=_by_seed(line, "runs"),
        mlflow_ids=_by_seed(line, "mlflow_ids"),
        seeds=tuple(int(seed) for seed in str(line["seed_list"]).split(", ")),
        settings=json.loads(_of(line, "settings", "{}")),
        cells={name: _cell(line, name) for name in metrics},
        costs={name: _of(line, f"{name}_mean", math.nan) for name in _COSTS},
        delta=Delta(
            _cell(line, "delta"),
            int(_of(line, "delta_seeds", 0)),
            *(_of(line, name, math.nan) for name in ("p_value", "p_adjusted")),
            *(_of(line, name, "") for name in ("significance", "test", "baseline_note")),
            *(_of(line, name, math.nan) for name in ("delta_low", "delta_high")),
        ),
        milestone=_milestone(line),
        printed=_printed(line) if "published" in line else None,
        status=RowStatus(
            _of(line, "status", FINISHED),
            _of(line, "failure", ""),
            tuple(Failure(**one) for one in json.loads(_of(line, "failures", "[]"))),
        ),
        untrained=bool(_of(line, "untrained", False)),
        one_for_all=bool(_of(line, "one_for_all", False)),
        incomplete=tuple(json.loads(_of(line, "incomplete", "[]"))),
        rank=None if rank is None else int(rank),
        rank_low=None if rank is None else int(_of(line, "rank_low", rank)),
        rank_high=None if rank is None else int(_of(line, "rank_high", rank)),
        p_best=_of(line, "p_best", math.nan),
        whole=bool(_of(line, "whole", True)),
    )


def _milestone(line: Mapping[Any, Any]) -> Milestone:
    reached, _, seeds = _of(line, "target_reached", "").partition("/")
    metric = _of(line, "target_metric", _of(line, "headline", "global_accuracy"))
    target = _of(line, "target", math.nan)
    spent = (_of(line, f"{cost}_to_target_mean", math.nan) for cost in ("bytes", "seconds"))
    return Milestone(_cell(line, "rounds_to_target"), target, metric, int(reached or 0), int(seeds or 0), *spent)


def _printed(line: Mapping[Any, Any]) -> Printed:
    number = PrintedNumber(
        value=_of(line, "published", math.nan),
        delta=_of(line, "published_delta", math.nan),
        source=_of(line, "published_source", ""),
        several=tuple((one["source"], one["value"]) for one in json.loads(_of(line, "published_several", "[]"))),
        comparable=_of(line, "comparable", ""),
        differs=_of(line, "differs", ""),
        differences=tuple(Difference(*one) for one in json.loads(_of(line, "differences", "[]"))),
        not_printed=tuple(json.loads(_of(line, "not_printed", "[]"))),
    )
    metrics = {_of(line, "headline", "global_accuracy"): number} if number.comparable else {}
    return Printed(**vars(number), metrics=metrics)


def _cell(line: Mapping[Any, Any], name: str) -> ScoreCell:
    return ScoreCell(_of(line, f"{name}_mean", math.nan), _of(line, f"{name}_std", math.nan))


def _by_seed(line: Mapping[Any, Any], name: str) -> dict[int, str]:
    return {int(seed): run for seed, run in json.loads(_of(line, name, "{}")).items()}


def _of(line: Mapping[Any, Any], name: str, default: Any) -> Any:
    value = line.get(name, default)
    return default if value is default or pd.isna(value) else value


def read_of(results: pd.DataFrame, board: Board, curves: pd.DataFrame | None = None, **suite: Any) -> ReadResults:
    """What a page is written of; ``suite`` are fields of its suite."""
    toy = single().model_copy(update={"name": "toy", "description": "", **suite})
    curves = pd.DataFrame({"mlflow_id": []}) if curves is None else curves
    return ReadResults(toy, StoredResults(results, results.iloc[:0]), results, curves, board)
