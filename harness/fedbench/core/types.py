"""The nouns every part of fedbench shares: models, what clients get and give."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from fedbench.core.errors import FedbenchError

Tensors = dict[str, Tensor]
"""A flat mapping from a parameter's name to its tensor."""

NO_LINEAR_HEAD = (
    "this model has none: use a CNN backbone, or a CLIP backbone with tune=head and no method that builds another model"
)


@dataclass(frozen=True, eq=False)
class LabelledBatch:
    """Samples of one local step: ``inputs`` (b, ...), ``index`` (b,) within the client, ``labels`` (b,)."""

    inputs: Tensor
    index: Tensor
    labels: Tensor
    side: Tensors = field(default_factory=dict)
    """Outputs of the model's ``side_encoders`` for these samples, not augmented: (b, ...) by encoder name."""


@dataclass(frozen=True, eq=False)
class UnlabelledBatch:
    """The samples of one local step under hidden labels. There is no field ``labels``, so no method can peek at
    them."""

    inputs: Tensor
    index: Tensor
    side: Tensors = field(default_factory=dict)


Batch = LabelledBatch | UnlabelledBatch


@dataclass(frozen=True, eq=False)
class Outputs:
    """A model's outputs for a batch: ``logits`` (b, C) and the ``features`` (b, d) that its head reads."""

    logits: Tensor
    features: Tensor


class ImageTransform(Protocol):
    """Transform of uint8 images (b, 3, h, w) into the float batch that a network takes, on the images' device."""

    @property
    def size(self) -> int | None:
        """The side of the resulting images in pixels; None where images keep their size."""
        ...

    def __call__(self, pixels: Tensor) -> Tensor:
        """Transformed images, (b, 3, size, size) float32."""
        ...


class Backbone(Protocol):
    """The network that images go through, pretrained or to be trained from scratch."""

    @property
    def name(self) -> str:
        """The name as a suite writes it: ``clip:embedded``, ``resnet8?width=1``."""
        ...

    @property
    def module(self) -> nn.Module:
        """The network with its weights, which are never changed in place."""
        ...

    @property
    def transform(self) -> ImageTransform:
        """The transform that images go through first."""
        ...

    @property
    def feature_dim(self) -> int:
        """The width d of the features (b, d) that it gives of images."""
        ...

    @property
    def is_pretrained(self) -> bool:
        """Whether its weights come from elsewhere and stay as they are, unless ``tune=full``."""
        ...

    @property
    def weights_hash(self) -> str:
        """A hex digest of weights from elsewhere; empty for a network that starts at random."""
        ...


class FrozenEncoder(Protocol):
    """A frozen map from images to what the trainable part reads; computed once and kept in the feature cache."""

    @property
    def key(self) -> str:
        """A digest of weights, transform and output kind; part of the cache key."""
        ...

    def __call__(self, pixels: Tensor) -> Tensor:
        """uint8 (b, 3, h, w) to float32 (b, ...), or float16, in which the cache then keeps it; models get float32."""
        ...


@dataclass(frozen=True)
class LinearHead:
    """The names of a model's linear classifier: logits are ``scale * (features @ weight.T + bias)``.

    ``weight`` (C, d) and ``bias`` (C,) are the names of trained tensors.
    """

    weight: str = "head.weight"
    bias: str = "head.bias"
    scale: float = 1.0

    @property
    def names(self) -> tuple[str, str]:
        return self.weight, self.bias


ForwardPass = Callable[[Tensors, Tensor, bool], Outputs]
"""``forward(tensors, inputs, training)``, see `Model`."""


@dataclass(frozen=True, eq=False)
class Model:
    """The tensors that are trained and sent, and the pure function that computes logits with them.

    ``forward(tensors, inputs, training)`` reads ``{**weights, **buffers}`` and ignores tensors that it does not know;
    with ``training`` it may update the buffers in place (batch-norm statistics). Frozen tensors are part of the
    function.
    """

    weights: Tensors
    forward: ForwardPass
    buffers: Tensors = field(default_factory=dict)
    """Sent and averaged but not trained: running statistics."""
    encoder: FrozenEncoder | None = None
    """If set, batches carry the encoder's output instead of images."""
    transform: Callable[[Tensor], Tensor] | None = None
    """Without an encoder: uint8 (b, 3, h, w) to the float batch that ``forward`` takes."""
    constants: Tensors = field(default_factory=dict)
    """Frozen tensors a loss needs (text features); known to both sides, never sent."""
    head: LinearHead | None = None
    """The linear classifier on ``features``; None where there is none, or none that a method may replace."""
    side_encoders: Mapping[str, FrozenEncoder] = field(default_factory=dict)
    """Further frozen encoders (a teacher) whose output on the training samples a loss reads from ``batch.side``."""
    weights_hashes: tuple[str, ...] = ()
    """Hashes of all pretrained weights that the model reads besides the run's backbone (a teacher, a text encoder)."""
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    """Factor on the learning rate by name of a weight; 1 where absent."""
    batch_norm: frozenset[str] = frozenset()
    """The names of all weights and buffers of batch-norm layers."""
    own: frozenset[str] = frozenset()
    """Names of weights and buffers that ``forward`` does not read: those of a further model that each client keeps."""
    of_server: frozenset[str] = frozenset()
    """Names of buffers that only the server changes. Clients never send them. The server sends a change in the payload
    of a `Broadcast`, whose bytes are counted; the buffers themselves are not."""

    @property
    def linear_head(self) -> LinearHead:
        """``head``. Raises FedbenchError where there is none; a method that reads it requires ``linear_head``."""
        if self.head is None:
            raise FedbenchError(f"the method needs a linear classifier; {NO_LINEAR_HEAD}.")
        return self.head


@dataclass(frozen=True, eq=False)
class Broadcast:
    """The server's message to one client: weights to train from, and further tensors. Both count as sent down."""

    weights: Tensors
    payload: Tensors = field(default_factory=dict)
    buffers: Tensors | None = None
    """Running statistics in place of the global ones; None means the global ones."""
    held: Tensors = field(default_factory=dict)
    """Further tensors that the client has from an earlier round: in its payload, but not counted as sent."""


@dataclass(frozen=True, eq=False)
class GlobalModel:
    """An answer of ``aggregate`` instead of weights alone: a server that trains may also change running statistics."""

    weights: Tensors
    buffers: Tensors


@dataclass(frozen=True, eq=False)
class ClientReport:
    """A client's report to the server before the first round."""

    client: int
    num_examples: int
    class_counts: Tensor | None
    """(C,) int64; None where labels are hidden."""


@dataclass(frozen=True, eq=False)
class Update:
    """A client's answer; ``num_examples`` is n_k. The bytes of all three tensor mappings count as sent up."""

    client: int
    weights: Tensors
    buffers: Tensors
    num_examples: int
    payload: Tensors = field(default_factory=dict)
    """Further tensors a method uploads (prototypes, control variates)."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the client's training: ``train_loss``, and others under names of the method's own. Their means over
    the updates that the server accepts are metrics of the round."""
    encoded: int | None = None
    """Bytes of the message that the weights were sent in, where it is not the tensors themselves."""


@dataclass(frozen=True, eq=False)
class StepGradients:
    """The gradients by which the optimiser moves weights in a local step; a weight without one stays as it is."""

    by_name: Tensors
    loss: Tensor
    """The loss that is recorded, a scalar without a gradient."""


@dataclass(frozen=True, eq=False)
class Predictions:
    """Predicted classes on a split, (n,) int64, by the global model; None for a method that has none.

    Personalised methods add those of each client's own model, of requested clients, on the same split; scored apart.
    """

    labels: Tensor | None
    by_client: Mapping[int, Tensor] = field(default_factory=dict)
    scores: Tensor | None = None
    """The global model's logits, (n, C) float: calibration is of their softmax. None for a method that has none."""

    def on_cpu(self) -> Predictions:
        labels, scores = (None if tensor is None else tensor.cpu() for tensor in (self.labels, self.scores))
        return Predictions(labels, {client: own.cpu() for client, own in self.by_client.items()}, scores)


class InputSource(Protocol):
    """Float inputs that can be read by index and narrowed to a client's samples."""

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images, which may be augmented."""
        ...

    def __len__(self) -> int: ...

    def read(self, indices: Tensor) -> Tensor:
        """Inputs at ``indices`` (int64, (b,)), shape (b, ...) float32."""
        ...

    def select(self, indices: Tensor) -> InputSource:
        """The samples at ``indices`` (int64, (m,)) as a source of their own."""
        ...

    def resident(self) -> InputSource:
        """The same samples, ready to be read many times: in memory as floats where they fit."""
        ...
