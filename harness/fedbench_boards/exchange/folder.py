"""A result folder as it is read: its runs, its board, its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded, spreadsheet_text
from fedbench.tracking.schema import FINAL
from fedbench_boards.exchange.manifest import MANIFEST, Manifest, read_manifest

RESULTS, BOARD = "results.csv", "leaderboard.csv"
_REQUIRED = (RESULTS, BOARD, "leaderboard.md", "index.html", MANIFEST)
_WHOLE = ("seed", "num_clients", "cohort_size", "num_train", "num_test", "trainable_parameters", "suite_version")
_OF_RUN = (
    *("suite", "row", "setting", "scale", "method", "backbone", "tune", "dataset", "seed", "rounds", "run_id", "tuned"),
    *("commit", "code_hash", "data_hash", "files_hash", "weights_hash", "suite_hash", "suite_version", "harness_hash"),
    *("scenario_settings", "row_settings", "method_code", "started", "untrained", "made_by", "final/global_accuracy"),
)
_OF_BOARD = ("block", "caption", "rank", "row", "setting", "headline", "seeds", "runs", "failures", "delta_mean")


@dataclass(frozen=True)
class ResultFolder:
    """What `fedbench leaderboard --output` wrote."""

    path: Path
    manifest: Manifest

    @cached_property
    def results(self) -> pd.DataFrame:
        """A line a run, as `fedbench_boards.leaderboard.results.load_results` has them, numbers to the last bit."""
        frame = _texts(self.path / RESULTS, _OF_RUN)
        if frame.empty:
            raise FedbenchError(f"{RESULTS} of {str(self.path)!r} has no run.")
        try:
            for name in frame:
                if name in _WHOLE:
                    frame[name] = frame[name].map(int)
                elif str(name).startswith(FINAL):
                    frame[name] = [float(text or "nan") for text in frame[name]]
            frame["started"] = pd.to_datetime(frame["started"], utc=True, format="ISO8601")
        except ValueError as error:
            raise FedbenchError(f"{RESULTS} of {str(self.path)!r}, column {name}: {error}.") from None
        return frame.assign(untrained=frame["untrained"] == "True")

    @cached_property
    def board(self) -> pd.DataFrame:
        """A line a row of a table, all of them texts."""
        return _texts(self.path / BOARD, _OF_BOARD)


def read_folder(given: Path) -> ResultFolder:
    """The folder; FedbenchError where one of its files or columns is missing."""
    path = expanded(given, "FOLDER")
    if not path.is_dir():
        raise FedbenchError(f"{str(given)!r} is no folder; give one that `fedbench leaderboard --output` wrote.")
    for name in _REQUIRED:
        if not (path / name).is_file():
            raise FedbenchError(
                f"{str(given)!r} has no {name}; write it with `fedbench leaderboard --suite NAME --output FOLDER`."
            )
    return ResultFolder(path, read_manifest(path))


def is_result_folder(place: str) -> bool:
    """Whether results were written to ``place``, and it is no store besides."""
    folder = expanded(place, "PLACE")
    return (folder / RESULTS).is_file() and not (folder / "mlflow.db").exists()


def named(line: Any) -> str:
    """What messages call a run, or a row: setting, row and, of a run, its seed."""
    title = f"{line['setting']} · {line['row']}" if line["setting"] else str(line["row"])
    return f"{title}, seed {line['seed']}" if "seed" in line else title


def _texts(file: Path, needed: tuple[str, ...]) -> pd.DataFrame:
    """The file, every value a text; FedbenchError where it lacks one of the columns ``needed``."""
    try:
        frame = pd.read_csv(file, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:
        raise FedbenchError(f"{str(file)!r} can't be read: {error}.") from None
    missing = [name for name in needed if name not in frame]
    if missing:
        raise FedbenchError(f"{str(file)!r} has no column {', '.join(missing)}.")
    texts = frame.map(spreadsheet_text)
    return texts.rename(columns=lambda name: str(spreadsheet_text(name)))
