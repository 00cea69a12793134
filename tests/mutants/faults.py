"""Small faults in the statements of functions: which there are, and where a recorded one stands today."""

from __future__ import annotations

import ast
import copy
import difflib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

SWAPPED: dict[type, type] = {ast.Lt: ast.LtE, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.In: ast.NotIn, ast.Is: ast.IsNot}
SWAPPED |= {ast.Add: ast.Sub, ast.Mult: ast.Div, ast.And: ast.Or}
SWAPPED |= {new: old for old, new in SWAPPED.items()} | {ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult}
NAMES = {"min": "max", "any": "all", "mean": "sum", "amin": "amax", "argmin": "argmax", "softmax": "log_softmax"}
NAMES |= {new: old for old, new in NAMES.items()}
HARDLY_SHOWS = {"strict", "indent", "exist_ok", "parents", "stacklevel", "ensure_ascii", "maxsize", "timeout"}
"""Arguments that are left as they are."""
PLAIN = (ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.If, ast.While, ast.For, ast.With, ast.Assert)
LONGEST = 150
"""No fault in a statement of more characters."""


@dataclass
class Place:
    """A statement that calculates; equal ones of a function are counted by ``at``."""

    function: str
    file: str
    statement: str
    at: int
    node: ast.stmt
    inside: ast.FunctionDef
    tree: ast.Module

    @property
    def last_name(self) -> str:
        return self.function.rpartition(".")[2]

    @property
    def lines(self) -> range:
        """Its lines, without those indented below it."""
        below = getattr(self.node, "body", None)
        end = below[0].lineno if below else (self.node.end_lineno or self.node.lineno) + 1
        return range(self.node.lineno, max(end, self.node.lineno + 1))

    def faults(self) -> list[str]:
        """The statement with one fault each."""
        if len(self.statement) > LONGEST:
            return []
        alone = bare(self.node)
        wrong = [copy.deepcopy(alone, {id(node): new}) for node in expressions(alone) for new in edits(node)]
        gives = ast.unparse(self.inside.returns) if self.inside.returns else ""
        if isinstance(alone, ast.Return) and alone.value and gives in ("float", "int", "Tensor"):
            wrong.append(ast.Return(ast.UnaryOp(ast.USub(), alone.value)))
        return sorted({text_of(ast.fix_missing_locations(one)) for one in wrong} - {self.statement})

    def compiled(self, fault: str, path: str) -> CodeType:
        """The code of the whole file at ``path`` with ``fault`` instead of the statement."""
        new = ast.parse(fault + ("\n    pass" if hasattr(self.node, "body") else "")).body[0]
        before = dict(vars(self.node))
        vars(self.node).update({name: value for name, value in ast.iter_fields(new) if name not in ("body", "orelse")})
        try:
            return compile(ast.fix_missing_locations(self.tree), path, "exec", dont_inherit=True)
        finally:
            vars(self.node).update(before)


def places(source: str, file: str) -> Iterator[Place]:
    """Every statement of a file that calculates."""
    tree, seen = ast.parse(source), Counter[tuple[str, str]]()
    for name, function in functions(tree):
        for statement in statements(function):
            if text := text_of(statement):
                yield Place(name, file, text, seen[name, text], statement, function, tree)
                seen[name, text] += 1


def functions(tree: ast.AST, outer: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function below ``tree`` with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield outer + node.name, node
        named = isinstance(node, ast.FunctionDef | ast.ClassDef)
        yield from functions(node, f"{outer}{node.name}." if named else outer)


def statements(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a function, without those of functions and classes inside it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.ClassDef):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def bare(statement: ast.stmt) -> Any:
    """The statement without what stands indented below it."""
    alone = copy.copy(statement)
    if hasattr(alone, "body"):
        vars(alone).update(body=[ast.Pass()], orelse=[])
    return alone


def text_of(statement: ast.stmt) -> str:
    """The statement on one line, in one spelling whatever its form in the file; empty where nothing is calculated."""
    if isinstance(statement, PLAIN) or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return ast.unparse(bare(statement)).removesuffix("\n    pass")
    return ""


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement calculates: no annotations, no texts, no making of errors and warnings."""
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.JoinedStr) or name == "annotation":
                continue
            called = ast.unparse(child.func) if isinstance(child, ast.Call) else ""
            told = called.endswith(("Error", "warn")) or called.startswith(("logger.", "_logger.", "logging."))
            if not told and not (isinstance(child, ast.keyword) and child.arg in HARDLY_SHOWS):
                yield from expressions(child)


def edits(node: Any) -> Iterator[ast.AST]:
    """``node`` with a fault."""

    def changed(**fields: object) -> ast.AST:
        return type(node)(**{**dict(ast.iter_fields(node)), **fields})

    match node:
        case ast.Compare(ops=[operator]) if type(operator) in SWAPPED:
            yield changed(ops=[SWAPPED[type(operator)]()])
        case ast.BinOp(left=left, right=right) if is_text(left) or is_text(right):
            pass
        case ast.BinOp(op=operator) | ast.AugAssign(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPPED:
            yield changed(op=SWAPPED[type(operator)]())
        case ast.Constant(value=bool()):
            yield changed(value=not node.value)
        case ast.Constant(value=int() | float()):
            yield changed(value={0: 1, 1: 0}.get(node.value, node.value + 1))
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield changed(func=ast.Name(NAMES[name], ast.Load()))
        case ast.Call(func=ast.Attribute(value=owner, attr=name)) if name in NAMES:
            yield changed(func=ast.Attribute(owner, NAMES[name], ast.Load()))


def is_text(node: ast.AST) -> bool:
    """Whether ``node`` is a string, since the sum of two is no arithmetic."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def located(row: dict[str, Any], everywhere: Sequence[Place]) -> tuple[Place, str] | None:
    """Where the statement of a recorded fault stands today, and its text with the fault; None if it is gone.

    It is looked for in its function in its file, in that function elsewhere, in functions of the same last name and in
    all functions. At last one that differs a little (a variable was renamed), will do where the last name is the same.
    """
    last = row["function"].rpartition(".")[2]
    equal = [place for place in everywhere if place.statement == row["statement"]]
    alike = [place for place in equal if place.last_name == last]
    same = [place for place in alike if place.function == row["function"]]
    for some in ([place for place in same if place.file == row["file"]], same, alike, equal):
        counted = [place for place in some if place.at == int(row["at"])]
        if len(counted) == 1 or len(some) == 1:
            return (counted or some)[0], row["fault"]
    near = {place.statement: place for place in everywhere if place.last_name == last}
    for text in difflib.get_close_matches(row["statement"], near, n=1, cutoff=0.75):
        if fault := rebased(row["statement"], row["fault"], text):
            return near[text], fault
    return None


def rebased(old: str, new: str, text: str) -> str | None:
    """``text``, which resembles ``old``, with the change that makes ``new`` of ``old``."""
    start = len(os.path.commonprefix([old, new]))
    end = len(os.path.commonprefix([old[start:][::-1], new[start:][::-1]]))
    for around in range(12, 1, -1):
        low, high = max(0, start - around), len(old) - max(0, end - around)
        if text.count(old[low:high]) == 1:
            wrong = old[low:start] + new[start : len(new) - end] + old[len(old) - end : high]
            return text.replace(old[low:high], wrong)
    return None
