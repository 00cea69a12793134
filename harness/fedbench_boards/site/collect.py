"""Reads the result folders that a site is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded
from fedbench_boards.exchange.folder import BOARD, RESULTS
from fedbench_boards.site.model import ResultsOf, is_own
from fedbench_boards.site.tables import COLUMNS, tables_of, texts

if TYPE_CHECKING:
    from fedbench.suites.suite import Suite

PICTURES = (".png", ".svg")


def read_folders(given: Path) -> list[ResultsOf]:
    """The result folders below ``given``, by name; FedbenchError where there is none, or one that can't be read."""
    folder = expanded(given, "--results")
    if not folder.is_dir():
        raise FedbenchError(f"--results {str(given)!r} is no folder; give one that `fedbench publish` wrote into.")
    folders = [one for one in sorted(folder.iterdir()) if all(is_own(one / name) for name in (RESULTS, BOARD))]
    if not folders:
        raise FedbenchError(
            f"--results {str(given)!r} has no folder with {BOARD} and {RESULTS}; "
            "write one with `fedbench publish --suite NAME`."
        )
    return [_read(one) for one in folders]


def pictures(folder: Path) -> tuple[Path, ...]:
    """The pictures in ``folder``, by name."""
    there = folder.is_dir() and not folder.is_symlink()
    return tuple(sorted(one for one in folder.iterdir() if one.suffix in PICTURES and is_own(one))) if there else ()


def _read(path: Path) -> ResultsOf:
    results = texts(path / RESULTS, ("suite", "seed", "run_id", "started"))
    board = texts(path / BOARD, COLUMNS)
    try:
        tables = tables_of(board)
    except (ValueError, AttributeError) as error:
        raise FedbenchError(f"{str(path / BOARD)!r} can't be read: {error}.") from None
    names = tuple(dict.fromkeys(line["suite"] for line in results if line["suite"]))
    findings = path / "findings.md"
    return ResultsOf(
        path=path,
        suite_names=names,
        tables=tables,
        runs=len(results),
        seeds=tuple(sorted({line["seed"] for line in results}, key=lambda text: (len(text), text))),
        date=max((line["started"][:10] for line in results), default=""),
        commits=tuple(dict.fromkeys(line["commit"][:7] for line in results if line.get("commit"))),
        commands=tuple(dict.fromkeys(command for line in results for command in _commands(line))),
        licence=_licence(path),
        findings=findings.read_text(encoding="utf-8", errors="replace") if is_own(findings) else "",
        figures=pictures(path / "figures"),
        suite=_suite(names),
    )


def _commands(line: dict[str, str]) -> list[str]:
    try:
        known = json.loads(line.get("made_by") or "[]")
    except ValueError:
        return []
    return [str(one) for one in known] if isinstance(known, list) else []


def _licence(path: Path) -> str:
    from fedbench_boards.exchange.manifest import MANIFEST, read_manifest

    return read_manifest(path).licence if is_own(path / MANIFEST) else ""


def _suite(names: tuple[str, ...]) -> Suite | None:
    from fedbench.suites.suite import load_suite, suite_names

    return load_suite(names[0]) if len(names) == 1 and names[0] in suite_names() else None
