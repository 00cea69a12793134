"""A leaderboard for readers: tables in the terminal, Markdown, CSV."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_MEGA = 1e6
_COSTS = ("bytes_up", "bytes_down", "train_seconds", "seconds")
_SHORT = {
    "global": "accuracy",
    "domain_mean": "domains",
    "unseen_domain": "unseen",
    "seen_domain": "seen",
    "selected_unseen_domain": "unseen (selected)",
    "selected_seen_domain": "seen (selected)",
    "selected_domain_mean": "domains (selected)",
    "finetuned_mean_client": "fine-tuned",
    "worst_client": "worst",
}
_NONE = "–"


@dataclass(frozen=True)
class _Shown:
    """One table as text: ``best`` holds (line, column) of the cells to set bold, ``settings`` is for the list below."""

    caption: str
    headings: list[str]
    lines: list[list[str]]
    best: set[tuple[int, int]]
    settings: list[dict[str, str]]
    seeds: str


def render_terminal(board: pd.DataFrame) -> RenderableType:
    """Every table of the board under its caption, to print on a rich console; 100 to 120 columns suffice."""
    parts: list[RenderableType] = []
    for shown in _tables(board):
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold", collapse_padding=True)
        for position, heading in enumerate(shown.headings):
            table.add_column(heading, justify="right" if position else "left", no_wrap=position > 0, overflow="fold")
        for number, cells in enumerate(shown.lines):
            styles = ["bold" if (number, position) in shown.best else "" for position in range(len(cells))]
            # Text, because brackets in a plain string would be read as markup
            table.add_row(*(Text(cell, style) for cell, style in zip(cells, styles, strict=True)))
        parts += [Text(shown.caption, "dim"), table]
    return Group(*parts)


def to_markdown(board: pd.DataFrame) -> str:
    """Every table of the board as Markdown, each under its caption and above what its rows were run with."""
    parts = []
    for shown in _tables(board):
        lines = [shown.headings, ["---", *["---:"] * (len(shown.headings) - 1)]]
        for number, cells in enumerate(shown.lines):
            lines.append([f"**{c}**" if (number, i) in shown.best else c for i, c in enumerate(cells)])
        rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        parts.append("\n".join([shown.caption, "", *rows, "", *_settings_list(shown)]))
    return "\n\n".join(parts) + "\n"


def to_csv(board: pd.DataFrame, path: Path) -> None:
    """The board with unrounded means and standard deviations in columns of their own; costs in bytes and seconds."""
    board.to_csv(path, index=False)


def _tables(board: pd.DataFrame) -> Iterator[_Shown]:
    if board.empty:
        return
    for _, block in board.groupby("block"):
        named = [str(c).removesuffix("_mean") for c in block if str(c).endswith("_mean")]
        metrics = [n for n in named if n not in (*_COSTS, "delta") and block[f"{n}_mean"].notna().any()]
        texts = {_heading(m): [_spread(*pair) for pair in _pairs(block, m)] for m in metrics}
        best = {}
        for metric in metrics:
            # all that look best at the shown precision
            rounded = block[f"{metric}_mean"].round(1)
            best[_heading(metric)] = (rounded == rounded.max()).tolist()
        if (block["delta_seeds"] > 0).any():
            texts[f"Δ {block['baseline'].iloc[0].partition(' · ')[0]}"] = [
                _spread(*pair, sign="+") for pair in _pairs(block, "delta")
            ]
        texts["MB"] = [_megabytes(n) for n in block["bytes_up_mean"] + block["bytes_down_mean"]]
        texts["train s"] = [_NONE if pd.isna(s) else f"{s:.1f}" for s in block["train_seconds_mean"]]
        labels, shared = _without_shared_backbone([str(row) for row in block["row"]])
        headings = ["method" if shared else "row", *texts]
        lines = [[label, *(texts[h][i] for h in texts)] for i, label in enumerate(labels)]
        marked = {
            (line, headings.index(heading))
            for heading, flags in best.items()
            for line, flag in enumerate(flags)
            if flag and len(block) > 1
        }
        caption = f"{block['caption'].iloc[0]}" + (f" · {shared}" if shared else "")
        seeds = int(block["seeds"].iloc[0])
        told = f"{seeds} seeds, mean ± sample std" if seeds > 1 else "1 seed"
        settings = [json.loads(text) for text in block["settings"]]
        which = f"seed{'s' if seeds > 1 else ''} {block['seed_list'].iloc[0]}"
        yield _Shown(f"{caption} · {told}; MB up and down", headings, lines, marked, settings, which)


def _settings_list(shown: _Shown) -> Iterator[str]:
    """What all rows share in one line, then a line a row with its method's parameters and what else is its own."""
    first = shown.settings[0]
    # a dot: a method's parameter, the row's own even where the table has no other row
    common = {k for k, v in first.items() if "." not in k and all(other.get(k) == v for other in shown.settings)}
    yield f"All rows: {_assigned({key: first[key] for key in first if key in common})}"
    yield ""
    for (label, *_), settings in zip(shown.lines, shown.settings, strict=True):
        own = _assigned({key: value for key, value in settings.items() if key not in common})
        yield f"- {label}, {shown.seeds}" + (f": {own}" if own else "")


def _assigned(settings: dict[str, str]) -> str:
    return ", ".join(f"`{key}={value}`" for key, value in settings.items())


def _without_shared_backbone(rows: list[str]) -> tuple[list[str], str]:
    """The rows' names without the backbone where all have the same one, and that backbone."""
    backbones = {row.partition(" · ")[2].partition(" [")[0] for row in rows}
    shared = backbones.pop()
    return (rows, "") if backbones else ([row.replace(f" · {shared}", "", 1) for row in rows], shared)


def _pairs(block: pd.DataFrame, name: str) -> Iterator[tuple[float, float]]:
    return zip(block[f"{name}_mean"].tolist(), block[f"{name}_std"].tolist(), strict=True)


def _spread(mean: float, std: float, sign: str = "") -> str:
    if pd.isna(mean):
        return _NONE
    # z: a difference that rounds to nothing is not negative
    return f"{mean:{sign}z.1f}" + ("" if pd.isna(std) else f" ± {std:.1f}")


def _heading(metric: str) -> str:
    stem = metric.removesuffix("_accuracy")
    return _SHORT.get(stem, stem.replace("_", " "))


def _megabytes(count: float) -> str:
    if pd.isna(count):
        return _NONE
    size = count / _MEGA
    return f"{size:,.0f}" if size >= 100 else f"{size:.1f}" if size >= 10 else f"{size:.2f}"
