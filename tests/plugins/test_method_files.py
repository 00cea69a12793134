"""Method files: small, and no two of them say the same thing."""

import ast
from itertools import combinations
from pathlib import Path

import fedbench_methods

FILES = sorted(Path(fedbench_methods.__file__).parent.rglob("*.py"))
BLOCK = 10


def body(file):
    """Every run of ten lines with something in them, without indentation and without what every file has: imports."""
    source = file.read_text(encoding="utf-8")
    lines = [line.strip() for line in source.splitlines()]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    lines = [line for line in lines if line]
    return {tuple(lines[i : i + BLOCK]) for i in range(len(lines) - BLOCK + 1)}


def test_no_two_method_files_share_a_block_of_ten_lines():
    found = {file: body(file) for file in FILES}
    shared = {(a, b): found[a] & found[b] for a, b in combinations(found, 2)}
    assert {pair: sorted(blocks)[0] for pair, blocks in shared.items() if blocks} == {}


def test_the_check_sees_a_block_that_was_copied(tmp_path):
    source = FILES[1].read_text(encoding="utf-8")
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text(source, encoding="utf-8")
    assert body(tmp_path / "one.py") & body(tmp_path / "two.py")
