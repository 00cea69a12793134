"""Declarations of hyper-parameters: types, ranges and what a wrong value is told."""

from dataclasses import dataclass
from typing import Literal

import pytest

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hyper import Hyper, build_params, declared, hyper


@dataclass(frozen=True, kw_only=True)
class P:
    mu: float = hyper(0.1, symbol="μ", low=0.01, high=1.0, log=True, neutral=0.0, source="Eq. 1")
    steps: int = hyper(3, symbol="E", low=1, source="section 2")
    form: str = hyper("a", symbol="f", choices=("a", "b"), source="section 3")
    order: Literal["up", "down"] = hyper("up", symbol="o", source="Alg. 1")
    centred: bool = hyper(False, symbol="c", source="code")


def test_strings_from_the_command_line_become_typed_values():
    assert build_params("m", P, {"mu": "0.5", "steps": "7", "form": "b"}) == P(mu=0.5, steps=7, form="b")


def test_the_neutral_value_is_allowed_outside_the_search_range():
    assert build_params("m", P, {"mu": 0}).mu == 0.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mu", "0.001", r"m.mu='0.001' is out of range; allowed: between 0.01 and 1, or 0.0 \(symbol μ, default 0.1"),
        ("mu", "nan", "m.mu='nan' is out of range"),
        ("mu", "much", "m.mu='much' is not a float"),
        ("steps", "0", "m.steps='0' is out of range; allowed: at least 1"),
        ("steps", "1.5", "m.steps='1.5' is not a int"),
        ("form", "c", "m.form='c' is out of range; allowed: one of 'a', 'b'"),
        ("order", "left", "m.order='left' is out of range; allowed: one of 'up', 'down'"),
        ("centred", "perhaps", "m.centred='perhaps' is out of range; allowed: one of False, True"),
        ("nu", "1", "unknown hyper-parameter of m 'nu'"),
    ],
)
def test_a_wrong_value_is_told_symbol_range_and_source(name, value, message):
    with pytest.raises(FedbenchError, match=message):
        build_params("m", P, {name: value})


def test_ranges_may_be_open_on_either_side():
    assert Hyper("x", "s", high=2.0).allowed() == "at most 2"
    assert Hyper("x", "s", low=2.0).allowed() == "at least 2"
    assert Hyper("x", "s").allowed() == "any value"


def test_a_default_outside_its_range_fails_where_it_is_declared():
    with pytest.raises(ValueError, match="default 2.0 of x is not between 0 and 1"):
        hyper(2.0, symbol="x", source="s", low=0.0, high=1.0)


def test_choices_come_from_the_type_the_default_of_a_bool_first():
    assert declared(P)["order"].hyper.choices == ("up", "down")
    assert declared(P)["centred"].hyper.choices == (False, True)

    @dataclass(frozen=True)
    class Wrong:
        order: Literal["up", "down"] = hyper("left", symbol="o", source="Alg. 1")

    with pytest.raises(FedbenchError, match="the default 'left' of o is not one of 'up', 'down'"):
        declared(Wrong)


def test_a_field_without_a_declaration_is_named():
    @dataclass(frozen=True)
    class Plain:
        mu: float = 0.1

    with pytest.raises(FedbenchError, match="Plain.mu must be declared with"):
        declared(Plain)
