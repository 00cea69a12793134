"""The base class of methods: what a method declares beside its answers to hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar, get_args, get_origin

P = TypeVar("P")

REQUIREMENTS = {
    "labels": "labels of the clients' samples (scenario.labels=visible)",
    "linear_head": "a linear classifier (a CNN, or CLIP with tune=head)",
    "sent_head": "a linear classifier that is sent (no method that keeps it with the clients)",
    "trained_features": "features that are trained (a CNN, tune=full, or a method that trains a projector)",
    "clip": "a CLIP backbone, or another dual encoder",
    "pretrained": "a pretrained backbone: CLIP, or an image network with weights",
    "context": "a text tower that takes learned vectors among its tokens",
    "image_layers": "an image tower whose layers take further tokens",
    "patches": "an image tower with features of an image's patches",
    "sgd": "clients that train by SGD (optimizer=sgd)",
    "plain_steps": "steps along the loss's gradients, as many as are counted",
    "sent_start": "clients that train on from the one model of the server",
    "sent_steps": "clients that minimise the stack's loss at the model they send",
    "own_ascent": "a stack without another step uphill",
    "global_model": "one model that clients send, round after round",
    "weighed_clients": "a mean of clients by the samples they report",
    "own_updates": "each client's own update at the server",
    "sent_weights": "weights that clients send and the server goes on from",
    "only_weights": "clients that send nothing but the weights that each has trained by itself",
    "kept_factors": "low-rank factors that go on from round to round",
    "whole_model": "whole models at the server (no method that keeps tensors private)",
    "same_samples": "clients whose samples stay the same (a partition without drift)",
    "server_data": "unlabelled samples at the server (scenario.server_samples)",
    "server_labels": "labelled samples at the server (scenario.server_samples, scenario.server_labels=visible)",
}
"""Requirements that a method may have of a run, in words for users. `fedbench.plugins.requirements` refuses runs that
miss one."""

ROLES = {
    "learner": "what is trained around the backbone",
    "personalisation": "gives every client a model of its own",
    "local objective": "changes what clients minimise, or how",
    "aggregation": "changes what the server makes of the updates, or sends",
    "compression": "changes how what is sent is encoded",
    "defence": "guards the server against what clients send",
    "server step": "goes on from the mean of the clients",
    "label provider": "gives clients labels where they have none",
    "measure": "measures, and trains nothing",
}
"""The roles of methods in a stack, in words for users."""


@dataclass(frozen=True, kw_only=True)
class NoParams:
    """The hyper-parameters of a method that has none beyond the run's budget and optimiser."""


def name_params(cls: Any, generic: type) -> None:
    """Set the ``Params`` of ``cls``, which derives from ``generic[P]``, to the ``P`` that it names, unless it has its
    own."""
    for base in vars(cls).get("__orig_bases__", ()):
        origin = get_origin(base)
        [given] = get_args(base) if isinstance(origin, type) and issubclass(origin, generic) else [None]
        if isinstance(given, type) and "Params" not in vars(cls):
            cls.Params = given


class Method(Generic[P]):
    """A method with hyper-parameters of the type ``P``, its `Params`. ``name`` and ``citation`` have no default.

    An entry point of the group ``fedbench.methods`` loads such a class, or any other with ``name``, ``citation``,
    ``Params`` and ``recipe`` that is made from its `Params`. `fedbench.kinds.methods` checks it.
    """

    name: ClassVar[str]
    """Letters, digits, hyphens and underscores."""
    citation: ClassVar[str]
    """Authors, title and year of the paper."""
    Params: ClassVar[type] = NoParams
    """A frozen dataclass of ``hyper(...)`` fields: the ``P`` that a method's class names after its base."""
    recipe: ClassVar[Mapping[str, object]] = {}
    """Optimiser settings of the paper (keys of ``Training``), used where neither suite row nor command line sets them.
    """
    requires: tuple[str, ...] = ()
    """Keys of `REQUIREMENTS` that the method can't run without. A constructor may drop some that its values do not
    need."""
    provides: ClassVar[tuple[str, ...]] = ()
    """Keys of `REQUIREMENTS` that the method meets for the rest of its stack. Example: a method that answers the hook
    `label` provides ``labels``."""
    prevents: tuple[str, ...] = ()
    """Keys of `REQUIREMENTS` that the method breaks for the rest of its stack. Example: a method that does not step
    along the loss's gradients breaks ``plain_steps``. Others are ``sent_start`` (clients begin elsewhere),
    ``sent_steps`` (only a model of their own learns), ``weighed_clients`` (clients count alike) and ``own_ascent``
    (gradients are taken uphill). A constructor may drop some that its values do not break."""
    reads: ClassVar[tuple[str, ...]] = ()
    """Settings among ``text_encoder``, ``teacher``, ``tune`` and ``head_scale`` that the method reads. The last two
    need no mention if it leaves `build_model` to the default."""
    role: ClassVar[str] = ""
    """The method's role in a stack, a key of `ROLES`; empty if it follows from the hooks that the method answers. A
    stack has at most one personalisation, compression, defence and server step."""
    needs_learner: ClassVar[str] = ""
    """Name of a learner to stack with, for a method that has nothing to work on in the default model.
    `fedbench.testing` checks the two stacked."""
    keeps_lost_training: ClassVar[bool] = False
    """Whether a client's ``state`` and private tensors stay as trained where its update is lost or rejected.

    By default they are undone, so that they match what the server has: the client is as if it had not trained. True
    suits what is about the client's own data or model alone, since a client knows that it has trained but not that its
    update was lost (`moon`, `fedbn`; but not `scaffold`, the mean of whose controls the server has).
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        name_params(cls, Method)

    def __init__(self, params: P) -> None:
        self.params = params


AnyMethod = Method[Any]


def declares(cls: type[AnyMethod], attribute: str) -> Any:
    """An ``attribute`` that need not be declared: the default of `Method` where ``cls`` is another class without it."""
    return getattr(cls, attribute, getattr(Method, attribute))
