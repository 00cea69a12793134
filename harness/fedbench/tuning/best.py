"""A suite's runs with the best values of a study, found again by setting and row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedbench.core.errors import FedbenchError
from fedbench.core.spec import RunSpec
from fedbench.tuning.found import Found, found
from fedbench.tuning.space import with_values
from fedbench.tuning.storage import open_storage
from fedbench.tuning.studies import flat_settings, studies_named


def best_of(url: str, name: str) -> dict[str, Found]:
    """What the studies called ``name`` in the database ``url`` have found, by setting and row.

    Raises FedbenchError for an unknown name, or studies without a finished trial.
    """
    results = [found(study) for study in studies_named(open_storage(url, create=False), name)]
    finished = {result.record.title: result for result in results if result is not None}
    if not finished:
        raise FedbenchError(f"the study {name!r} has no finished trial yet; go on with `fedbench tune`.")
    return finished


def with_best(specs: Sequence[RunSpec], best: Mapping[str, Found], fixed: Sequence[str] = ()) -> list[RunSpec]:
    """The runs with their rows' best values; rows that were not tuned stay as they are.

    Raises FedbenchError where no row was tuned, or one of ``fixed``, the settings of the command line, was.
    """
    if not any(spec.title in best for spec in specs):
        raise FedbenchError(f"none of these rows was tuned; the study has {', '.join(map(repr, sorted(best)))}.")
    tuned = []
    for spec in specs:
        result = best.get(spec.title)
        if result is None:
            tuned.append(spec)
            continue
        clash = sorted({key.removeprefix("training.") for key in fixed} & set(result.values))
        if clash:
            raise FedbenchError(
                f"--set {clash[0]}: the study {result.record.name!r} has tuned it for {spec.title!r}; leave it out."
            )
        record = result.record
        tuning = {
            "study": record.name,
            "trial": str(result.trial),
            **record.budget.as_tags(),
            "trials": str(result.spent),
            "command": record.command,
        }
        changed = with_values(spec, result.values)
        tuned.append(changed.model_copy(update={"tuned": result.record.name, "tuning": tuning}))
    return tuned


def tuned_otherwise(spec: RunSpec, result: Found) -> list[str]:
    """Settings in which the row, as it is run, differs from the row as it was tuned: ``rounds=5``, as it was tuned."""
    before, now = flat_settings(result.record.spec), flat_settings(spec.model_dump(mode="json"))
    searched = {str(dimension["key"]) for dimension in result.record.space}
    ignored = {"seed", "tuned", "device", *searched}
    return [f"{key}={value}" for key, value in before.items() if key not in ignored and now.get(key) != value]
