"""A leaderboard as files: the runs and the board as CSV, the tables as Markdown and LaTeX."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.files import csv_text, replacing
from fedbench_boards.leaderboard.formats.latex import to_latex
from fedbench_boards.leaderboard.formats.markdown import to_markdown
from fedbench_boards.leaderboard.model import Board, Line, Printed, Table


def to_csv(board: Board) -> str:
    """The board with unrounded means and standard deviations in columns of their own; costs in bytes and seconds."""
    return csv_text(flat(board))


def write(results: pd.DataFrame, board: Board, folder: Path, command: str) -> None:
    """Write ``results.csv`` (a line per run), ``leaderboard.csv``, ``.md`` and ``.tex``.

    ``command`` are the commands that made all of it, a line each. FedbenchError where ``folder`` can't be written.
    """
    texts = {
        "results.csv": csv_text(results),
        "leaderboard.csv": to_csv(board),
        "leaderboard.md": markdown_page(board, command),
        "leaderboard.tex": to_latex(board),
    }
    for name, text in texts.items():
        with replacing(folder / name, "leaderboard", "choose another --output") as temporary:
            temporary.write_text(text, encoding="utf-8")


def markdown_page(board: Board, command: str) -> str:
    """The content of leaderboard.md; ``command`` as for `write`."""
    prompts = "\n".join(f"$ {line}" for line in command.splitlines())
    commands = f"Made by\n\n```console\n{prompts}\n```\n\n" if command else ""
    return f"# Leaderboard\n\n{commands}{to_markdown(board)}"


def flat(board: Board) -> pd.DataFrame:
    """A line per row of every table, numbered by ``block``; cells with several values are JSON."""
    frame = pd.DataFrame(
        [_line(number, table, line) for number, table in enumerate(board.tables) for line in table.lines]
    )
    # whole numbers stay whole beside a row without a rank
    gaps = {name: "Int64" for name in ("rank", "tied_rank") if len(frame) and bool(frame[name].isna().any())}
    return frame.astype(gaps)


def _line(block: int, table: Table, line: Line) -> dict[str, Any]:
    cells = {f"{metric}_{part}": getattr(c, part) for metric, c in line.cells.items() for part in ("mean", "std")}
    delta, milestone = line.delta, line.milestone
    return {
        "block": block,
        "caption": table.caption,
        "baseline": table.baseline,
        "rank": line.rank,
        "row": line.row,
        "label": line.label,
        "setting": line.setting,
        "scale": line.scale,
        "dataset": line.dataset,
        "scenario": line.scenario,
        "method": line.method,
        "backbone": line.backbone,
        "server_data": line.server_data,
        "not_on_unseen": line.not_on_unseen,
        "tuned": line.tuned,
        "tuning": _json(line.tuning),
        "headline": table.headline,
        "runs": _json(line.runs),
        "mlflow_ids": _json(line.mlflow_ids),
        "seeds": len(line.runs),
        **cells,
        **{f"{cost}_mean": value for cost, value in line.costs.items()},
        "seed_list": ", ".join(str(seed) for seed in line.seeds),
        "settings": _json(line.settings),
        "delta_mean": delta.cell.mean,
        "delta_std": delta.cell.std,
        "delta_low": delta.low,
        "delta_high": delta.high,
        "delta_seeds": delta.seeds,
        "p_value": delta.p_value,
        "significance": delta.significance,
        "test": delta.test,
        "baseline_note": delta.note,
        "rounds_to_target_mean": milestone.rounds.mean,
        "rounds_to_target_std": milestone.rounds.std,
        "bytes_to_target_mean": milestone.bytes,
        "seconds_to_target_mean": milestone.seconds,
        "target": milestone.target,
        "target_metric": milestone.metric,
        "target_reached": milestone.text,
        **({} if line.printed is None else _printed(line.printed)),
        "status": line.status.status,
        "failure": line.status.text,
        "failures": _json([vars(failure) for failure in line.status.failures]),
        "untrained": line.untrained,
        "one_for_all": line.one_for_all,
        "shown": _json(table.shown),
        "incomplete": _json(line.incomplete),
        "p_adjusted": delta.p_adjusted,
        "whole": line.whole,
        "tied_rank": line.tied_rank,
        "p_best": line.p_best,
    }


def _printed(printed: Printed) -> Mapping[str, Any]:
    return {
        "published": printed.value,
        "published_delta": printed.delta,
        "published_source": printed.source,
        "published_keys": _json(printed.keys),
        "published_several": _json([{"source": source, "value": value} for source, value in printed.several]),
        "comparable": printed.comparable,
        "differs": printed.differs,
        "differences": _json([[d.aspect, d.printed, d.here] for d in printed.differences]),
        "not_printed": _json(printed.not_printed),
        "published_also": _json([{"source": source, "value": value} for source, value in printed.also]),
        **{f"published_{metric}": one.value for metric, one in printed.metrics.items()},
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
