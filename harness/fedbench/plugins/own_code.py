"""What the code of a class or function is made of that a program brings itself, perhaps from a notebook's cells.

Of a class in a module it is what that module is made of, as for a ``--plugin`` file. What stands in the program itself
(its ``__main__``) counts piece by piece, since a program also holds what changes no number: the source of the class,
and of the functions, classes and values of the program that it uses, and those use.
"""

from __future__ import annotations

import ast
import dis
import hashlib
import inspect
import linecache
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError
from fedbench.plugins.provenance import roots
from fedbench.plugins.sources import digest_of, files_of

_MAIN = "__main__"
_LIBRARIES = frozenset({"torch", "fedbench"})
"""Their versions, or their own code, count with every run."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def digest_of_code(definitions: Iterable[type | FunctionType]) -> str:
    """sha256 over the code of all of them. FedbenchError where a source is missing, or a value can't be told apart."""
    found = _Reached()
    for one in definitions:
        found.add(one, one.__name__)
    return hashlib.sha256(repr(sorted(found.parts.items())).encode()).hexdigest()


class _Reached:
    """``parts``: what was reached so far, name -> source, or digest."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}

    def add(self, thing: Any, name: str) -> None:
        """A class, a function, a module or a value, and what it uses."""
        if isinstance(thing, ModuleType):
            self._add_module(thing.__name__)
        elif isinstance(thing, type | FunctionType) or hasattr(thing, "__wrapped__"):
            self._add_definition(thing)
        elif (text := _text_of(thing)) is not None:
            self.parts[f"{_MAIN}.{name}"] = text
        elif _is_of_library(thing):
            self._add_module(type(thing).__module__)
        else:
            raise FedbenchError(
                f"{name!r} of this program, which the code of a run uses, is of the type {type(thing).__name__}, and "
                "nothing would tell whether it is the same the next time; make it where it is used, or put both into a "
                "file."
            )

    def _add_definition(self, thing: Any) -> None:
        module = str(getattr(thing, "__module__", ""))
        if module != _MAIN:
            self._add_module(module)
            return
        name = f"{_MAIN}.{thing.__qualname__}"
        if name in self.parts:
            return
        self.parts[name] = source = _source_of(thing)
        everything = vars(sys.modules[_MAIN])
        for used in sorted(set(_globals_in(compile(source, name, "exec")))):
            if used in everything and everything[used] is not thing:
                self.add(everything[used], used)
        for base in thing.__mro__[1:] if isinstance(thing, type) else ():
            self._add_definition(base)

    def _add_module(self, name: str) -> None:
        top = name.partition(".")[0]
        if top in _LIBRARIES or top in sys.stdlib_module_names or name in self.parts:
            return
        file = getattr(sys.modules.get(name), "__file__", None)
        own = files_of(name, frozenset(roots()))
        self.parts[name] = digest_of(own or ({Path(file).name: Path(file)} if file else {}))


def _is_of_library(value: object) -> bool:
    """Whether a value is what a library defines, as its decorators and aliases of types are."""
    return (
        type(value).__module__ != _MAIN
        and not isinstance(value, nn.Module)
        and (callable(value) or type(value).__module__ in ("types", "typing"))
    )


def _globals_in(code: CodeType) -> Iterator[str]:
    """The names that it looks up outside of its functions."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
            yield str(instruction.argval)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _globals_in(inner)


def _text_of(value: object) -> str | None:
    """The whole of a plain value as text; None of any other."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, Tensor | np.ndarray):
        array = value.detach().cpu().contiguous().numpy() if isinstance(value, Tensor) else value
        return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"
    kind = type(value).__name__
    if isinstance(value, dict):
        value = [one for pair in value.items() for one in pair]
    if not isinstance(value, list | tuple | set | frozenset):
        return None
    parts = [text for text in map(_text_of, value) if text is not None]
    in_order = sorted(parts) if isinstance(value, set | frozenset) else parts
    return f"{kind}({', '.join(in_order)})" if len(parts) == len(value) else None


def _source_of(thing: Any) -> str:
    """The source of a class or function of the program. FedbenchError where it was kept nowhere."""
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):
        pass
    found = _of_cell(thing) if isinstance(thing, type) else None
    if found is None and isinstance(thing, type) and is_dataclass(thing):
        # all that it is: its functions are made of its fields
        found = repr([(one.name, str(one.type), repr(one.default), repr(dict(one.metadata))) for one in fields(thing)])
    if found is None:
        raise FedbenchError(
            f"the source of {thing.__qualname__} is not known, so nothing would tell its runs from those of another; "
            "define it in a file or in a notebook's cell, or put it into a file of its own and give plugins=[FILE]."
        )
    return found


def _of_cell(cls: type) -> str | None:
    """The source of a class in a notebook: Python finds that of its functions, and none of the class around them."""
    for member in vars(cls).values():
        code = getattr(inspect.unwrap(getattr(member, "__func__", member)), "__code__", None)
        text = "" if code is None else "".join(linecache.getlines(code.co_filename))
        for node in ast.walk(ast.parse(text)) if text else ():
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                assert code is not None
                if node.lineno <= code.co_firstlineno <= (node.end_lineno or 0):
                    first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))
    return None
