"""YAML of users: plain values only, every key once, read alike by every version of YAML, and short enough to show."""

from __future__ import annotations

import re
from typing import Any

import yaml

from fedbench.core.errors import FedbenchError

MOST_VALUES = 200_000
"""Of a file, each alias counted as what it stands for; the largest suite that ships has some 2,000."""
MOST_LEVELS = 40
LONGEST_NUMBER = 256
"""Bits of a whole number; one of thousands of digits could not even be shown."""

_EVERY_VERSION = re.compile(
    r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-f]+|[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)(e[-+]?[0-9]+)?|[-+]?\.inf|\.nan|true|false",
    re.IGNORECASE,
)
"""Numbers and truths that YAML 1.1 (PyYAML) and 1.2 read alike: not 010, 1:30, 1_000, yes."""
_TYPED = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float"))


class _Loader(yaml.SafeLoader):
    _level = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """As SafeLoader, which reads on where brackets are nested without end; here that is an error at once."""
        self._level += 1
        if self._level > MOST_LEVELS:
            problem = f"nested more than {MOST_LEVELS} levels deep"
            raise yaml.composer.ComposerError(None, None, problem, self.get_mark())
        node = super().compose_node(parent, index)
        self._level -= 1
        return node

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """As SafeLoader; a value that is none of its tag's (``!!int x``) is an error of YAML like any other.

        So is one that PyYAML, which reads YAML 1.1, takes for another value than YAML 1.2 does.
        """
        try:
            value = super().construct_object(node, deep=deep)
            if isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
                raise ValueError("too many digits")
        except (ValueError, LookupError, AttributeError, OverflowError, TypeError) as error:
            tag = node.tag.removeprefix("tag:yaml.org,2002:")
            shown = f"{str(node.value)[:40]!r} " if isinstance(node, yaml.ScalarNode) else ""
            raise yaml.constructor.ConstructorError(
                None, None, f"{shown}cannot be read as {tag}", node.start_mark
            ) from error
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
        if is_plain and node.tag in _TYPED and not _EVERY_VERSION.fullmatch(node.value):
            problem = (
                f"{node.value[:40]} is another value in YAML 1.1 than in YAML 1.2; write a number without leading "
                "zeros, colons and underscores, true or false, and text in quotes"
            )
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return value


def read_yaml(text: str | bytes, where: str) -> tuple[yaml.Node | None, Any]:
    """The document in ``text`` as nodes, which know their lines, and as plain values; ``where`` is its file's name.

    Raises FedbenchError with the line for text that is not UTF-8 or not YAML, tags that would make objects, keys given
    twice, and aliases or brackets nested without end.
    """
    if isinstance(text, bytes):
        text = _decoded(text, where)
    try:
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None, None
            _measured(node, where, {})
            return node, loader.construct_document(node)
        finally:
            loader.dispose()
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line_in_words = f", line {mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise FedbenchError(f"{where}{line_in_words}: not valid YAML: {problem}.") from None


def _decoded(text: bytes, where: str) -> str:
    try:
        return text.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line, byte = text[: error.start].count(b"\n") + 1, text[error.start]
        raise FedbenchError(
            f"{where}, line {line}: not UTF-8 text (byte 0x{byte:02x}); save the file as UTF-8."
        ) from None


def _measured(node: yaml.Node, where: str, sizes: dict[int, int | None]) -> int:
    """How many values ``node`` has; refuses what `read_yaml` says. A size of None is that of a node around this one."""
    line = node.start_mark.line + 1
    if id(node) in sizes:
        known = sizes[id(node)]
        if known is None:
            raise FedbenchError(f"{where}, line {line}: an alias stands for itself.")
        return known
    sizes[id(node)], size = None, 1
    if isinstance(node, yaml.MappingNode):
        _refuse_repeated(node, where)
        children = [part for pair in node.value for part in pair]
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else []
    for child in children:
        size += _measured(child, where, sizes)
        if size > MOST_VALUES:
            raise FedbenchError(f"{where}, line {line}: its aliases stand for more than {MOST_VALUES:,} values.")
    sizes[id(node)] = size
    return size


def _refuse_repeated(node: yaml.MappingNode, where: str) -> None:
    """YAML forbids a key given twice; PyYAML would silently take the last."""
    seen: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if (key.tag, key.value) in seen:
            first = seen[key.tag, key.value]
            raise FedbenchError(
                f"{where}, line {line}: {key.value[:80]!r} is given twice, first in line {first}; leave one out."
            )
        seen[key.tag, key.value] = line
