"""Getting a data set out of the ``datasets`` library: from a local folder, the Hub, or earlier downloads from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError, NotHere
from fedbench.core.files import regular
from fedbench.datasets.names import DatasetName

PROBE_SECONDS = 10
"""How long the Hub may take to say whether it knows a data set."""


def load_splits(parsed: DatasetName, folder: Path | None, cache: Path) -> Mapping[str, Any]:
    """``datasets.load_dataset``, with its many errors in one sentence."""
    import datasets

    config = parsed.options.get("config")
    # In memory there would be no Arrow files to tell by whether the data have changed.
    arguments = {"name": config, "cache_dir": str(cache), "keep_in_memory": False}
    # On damaged files the library raises nearly anything: its own errors, pyarrow's, and those of its own mistakes.
    problems = Exception
    for place in filter(None, (folder, cache)):
        _refuse_irregular(place)
    with _quiet(datasets):
        if folder is not None:
            try:
                return dict(datasets.load_dataset(str(folder), **arguments))
            except problems as error:
                raise _unreadable_folder(folder, cache, error) from error
        reached = _reach_hub(parsed.location)
        try:
            with _offline(datasets) if reached is not None else _quiet(datasets):
                return dict(datasets.load_dataset(parsed.location, **arguments))
        except problems as error:
            if reached is not None:
                raise NotHere(
                    f"the Hugging Face Hub can't be reached ({reached}), no earlier download of {parsed.location!r} is "
                    f"in {str(cache)!r}, and no folder of that name exists; check the network or the path."
                ) from error
            raise FedbenchError(
                f"the Hub's data set {parsed.location!r} can't be loaded ({_first_line(error)}); check its name"
                f"{'' if config else ', add ?config=NAME if it has several configurations,'} and the network."
            ) from error


def _refuse_irregular(folder: Path) -> None:
    """FedbenchError for what is no regular file in the folder: the library would wait for ever to read it."""
    for place, _, files in os.walk(folder):
        for name in files:
            try:
                regular(os.path.join(place, name))
            except FileNotFoundError:
                continue  # a link to nothing, or deleted meanwhile: the library says what it misses
            except OSError as error:
                raise FedbenchError(
                    f"{os.path.join(place, name)!r} can't be read ({error.strerror}); move it out of the folder."
                ) from error


def _reach_hub(name: str) -> str | None:
    """None if the Hub knows data set ``name``, else why the Hub can't be reached; an error if it says no."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        # load_dataset itself retries for half a minute without a network; one short question beforehand does not.
        HfApi().dataset_info(name, timeout=PROBE_SECONDS)
    except (HfHubHTTPError, HFValidationError) as error:
        raise FedbenchError(
            f"the Hugging Face Hub has no data set {name!r} that you may read, and no folder of that name exists "
            f"({_first_line(error)}); check the spelling, or log in with hf auth login."
        ) from error
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except Exception as error:  # the HTTP library, and so its errors, differ between versions of huggingface_hub
        return _first_line(error)
    return None


@contextmanager
def _offline(datasets: Any) -> Iterator[None]:
    """Look at earlier downloads only. The libraries read this from the environment once, and take no argument."""
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Without the library's progress bars, which would break into ours, and what it logs before it raises."""
    were_on, level = datasets.are_progress_bars_disabled() is False, datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if were_on:
            datasets.enable_progress_bars()


def _unreadable_folder(folder: Path, cache: Path, error: Exception) -> FedbenchError:
    import pyarrow.parquet

    files = sorted(folder.rglob("*.parquet"))
    for file in files:
        try:
            pyarrow.parquet.ParquetFile(file).close()
        except (OSError, pyarrow.ArrowException) as reason:
            return FedbenchError(
                f"{str(file)!r} is not a whole parquet file ({_first_line(reason)}); copy or download it again."
            )
    if not files:
        return FedbenchError(f"{str(folder)!r} holds no parquet files ({_first_line(error)}); check the path.")
    return FedbenchError(
        f"{str(folder)!r} can't be loaded ({_first_line(error)}); if the files are fine, delete {str(cache)!r}, the "
        "copy made earlier, and run again."
    )


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__
