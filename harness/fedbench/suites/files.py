"""Suite files: found by name, read as YAML with the line of every part, laid over the suite that they extend.

``extends: NAME|FILE`` takes another suite's content over, and what the file says goes on top. ``training`` and
``scenario`` are laid over the other's, field by field. Rows are added behind the other's; one of the same name (label,
else method) takes its place, and ``without: [NAME, ...]`` leaves rows out. A scale takes the place of the other's of
that name. All else replaces what the other says. Name and version are a suite's own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import yaml

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.kinds.registry import importing, installed

MOST_VALUES = 200_000
"""Values of a file, each alias counted as what it stands for; the largest suite that ships has some 2,000."""
MOST_LEVELS = 40
LONGEST_NUMBER = 256
"""Bits of a whole number; one of thousands of digits could not even be shown."""
_EVERY_VERSION = re.compile(
    r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-f]+|[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)(e[-+]?[0-9]+)?|[-+]?\.inf|\.nan|true|false",
    re.IGNORECASE,
)
"""Numbers and truths that YAML 1.1 (PyYAML) and 1.2 read alike: not 010, 1:30, 1_000, yes."""
_TYPED = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float"))
_MOST_BASES = 10
"""Suites that may stand on one another."""
_NOT_TAKEN = ("name", "version", "changes")
"""Fields that are a suite's own."""
_LAID_OVER = ("training", "scales", "published_metrics")
_OWN = ("extends", "without")
"""Fields of the file that are none of the suite."""

Lines = dict[tuple[int | str, ...], int]
"""The line of every part of a file, by the path to it."""


# --- by name


@dataclass(frozen=True)
class SuiteFile:
    """A suite of a package; an entry point names the package."""

    name: str
    point: EntryPoint

    @property
    def origin(self) -> str:
        """The package with its version."""
        return "unknown" if self.point.dist is None else f"{self.point.dist.name} {self.point.dist.version}"

    def read(self) -> bytes:
        """The file."""
        return resources.files(self.point.value).joinpath(f"{self.name}.yaml").read_bytes()


def suite_files() -> dict[str, SuiteFile]:
    """All suites by name, in alphabetical order. FedbenchError for a name that two packages have."""
    files_by_name: dict[str, SuiteFile] = {}
    for point in installed("suite"):
        with importing(f"the suites of {point.value!r}", "reinstall it"):
            files = [entry.name for entry in resources.files(point.value).iterdir()]
        for name in (file.removesuffix(".yaml") for file in files if file.endswith(".yaml")):
            other = files_by_name.setdefault(name, SuiteFile(name, point))
            if other.point.value != point.value:
                raise FedbenchError(
                    f"two packages have a suite called {name!r}: {other.origin} and {SuiteFile(name, point).origin}; "
                    "uninstall one."
                )
    return dict(sorted(files_by_name.items()))


def suite_bytes(name: str) -> tuple[bytes, str]:
    """Content and file name of a suite, by name, or by the path of a ``.yaml`` file."""
    if name.endswith((".yaml", ".yml")):
        try:
            content = Path(name).read_bytes() if Path(name).is_file() else None
        except OSError as error:
            raise FedbenchError(f"suite file {name!r} cannot be read: {error.strerror}.") from None
        if content is None:
            raise FedbenchError(f"suite file {name!r} does not exist; see `fedbench list suites` for names.")
        return content, name
    known = suite_files()
    if name not in known:
        raise unknown_name("suite", name, known, "See `fedbench list suites`, or give the path of a .yaml file.")
    return known[name].read(), f"{name}.yaml"


# --- as YAML


class _Loader(yaml.CSafeLoader):
    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """Construct as the base does, but what is none of its tag's (``!!int x``) is an error of YAML like any other.

        So is a value that PyYAML, which reads YAML 1.1, takes for another one than YAML 1.2 does.
        """
        is_scalar = isinstance(node, yaml.ScalarNode)
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
                raise ValueError("too many digits")
        except (ValueError, LookupError, AttributeError, OverflowError, TypeError):
            shown = f"{str(node.value)[:40]!r} " if is_scalar else ""
            problem = f"{shown}cannot be read as {node.tag.removeprefix('tag:yaml.org,2002:')}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None
        if is_scalar and not node.style and node.tag in _TYPED and not _EVERY_VERSION.fullmatch(node.value):
            problem = (
                f"{node.value[:40]} is another value in YAML 1.1 than in YAML 1.2; write a number without leading "
                "zeros, colons and underscores, true or false, and text in quotes"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value


def read_yaml(text: str | bytes, where: str) -> tuple[Any, Lines]:
    """The document in ``text`` as plain values, and the lines of its parts; ``where`` is its file's name.

    Raises FedbenchError with the line for text that is not UTF-8 or not YAML, tags that would make objects, keys given
    twice, and aliases or brackets nested without end.
    """
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        loader = _Loader(text.encode("utf-8", "surrogatepass"))
        node = loader.get_single_node()
        lines: Lines = {(): 1}
        if node is not None:
            _put_lines(node, (), lines, where)
        return (None if node is None else loader.construct_document(node)), lines
    except UnicodeDecodeError as error:
        line, byte = error.object[: error.start].count(b"\n") + 1, error.object[error.start]
        raise FedbenchError(
            f"{where}, line {line}: not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8."
        ) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_in_words = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise FedbenchError(f"{where}{line_in_words}: not valid YAML: {problem}.") from None


def line_of(lines: Lines, location: Sequence[int | str]) -> int:
    """The line of the innermost part of ``location`` that stands in the file."""
    return next(lines[tuple(location[:end])] for end in range(len(location), -1, -1) if tuple(location[:end]) in lines)


def _put_lines(node: yaml.Node, path: tuple[int | str, ...], lines: Lines, where: str) -> None:
    """Put down the line of every part of ``node``, of a key where there is one. Refuses what `read_yaml` says."""
    line = node.start_mark.line + 1
    lines.setdefault(path, line)
    if len(lines) > MOST_VALUES:
        raise FedbenchError(f"{where}, line {line}: its aliases stand for more than {MOST_VALUES:,} values.")
    if len(path) > MOST_LEVELS:
        raise FedbenchError(
            f"{where}, line {line}: nested more than {MOST_LEVELS} levels deep, or an alias stands for itself."
        )
    if isinstance(node, yaml.MappingNode):
        seen: dict[tuple[str, str], int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if (key.tag, key.value) in seen:
                    raise FedbenchError(
                        f"{where}, line {line}: {key.value[:80]!r} is given twice, first in line "
                        f"{seen[key.tag, key.value]}; leave one out."
                    )
                lines[*path, key.value] = seen[key.tag, key.value] = line
                _put_lines(value, (*path, key.value), lines, where)
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            _put_lines(value, (*path, position), lines, where)


# --- on top of another


def extended(content: Mapping[str, Any], where: str, depth: int = 0) -> tuple[dict[str, Any], dict[int, int]]:
    """``content`` of the file ``where`` with that of the suite that it extends, and its rows' places in the whole.

    FedbenchError for a suite that does not exist, extends itself, or has no such rows.
    """
    given = dict(content)
    own = given.pop("rows", None)
    if "extends" not in given:
        if "without" in given:
            raise FedbenchError(f"{where}: `without` leaves out rows of another suite; say which one with `extends`.")
        return dict(content), {}
    if depth == _MOST_BASES:
        raise FedbenchError(f"{where}: more than {_MOST_BASES} suites extend one another; does one extend itself?")
    base = _base(given["extends"], where, depth)
    rows = _left(base.pop("rows", []), given.get("without", []), where)
    places: dict[int, int] = {}
    for number, row in enumerate(own if isinstance(own, list) else []):
        same = [place for place, other in enumerate(rows) if _name(other) == _name(row) != ""]
        if len(same) > 1:
            raise FedbenchError(
                f"{where}, rows.{number}: {given['extends']!r} has {len(same)} rows called {_name(row)!r}; give yours "
                f"a label, or leave those out with `without: [{_name(row)}]`."
            )
        places[number] = same[0] if same else len(rows)
        rows[places[number] : places[number] + 1] = [row]
    if own is not None and not isinstance(own, list):
        return {**base, **_without_own(given), "rows": own}, {}
    merged = {**base, **_without_own(given), "rows": rows}
    for field in _LAID_OVER:
        if isinstance(base.get(field), Mapping) and isinstance(given.get(field), Mapping):
            merged[field] = {**base[field], **given[field]}
    if isinstance(given.get("scenario"), Mapping) and "scenario" in base:
        below = base["scenario"] if isinstance(base["scenario"], Mapping) else {"preset": base["scenario"]}
        merged["scenario"] = given["scenario"] if "preset" in given["scenario"] else {**below, **given["scenario"]}
    return merged, places


def _base(name: object, where: str, depth: int) -> dict[str, Any]:
    if not isinstance(name, str):
        raise FedbenchError(f"{where}, extends: {name!r} is no suite's name or file.")
    beside = Path(where).parent / name
    file = str(beside) if name.endswith((".yaml", ".yml")) and not Path(name).is_absolute() else name
    try:
        content, called = suite_bytes(file)
    except FedbenchError as error:
        raise FedbenchError(f"{where}, extends: {error}") from None
    base, _ = read_yaml(content, called)
    if not isinstance(base, dict):
        raise FedbenchError(f"{where}, extends: {name!r} is no suite.")
    merged, _ = extended(base, called, depth + 1)
    return {field: value for field, value in merged.items() if field not in _NOT_TAKEN}


def _left(rows: object, without: object, where: str) -> list[Any]:
    """A copy of ``rows`` less those that are named."""
    rows = list(rows) if isinstance(rows, list) else []
    names = [_name(row) for row in rows]
    without = without if isinstance(without, list) else [without]
    for name in without:
        if name not in names:
            raise FedbenchError(f"{where}, without: {unknown_name('row', str(name), filter(None, names))}")
    return [row for row, name in zip(rows, names, strict=True) if name not in without]


def _name(row: object) -> str:
    """What a row is called: its label, else its method."""
    return str(row.get("label") or row.get("method") or "") if isinstance(row, Mapping) else ""


def _without_own(given: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in given.items() if field not in _OWN}
