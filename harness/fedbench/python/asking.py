"""What a call of the Python API asks for, in the words of the command line: ``--set rounds=5`` for ``rounds=5``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fedbench.cli.options import CACHE_DIR, DATA_DIR, all_assignments
from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded
from fedbench.suites.resolve import LISTS

Names = str | Iterable[str]
Folder = str | Path


def assignments(further: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> tuple[str, ...]:
    """``KEY=VALUE`` of keyword arguments and of ``set=``, those that are None left out of the first.

    FedbenchError for a value that no setting has, and for a setting that is given twice.
    """
    if not isinstance(further, Mapping | None):
        raise FedbenchError(f"set={further!r} is none: give a dict, as set={{'fedprox.mu': 0.1}}.")
    given = [(key, value) for key, value in settings.items() if value is not None]
    given += list((further or {}).items())
    return all_assignments([f"{key}={_text(key, value)}" for key, value in given], None)


def names(given: Names | None) -> tuple[str, ...]:
    """One name or several."""
    several = _several(given)
    for one in several:
        if not isinstance(one, str):
            raise FedbenchError(f"{one!r} is a {type(one).__name__}; names are texts, or lists of them.")
    return several


def numbers(given: int | Iterable[int] | None) -> tuple[int, ...]:
    """One seed or several."""
    several = _several(given)
    for one in several:
        if not isinstance(one, Integral) or isinstance(one, bool):
            raise FedbenchError(f"{one!r} is a {type(one).__name__}; seeds are whole numbers, or lists of them.")
    return tuple(map(int, several))


def files(given: Folder | Iterable[Folder] | None) -> tuple[Path, ...]:
    """Plug-in files as absolute paths, which is how loaded modules are recognised."""
    several = _several(given)
    for one in several:
        if not isinstance(one, str | Path):
            raise FedbenchError(f"{one!r} is a {type(one).__name__}; plug-in files are paths, or lists of them.")
    return tuple(Path(one).expanduser().resolve() for one in several)


def folders(data_dir: Folder | None, cache_dir: Folder | None) -> tuple[Path, Path]:
    """Of data and of caches; by default the command line's."""
    data = data_dir or os.environ.get("FEDBENCH_DATA") or DATA_DIR
    cache = cache_dir or os.environ.get("FEDBENCH_CACHE") or CACHE_DIR
    return expanded(Path(data), "data_dir"), expanded(Path(cache), "cache_dir")


def _several(given: Any) -> tuple[Any, ...]:
    """What is given, where it is one or several; nothing for None."""
    if given is None:
        return ()
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


def _text(key: str, value: Any) -> str:
    if isinstance(value, list | tuple) and key in LISTS:
        return json.dumps([str(one) for one in value], ensure_ascii=False)
    if isinstance(value, list | tuple):  # a sweep
        return ",".join(_text(key, one) for one in value)
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | Path):
        return str(value)
    raise FedbenchError(f"{key}={value!r} is a {type(value).__name__}; settings are numbers, texts, or lists of them.")
