import os
import time
from importlib.machinery import SourceFileLoader

import pytest

from tests.mutants import __main__ as mutants
from tests.mutants.faults import located, places, rebased

SOURCE = '''
class Scale:
    def of(self, values: list[float], top: bool = True) -> float:
        """The larger half."""
        if not values or len(values) < 2:
            raise ValueError(f"{len(values) + 1} values")
        largest: float = max(
            values,
        )
        return 0.5 * largest if top else 1
'''


def place_of(source, text, file="harness/fedbench/core/scale.py"):
    return next(place for place in places(source, file) if place.statement.startswith(text))


def row_of(place, fault):
    named = {"function": place.function, "file": place.file, "statement": place.statement, "at": str(place.at)}
    return {**named, "fault": fault}


def test_each_statement_is_written_on_one_line_and_gets_one_fault_at_a_time():
    faults = {place.statement: place.faults() for place in places(SOURCE, "a.py")}
    assert faults == {
        "if not values or len(values) < 2:": [
            "if not values and len(values) < 2:",
            "if not values or len(values) < 3:",
            "if not values or len(values) <= 2:",
            "if values or len(values) < 2:",
        ],
        "largest: float = max(values)": ["largest: float = min(values)"],
        "return 0.5 * largest if top else 1": [
            "return -(0.5 * largest if top else 1)",
            "return 0.5 * largest if top else 0",
            "return 0.5 / largest if top else 1",
            "return 1.5 * largest if top else 1",
        ],
    }


def test_a_fault_is_in_the_code_and_the_statement_is_as_before_afterwards():
    place = place_of(SOURCE, "if")
    results = []
    for fault in ("if not values or len(values) < 3:", place.statement):
        names = {}
        exec(place.compiled(fault, "a.py"), names)
        try:
            results.append(names["Scale"]().of([1.0, 4.0]))
        except ValueError:
            results.append(None)
    assert results == [None, 2.0]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda text: text, "return 1.5 * largest if top else 1"),
        (lambda text: text.replace("class Scale", "class Half"), "return 1.5 * largest if top else 1"),
        (lambda text: text.replace("def of", "def half_of"), "return 1.5 * largest if top else 1"),
        (lambda text: text.replace("largest", "highest"), "return 1.5 * highest if top else 1"),
        (lambda text: text.replace("return 0.5 * largest if top else 1", "return sum(values)"), None),
    ],
    ids=["as it was", "another class", "another function", "a variable renamed", "gone"],
)
def test_a_recorded_fault_is_found_where_its_statement_stands_today(change, found):
    row = row_of(place_of(SOURCE, "return"), "return 1.5 * largest if top else 1")
    today = list(places(change(SOURCE), "plugins/fedbench_methods/elsewhere.py"))
    place = located(row, today)
    assert (place and place[1]) == found


def test_of_equal_statements_of_a_function_the_recorded_one_is_found():
    source = "def f(x):\n    x += 1\n    x += 2\n    x += 1\n"
    first, _, third = places(source, "a.py")
    assert located(row_of(third, "x += 2"), list(places(source, "a.py")))[0].node.lineno == 4
    assert located(row_of(first, "x += 2"), list(places(source, "a.py")))[0].node.lineno == 2


def test_a_change_that_fits_in_two_places_is_not_made():
    assert rebased("a = b < c", "a = b <= c", "a = first < c") == "a = first <= c"
    assert rebased("a < b", "a <= b", "c < d < b, c < d < b") is None


def test_a_child_answers_or_is_ended_with_its_processes():
    assert mutants.in_child(lambda: [os.getpid() != os.getppid()], 60) == [True]
    assert mutants.in_child(lambda: os._exit(1), 60) is None
    began = time.monotonic()
    assert mutants.in_child(lambda: time.sleep(60), 0.5) is None
    assert time.monotonic() - began < 30


def test_a_fault_is_noticed_by_a_test_of_it_alone_and_no_file_changes(tmp_path, monkeypatch):
    root = tmp_path.resolve()
    (root / "scale_of_mine.py").write_text(SOURCE)
    lines = ["def test_half():", "    from scale_of_mine import Scale", "    assert Scale().of([1.0, 4.0]) == 2.0"]
    (root / "test_scale.py").write_text("\n".join([*lines, "def test_nothing():", "    pass", ""]))
    monkeypatch.setattr(mutants, "ROOT", root)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.chdir(root)
    monkeypatch.syspath_prepend(str(root))
    as_usual = SourceFileLoader.get_code
    place = place_of(SOURCE, "return", "scale_of_mine.py")
    both = ["test_scale.py::test_nothing", "test_scale.py::test_half"]
    assert mutants.noticed(place, "return 1.5 * largest if top else 1", both) == "test_scale.py::test_half"
    assert mutants.noticed(place, "return 1.5 * largest if top else 1", both[:1]) == ""
    assert mutants.noticed(place, "return 0.5 * largest if top else 0", both) == ""
    assert SourceFileLoader.get_code is as_usual
    assert (root / "scale_of_mine.py").read_text() == SOURCE


def test_the_list_names_each_fault_once():
    text = mutants.LIST.read_text()
    rows = text.splitlines()[2:]
    assert text.splitlines()[1] == ",".join(mutants.COLUMNS)
    assert len(set(rows)) == len(rows) > 0
    assert len(text) < 150_000
