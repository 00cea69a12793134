"""The federation that settings come to, without any training."""

from __future__ import annotations

from collections.abc import Sequence

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec, stack_names
from fedbench.kinds.registry import find_method
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides, parse_assignment, section_of
from fedbench.suites.suite import load_suite, single


def federation_overrides(
    dataset: str | None, seed: int, assignments: Sequence[str], setting: str, scale: str
) -> Overrides:
    """What is asked for, as `fedbench run` would take it of a run of fedavg."""
    sets = [parse_assignment(text) for text in assignments]
    for key, _ in sets:
        _refuse_ineffective(key)
    if dataset is not None:
        sets.insert(0, ("dataset", dataset))
    settings = (setting,) if setting else ()
    return Overrides(methods=("fedavg",), seeds=(seed,), sets=tuple(sets), scale=scale, settings=settings)


def spec_of_federation(name: str | None, suite: str | None, overrides: Overrides) -> RunSpec:
    """The run of fedavg that has this scenario and data set: names, values and precedence are those of a run."""
    if suite is None:
        wanted = single(name, None, None)
    else:
        wanted = load_suite(suite)
        # a suite's fedavg row may have settings of its own, or not run everywhere; shown is what every row meets
        others = tuple(row for row in wanted.rows if stack_names(row.method) != ("fedavg",))
        wanted = wanted.model_copy(update={"rows": others})
    specs = expand(wanted, overrides)
    if len(specs) > 1 and not specs[0].setting:
        raise FedbenchError("one federation is shown, and several values of a setting make several; give one value.")
    if len(specs) > 1:
        raise FedbenchError(
            f"suite {wanted.name!r} has {len(specs)} settings at scale {specs[0].scale!r}; choose one with --setting: "
            f"{', '.join(repr(spec.setting) for spec in specs)}."
        )
    return specs[0]


def _refuse_ineffective(key: str) -> None:
    """``--set`` of something that a partition doesn't depend on is a mistake, not a no-op."""

    if key == "seed":
        raise FedbenchError("--set seed: the seed is no setting; give --seed.")
    section, field = ("run", key) if key == "method" else section_of(key, ())
    if section == "scenario" or (section, field) == ("run", "dataset"):
        return
    if section == "other-method":
        owner = key.partition(".")[0]
        find_method(owner)  # a name that no method has is a typing error
        raise FedbenchError(f"--set {key}: a partition doesn't depend on {owner}'s own settings; leave it out.")
    raise FedbenchError(
        f"--set {key}: a partition doesn't depend on it, but on the scenario's settings, dataset and --seed alone; "
        "leave it out."
    )
