"""What is asked for in words, and in Python the same: ``--set rounds=5`` is ``rounds=5``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from fedbench.core.errors import FedbenchError
from fedbench.core.files import expanded

Names = str | Iterable[str]
Folder = str | Path
Sets = tuple[tuple[str, str], ...]
"""Settings and their values, as they are typed."""
DATA_DIR, CACHE_DIR = Path("data"), Path("~/.cache/fedbench")


def all_assignments(given: Sequence[str] | None, further: Sequence[str] | None, **shorthands: str | None) -> Sets:
    """The settings of ``shorthands``, those ``given`` by ``--set``, and those behind it, which need no ``--set``.

    FedbenchError for a word that is none, and for a setting that is set twice.
    """
    from fedbench.suites.resolve import parse_assignment

    texts: dict[object, str] = {}
    words = [f"{key}={value}" for key, value in shorthands.items() if value is not None]
    words += [*(given or ()), *(further or ())]
    for word in words:
        key, sign, _ = word.partition("=")
        if not sign and word in (further or ()):
            raise FedbenchError(
                f"unexpected argument {word!r}: settings are KEY=VALUE, a suite is --suite {word}, a method --method "
                f"{word}."
            )
        first = texts.setdefault(_set_by(key.strip()), word)
        if first != word:
            raise FedbenchError(f"{key.strip()} is set twice, by {first!r} and {word!r}; leave one out.")
    return tuple(map(parse_assignment, words))


def _set_by(key: str) -> object:
    """What ``key`` sets, which may have several names (``lr``, ``training.lr``); of no setting the key itself."""
    from fedbench.suites.resolve import section_of

    with suppress(FedbenchError):  # whoever reads the setting says what is wrong with it
        section, name = section_of(key, ())
        return key if section == "other-method" else (section, name)
    return key


def assignments(further: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> Sets:
    """The settings of keyword arguments and of ``set=``, those that are None left out of the first.

    FedbenchError for a value that no setting has, and for a setting that is given twice.
    """
    if not isinstance(further, Mapping | None):
        raise FedbenchError(f"set={further!r} is none: give a dict, as set={{'fedprox.mu': 0.1}}.")
    given = [(key, value) for key, value in settings.items() if value is not None]
    given += list((further or {}).items())
    return all_assignments([f"{key}={_text(key, value)}" for key, value in given], None)


def names(given: Names | None) -> tuple[str, ...]:
    """One name or several."""
    return _several(given, str, "names are texts")


def numbers(given: int | Iterable[int] | None) -> tuple[int, ...]:
    """One seed or several."""
    return tuple(map(int, _several(given, Integral, "seeds are whole numbers")))


def files(given: Folder | Iterable[Folder] | None) -> tuple[Path, ...]:
    """Plug-in files as absolute paths, which is how loaded modules are recognised."""
    try:
        several = _several(given, (str, Path), "plug-in files are paths")
        return tuple(expanded(one, "--plugin").resolve() for one in several)
    except RuntimeError as error:
        raise FedbenchError(f"--plugin: {error}; name a file.") from error


def folders(data_dir: Folder | None, cache_dir: Folder | None) -> tuple[Path, Path]:
    """The folders of data and of caches; by default the command line's."""
    data = data_dir or os.environ.get("FEDBENCH_DATA") or DATA_DIR
    cache = cache_dir or os.environ.get("FEDBENCH_CACHE") or CACHE_DIR
    return expanded(Path(data), "data_dir"), expanded(Path(cache), "cache_dir")


def text_or_none(given: Folder | None) -> str | None:
    """A folder or an address as text."""
    return None if given is None else str(given)


def _several(given: Any, kind: type | tuple[type, ...], what: str) -> tuple[Any, ...]:
    """What is given, where it is one or several, all of the ``kind``; nothing for None."""
    if given is None:
        return ()
    several = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
    for one in several:
        if not isinstance(one, kind) or isinstance(one, bool):
            raise FedbenchError(f"{one!r} is a {type(one).__name__}; {what}, or lists of them.")
    return several


def _text(key: str, value: Any) -> str:
    """``value`` as it is typed behind ``key=``."""
    from fedbench.suites.resolve import LISTS

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
