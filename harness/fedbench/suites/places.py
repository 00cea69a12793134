"""Where the parts of a suite stand in its file, for errors that say it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml


@dataclass(frozen=True)
class PlaceInFile:
    """Where a part of a suite stands: its file, the path to it there, and the lines of all that is in the file."""

    file: str
    lines: Mapping[tuple[int | str, ...], int]
    path: tuple[int | str, ...] = ()


def line_of(lines: Mapping[tuple[int | str, ...], int], location: Sequence[int | str]) -> int:
    """The line of the innermost part of ``location`` that stands in the file, of those that `lines_of` found."""
    return next(lines[tuple(location[:end])] for end in range(len(location), -1, -1) if tuple(location[:end]) in lines)


def lines_of(node: yaml.Node | None, path: tuple[int | str, ...] = ()) -> dict[tuple[int | str, ...], int]:
    """The line of every part of a file, by the path to it; that of a key where there is one."""
    lines = {path: 1 if node is None else node.start_mark.line + 1}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines |= lines_of(value, (*path, key.value)) | {(*path, key.value): key.start_mark.line + 1}
    elif isinstance(node, yaml.SequenceNode):
        for position, value in enumerate(node.value):
            lines |= lines_of(value, (*path, position))
    return lines
