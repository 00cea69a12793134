"""A suite's axes: the grid of their values, what it is called, and what is refused."""

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.suites.expand import expand
from fedbench.suites.files import read_axes
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite

SUITE = """
name: toy
scenario: {{preset: iid, clients: 4}}
training: {{rounds: 1}}
axes: {axes}
rows: [{{method: fedavg}}, {{method: clip-zs}}]
"""


def suite(axes, **further):
    return parse_suite(SUITE.format(axes=axes) + "".join(f"{k}: {v}\n" for k, v in further.items()), "toy.yaml")


def test_a_setting_for_every_combination_the_last_axis_fastest():
    made = suite("{dirichlet_alpha: [0.1, 5], scenario.clients: [4, 6, 8]}")
    assert made.setting_names[:4] == (
        "dirichlet_alpha=0.1, clients=4",
        "dirichlet_alpha=0.1, clients=6",
        "dirichlet_alpha=0.1, clients=8",
        "dirichlet_alpha=5, clients=4",
    )
    specs = expand(made, Overrides())
    assert len(specs) == 2 * 3 * 2
    assert {(one.scenario.dirichlet_alpha, one.scenario.clients) for one in specs} == {
        (alpha, clients) for alpha in (0.1, 5.0) for clients in (4, 6, 8)
    }


def test_a_value_may_stand_for_several_settings():
    made = suite(
        "{skew: {strong: {partition: dirichlet, dirichlet_alpha: 0.1, min_client_size: 1}, none: {partition: iid}}}"
    )
    strong, none = (expand(made, Overrides(settings=(name,)))[0].scenario for name in ("skew=strong", "skew=none"))
    assert (strong.partition, strong.dirichlet_alpha, none.partition) == ("dirichlet", 0.1, "iid")


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("[1, 2]", "axes are a mapping"),
        ("{lr: [0.1]}", "needs two values"),
        ("{lr: [0.1, 0.1]}", "all different"),
        ("{lr: 0.1}", "neither a list"),
        ("{u: {a: {lr: 1}, b: {lr: 2}}, v: {c: {lr: 3}, d: {lr: 4}}}", "two axes set lr"),
        ("{u: {a: {lr: 1}, b: {lr: 1}}}", "are the same setting"),
        ("{lr: {a: 1, b: 2}}", "neither a list"),
        ("{lr: [[1], [2]]}", "neither a list"),
        ("{a: " + str(list(range(40))) + ", b: " + str(list(range(40))) + "}", "at most 1000"),
    ],
)
def test_what_is_no_axis_is_refused_with_its_line(axes, said):
    with pytest.raises(FedbenchError, match=r"toy.yaml, line 5, axes: .*" + said):
        suite(axes)


def test_axes_beside_scales_are_refused():
    with pytest.raises(FedbenchError, match="axes or scales, not both"):
        suite("{lr: [0.1, 0.2]}", scales="{a: {settings: [{name: x}]}}")


def test_an_axis_that_no_row_reads_is_refused_where_it_stands():
    with pytest.raises(FedbenchError, match=r"toy.yaml, line 5, axes.*no_such"):
        expand(suite("{no_such: [1, 2]}"), Overrides())


def test_numbers_are_called_as_they_are_written():
    assert list(read_axes({"x": [0.02, 1.0, True, "a"]})["x"]) == ["0.02", "1", "True", "a"]
