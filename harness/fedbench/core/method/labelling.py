"""What a method is handed that gives clients labels where their own are hidden."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from fedbench.core.method.tasks import ModelSetup
    from fedbench.core.types import FrozenEncoder, InputSource


@dataclass(frozen=True, eq=False)
class LabelledSamples:
    """Samples as an encoder sees them, with their ``labels`` (m,) int64."""

    features: Callable[[FrozenEncoder], InputSource]
    labels: Tensor


@dataclass(frozen=True, eq=False)
class LabelTask:
    """The clients' samples; of some or all of them the scenario hides the labels."""

    setup: ModelSetup
    features: Callable[[FrozenEncoder], InputSource]
    """All n training samples as an encoder sees them, cached on disk."""
    clients: Sequence[Tensor]
    """Each client's samples that have no label, int64 into the n. What a client labels must depend on its own alone."""
    num_samples: int
    """n."""
    server: LabelledSamples | None = None
    """The server's own, for a method that requires ``server_labels``."""
