"""``hf:NAME_OR_PATH``: a data set of the Hugging Face Hub, or a local folder of parquet files, through ``datasets``.

Columns are found by feature type: the one Image column, the one ClassLabel column. Where a file was written without
feature types, an image is a struct of ``bytes`` and ``path``, and the one integer column is the label. Options:
``image=``, ``label=``, ``domain=``, ``client=`` name columns; ``train=``, ``test=`` name splits (default ``train``, and
``test`` or ``validation`` where there is one); ``config=`` a configuration of the data set; ``size=N`` as for folders;
``classnames=FILE`` or ``classnames=a,b,c`` (in label order), by default ``classnames.json`` or ``classnames.txt`` in a
local folder.

Integer labels have no names. A folder or Hub data set called cifar10, cifar100 or fashion-mnist gets the published ones
if their number fits, and ``names=cifar10`` says so of a data set called otherwise; all others need ``classnames=`` or a
file of names.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedbench.core.errors import FedbenchError, NotHere, unknown_name
from fedbench.core.federation import Dataset
from fedbench.core.files import looked_up, read_bytes
from fedbench.datasets.classnames import LABEL_ORDERS, class_words, label_order, words_for
from fedbench.datasets.content import MOST_CLASSES, SPLITS, dataset_of, numbered
from fedbench.datasets.sources import Asked, TableOptions

if TYPE_CHECKING:
    import pandas as pd

log = logging.getLogger(__name__)

TESTS = ("test", "validation", "valid", "val")
PROBE_SECONDS = 10
"""How long the Hub may take to say whether it knows a data set."""


def load(asked: Asked[TableOptions]) -> Dataset:
    """The data set's train and test splits."""
    folder, copy = _local(asked), asked.cache_dir / "huggingface"
    whole = _load_splits(asked, folder, copy)
    train = _choose_split(asked, whole, "train", ("train",))
    assert train is not None, "there is always a split to train on"
    test = _choose_split(asked, whole, "test", [name for name in TESTS if name != train])
    names = dict(zip(SPLITS, (train, test), strict=True))
    chosen = {role: whole[name] for role, name in names.items() if name is not None}
    columns = _choose_columns(asked, chosen["train"].features)
    table = _table(asked, names, chosen, columns)
    raw = [str(name) for name in table["label"].cat.categories]
    classnames = _classnames(asked, folder, raw)
    from huggingface_hub.constants import HF_HUB_CACHE

    roots = [Path(os.path.realpath(root)) for root in (folder, copy, HF_HUB_CACHE) if root]

    def images(part: pd.DataFrame) -> ImageColumn:
        role = part["split"].iloc[0]
        return _images_of(chosen[role], f"{asked.location}: {names[role]}", columns["image"], roots)

    return dataset_of(table, images, classnames, asked)


def _local(asked: Asked[TableOptions]) -> Path | None:
    """The folder that is meant; None where it can only be a name on the Hub."""
    location = asked.location
    is_path = location.startswith((".", "/", "~")) or location.count("/") > 1
    what = "data set folder"
    here = (looked_up(place, what).exists() for place in (location, asked.data_dir / location))
    if not is_path and not any(here):
        return None
    folder = asked.find(location, what)
    if not folder.is_dir():
        raise FedbenchError(f"{str(folder)!r} is not a folder; name the folder that holds the parquet files.")
    return folder


def _choose_split(asked: Asked[TableOptions], splits: Mapping[str, Any], role: str, names: Sequence[str]) -> str | None:
    known = ", ".join(splits)
    wanted: str | None = getattr(asked.options, role)
    if wanted is not None:
        if wanted not in splits:
            raise FedbenchError(f"{asked.location!r} has no split {wanted!r}; type ?{role}=NAME with one of {known}.")
        return wanted
    matches = [name for name in names if name in splits][:1]
    if role == "train" and not matches:
        if len(splits) > 1:
            raise FedbenchError(f"{asked.location!r} has no split 'train'; type ?train=NAME with one of {known}.")
        matches = list(splits)
    return matches[0] if matches else None


def _table(
    asked: Asked[TableOptions], names: Mapping[str, str | None], chosen: Mapping[str, Any], columns: Mapping[str, str]
) -> pd.DataFrame:
    """Split, label, domain and client of every sample of the splits ``chosen``; ``names`` is what they are called."""
    import pandas as pd  # takes half a second

    parts = []
    for role, split in chosen.items():
        cells: dict[str, Any] = {"split": [role] * len(split)}
        for option in ("label", "domain", "client"):
            column = columns.get(option)
            if column is None or (option == "client" and role == "test" and column not in split.features):
                continue
            if column not in split.features:
                raise FedbenchError(
                    f"{asked.location!r}: split {names[role]!r} has no column {column!r}; choose another split."
                )
            cells[option] = _cells(split, column)
            if not cells[option] or None in cells[option]:
                raise FedbenchError(
                    f"{asked.location!r}: column {column!r} of split {names[role]!r} has empty cells; choose another."
                )
        _cells(split, columns["image"], read=False)
        parts.append(pd.DataFrame(cells, dtype=object))
    table = pd.concat(parts, ignore_index=True)
    features = chosen["train"].features
    for option in table.columns.drop("split"):
        column = columns[option]
        table[option] = _categories(f"{asked.location!r}: column {column!r}", features[column], table[option], option)
    return table


def _cells(split: Any, column: str, *, read: bool = True) -> list[Any]:
    """A column's values; FedbenchError where the library's copy is damaged such that reading it would crash."""
    import pyarrow

    try:
        split.data.column(column).validate(full=True)
        return split.data.column(column).to_pylist() if read else []
    except pyarrow.ArrowException as error:
        files = _files(split)
        raise FedbenchError(f"the copy of the data in {files[0]!r} is damaged; {_remedy(files)}.") from error


def _categories(where: str, feature: Any, values: pd.Series[Any], option: str) -> pd.Categorical:
    """Class labels by their names, strings in order, whole numbers as they are: labels from 0, clients by size."""
    names = getattr(feature, "names", None)
    numbers = [value for value in values if isinstance(value, int)]
    if not numbers or (names is None and option == "client"):
        return numbered(values)
    if min(numbers) < 0:
        raise FedbenchError(f"{where} has labels below 0; choose another split.")
    if max(numbers) >= (MOST_CLASSES if names is None else len(names)):
        raise FedbenchError(
            f"{where} has the label {max(numbers)}, which is no class; choose another column with ?{option}=COLUMN, or "
            "get the data again."
        )
    names = [str(number) for number in range(max(numbers) + 1)] if names is None else names
    return numbered([names[value] if isinstance(value, int) else None for value in values], names)


def _files(split: Any) -> list[str]:
    """The Arrow files that a split lies in."""
    return [file["filename"] for file in split.cache_files]


def _classnames(asked: Asked[TableOptions], folder: Path | None, raw: Sequence[str]) -> tuple[str, ...]:
    if list(raw) != [str(number) for number in range(len(raw))]:
        return class_words(asked, raw, folder)
    if asked.options.names is not None:
        # a copy may lack the last classes; the class list is that of the data set all the same
        raw = [str(number) for number in range(max(len(raw), len(label_order(asked.options.names))))]
    called = (folder or Path(asked.location)).resolve().name.lower().replace("_", "-")
    order = LABEL_ORDERS.get(called, ())
    published = dict(zip(raw, words_for(order, called), strict=True)) if len(order) == len(raw) else None
    return class_words(asked, raw, folder, published)


# --- columns

_FITTING = {"label": ("classes", "strings", "numbers"), "domain": ("classes", "strings"), "image": ("image",)}
_FITTING["client"] = _FITTING["label"]


def _choose_columns(asked: Asked[TableOptions], features: Mapping[str, Any]) -> dict[str, str]:
    """The columns by option: those that are named; image and label are otherwise the only columns of their type."""
    kinds = {name: _kind(feature) for name, feature in features.items()}
    chosen = {option: column for option in _FITTING if (column := getattr(asked.options, option)) is not None}
    for option, column in chosen.items():
        if column not in features:
            raise unknown_name(f"column of {asked.location!r}", column, features)
        if kinds[column] not in _FITTING[option]:
            holds = {"image": "images", "domain": "class labels and no strings"}.get(
                option, "class labels, no strings and no whole numbers"
            )
            raise FedbenchError(
                f"{asked.location!r}: column {column!r} holds no {holds}; type ?{option}=COLUMN with another."
            )
    free = {name: kind for name, kind in kinds.items() if name not in chosen.values()}
    # parquet written by other tools carries plain integers
    labels = "classes" if "classes" in free.values() else "numbers"
    for option, kind in (("image", "image"), ("label", labels)):
        if option not in chosen:
            fitting = [name for name in free if free[name] == kind]
            if len(fitting) != 1:
                several = (
                    f"several {option} columns ({', '.join(fitting)})" if fitting else f"no {option} column by its type"
                )
                raise FedbenchError(
                    f"{asked.location!r} has {several}; choose with ?{option}=COLUMN, one of "
                    f"{', '.join(fitting or features)}."
                )
            chosen[option] = fitting[0]
    return chosen


def _kind(feature: Any) -> str:
    """What a column holds: one ``image`` a row, ``classes``, ``strings``, ``numbers``, or "" for anything else."""
    import datasets

    # written without feature types, an Image column shows as the struct it is stored as
    if isinstance(feature, datasets.Image) or (isinstance(feature, dict) and set(feature) == {"bytes", "path"}):
        return "image"
    if isinstance(feature, datasets.ClassLabel):
        return "classes"
    dtype = str(getattr(feature, "dtype", ""))
    if dtype in ("string", "large_string"):
        return "strings"
    return "numbers" if dtype.startswith(("int", "uint")) else ""


@dataclass(frozen=True)
class ImageColumn:
    """The image column of one split as encoded images."""

    where: str
    files: Sequence[str]
    """The Arrow files the split lies in, made once by the library."""
    contents: Any
    """Bytes of each image, a pyarrow ChunkedArray."""
    paths: Any
    """Paths of images that are stored beside the table, likewise."""
    roots: Sequence[Path]
    """Folders they may lie in: a path is part of the data, and those may be anybody's."""

    def __len__(self) -> int:
        return len(self.contents)

    def name(self, index: int) -> str:
        return f"{self.where}, row {index}"

    def read(self, index: int) -> bytes:
        data: bytes | None = self.contents[index].as_py()
        if data is not None:
            return data
        path = self.paths[index].as_py()
        if path is not None and not any(Path(os.path.realpath(path)).is_relative_to(root) for root in self.roots):
            raise FedbenchError(f"{self.name(index)}: the path {path!r} leads out of the data set; nothing was read.")
        try:
            return read_bytes(path)
        except (OSError, TypeError, ValueError) as error:
            raise FedbenchError(f"{self.name(index)} has no image: {path!r} can't be read; get it again.") from error

    def stamp(self) -> str:
        """Over the Arrow files' paths, and sizes and times of change of images beside them.

        The library writes an Arrow file once, at a path named by the source's version: one that differs is damaged.
        """
        beside = self.paths.filter(self.contents.is_null()).drop_null().to_pylist() if self.contents.null_count else []
        seen = [(path, os.stat(path)) for path in beside if os.path.isfile(path)]
        times = [f"{path} {status.st_size} {status.st_mtime_ns}" for path, status in seen]
        return " ".join([self.where, *self.files, *times])

    def remedy(self) -> str:
        return _remedy(self.files)


def _remedy(files: Sequence[str]) -> str:
    """What to do about a damaged copy of the library's."""
    folder = str(Path(files[0]).parent)
    return f"that is a copy, so delete it and run again: rm -r {shlex.quote(folder)}"


def _images_of(split: Any, where: str, column: str, roots: Sequence[Path]) -> ImageColumn:
    """The image ``column`` of a split of the library."""
    import pyarrow.compute

    struct = split.data.column(column)
    return ImageColumn(
        where,
        _files(split),
        pyarrow.compute.struct_field(struct, "bytes"),
        pyarrow.compute.struct_field(struct, "path"),
        roots,
    )


# --- the library


def _load_splits(asked: Asked[TableOptions], folder: Path | None, cache: Path) -> Mapping[str, Any]:
    """``datasets.load_dataset``, with its many errors in one sentence."""
    import datasets

    config = asked.options.config
    # In memory there would be no Arrow files to tell by whether the data have changed.
    arguments = {"name": config, "cache_dir": str(cache), "keep_in_memory": False}
    # On damaged files the library raises nearly anything: its own errors, pyarrow's, and those of its own mistakes.
    problems = Exception
    with _quiet(datasets):
        if folder is not None:
            try:
                return dict(datasets.load_dataset(str(folder), **arguments))
            except problems as error:
                raise _unreadable_folder(folder, cache, error) from error
        reached = _reach_hub(asked.location)
        try:
            with _offline(datasets) if reached is not None else _quiet(datasets):
                return dict(datasets.load_dataset(asked.location, **arguments))
        except problems as error:
            if reached is not None:
                raise NotHere(
                    f"the Hugging Face Hub can't be reached ({reached}), no earlier download of {asked.location!r} is "
                    f"in {str(cache)!r}, and no folder of that name exists; check the network or the path."
                ) from error
            raise FedbenchError(
                f"the Hub's data set {asked.location!r} can't be loaded ({_first_line(error)}); check its name"
                f"{'' if config else ', add ?config=NAME if it has several configurations,'} and the network."
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
