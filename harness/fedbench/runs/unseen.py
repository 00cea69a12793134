"""The trained tensors under other class names: what a model is that can tell classes which nobody trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedbench.core.errors import Unworkable
from fedbench.core.method.tasks import Hooks, ModelSetup
from fedbench.core.types import Model
from fedbench.plugins.assembly import assemble


@dataclass(frozen=True, eq=False)
class Renamed:
    """The run's methods with a model of other class names, whose weights are those of the run's own model."""

    hooks: Hooks
    model: Model


def renamed_model(
    setup: ModelSetup, model: Model, names: tuple[str, ...], plugin_files: Sequence[Path]
) -> Renamed | str:
    """The model that ``build_model`` gives for ``names``; or, in a few words, why it can't take the trained tensors.

    ``model`` is that of ``setup``. Other plugin objects answer, so that what a method keeps on itself
    while it builds never meets training. As many classes may have tensors of the same shape by accident: a head of
    five classes fits five others. A further model then tells whether the number matters.
    """
    hooks = assemble(setup.spec.method, setup.spec.params, plugin_files).hooks
    try:
        renamed = hooks.build_model(setup=replace(setup, classnames=names))
    except Unworkable as error:
        return str(error).rstrip(".")
    compared = [renamed]
    if len(names) == len(setup.classnames):
        one_more = (*names, setup.classnames[0])
        apart = assemble(setup.spec.method, setup.spec.params, plugin_files).hooks
        compared.append(apart.build_model(setup=replace(setup, classnames=one_more)))
    bound = next((name for other in compared for name in _differing(model, other)), "")
    return f"{bound} depends on the number of classes" if bound else Renamed(hooks, renamed)


def _differing(one: Model, other: Model) -> list[str]:
    """Weights and running statistics that the models don't share by name and shape, those of ``one`` first.

    What clients have beside a model is no part of what names classes.
    """
    shapes = [{n: t.shape for n, t in {**m.weights, **m.buffers}.items() if n not in m.own} for m in (one, other)]
    return [name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)]
