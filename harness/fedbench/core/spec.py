"""A run, fully described: what goes in decides what comes out, and its content hash is the run id."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from fedbench.core.scenario import Scenario, later

MOST_SEED = 2**63 - 1
"""The largest seed: seeds are stored as 64-bit integers."""
_MOST = 1_000_000
"""The most rounds, passes and samples of a batch: more is a typing error, or overflows far inside torch."""


def no_bool(value: object) -> object:
    """``value``, unless it is a boolean, which pydantic would take for the number 0 or 1."""
    if isinstance(value, bool):
        raise ValueError(f"it is a number, not {str(value).lower()}")
    return value


class Training(BaseModel):
    """Budget and optimiser of a run. The budget is the suite's; a method's ``recipe`` may set the optimiser."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: int = Field(20, ge=0, le=_MOST, description="communication rounds")
    finetune_epochs: int = Field(
        0,
        ge=0,
        le=_MOST,
        description="after the last round every client trains on alone this long; measured apart, not kept",
    )
    local_epochs: int = Field(1, ge=1, le=_MOST, description="passes of a client over its data in a round (E)")
    local_steps: int | None = later(
        None,
        ge=1,
        le=_MOST,
        description="local steps of a client in a round, in place of passes over its data; after a pass it begins "
        "another. 1: clients synchronise after every step (FedSGD), and momentum, anew in every round, has no effect. "
        "none: as many as local_epochs take",
    )
    batch_size: int = Field(32, ge=1, le=_MOST, description="samples of one local step (B)")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="rebuilt at every participation of a client")
    lr: float = Field(0.01, gt=0, le=100, description="client learning rate (η)")
    momentum: float = Field(0.9, ge=0, lt=1, description="SGD momentum (ρ)")
    weight_decay: float = Field(0.0, ge=0, le=10, description="coupled L2 for sgd and adam, decoupled for adamw")
    beta1: float = Field(0.9, ge=0, lt=1, description="Adam's first-moment decay")
    beta2: float = Field(0.999, ge=0, lt=1, description="Adam's second-moment decay")
    eps: float = Field(1e-8, gt=0, le=1, description="Adam's ε")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rate after every round")
    lr_schedule: Literal["constant", "cosine"] = later(
        "constant",
        description="factor on the learning rate over the rounds after the warm-up; cosine: from 1 towards 0 "
        "(Loshchilov and Hutter 2017, without restarts)",
    )
    warmup_rounds: int = later(
        0,
        ge=0,
        le=_MOST,
        description="rounds w in which the learning rate climbs: in round t it is t / (w + 1) of itself",
    )
    clip_norm: float | None = later(
        None,
        gt=0,
        le=1e6,
        description="largest norm of a local step's gradients, all weights together; none: unlimited",
    )
    weighting: Literal["samples", "uniform"] = Field("samples", description="aggregation weights over the participants")
    precision: Literal["float32", "tf32", "bfloat16"] = Field(
        "float32",
        description="arithmetic of training and evaluation; float32: as IEEE has it; tf32: matrix products and "
        "convolutions on CUDA read 10 bits of a mantissa; bfloat16: local steps are autocast, all else is float32. "
        "Weights, averages and cached features are float32 always",
    )
    augment: Literal["none", "batch", "sample"] = Field(
        "none", description="random crop and flip, drawn once a batch (CReFF family) or once a sample; images only"
    )
    eval_every: int = Field(1, ge=1, le=_MOST, description="evaluate every so many rounds; the last round always is")
    own_every: int = later(
        0,
        ge=0,
        le=_MOST,
        description="evaluate clients' own models every so many rounds, a multiple of eval_every; 0: after the last "
        "round alone, as it always is",
    )

    @field_validator("local_steps")
    @classmethod
    def _steps_are_in_place_of_epochs(cls, steps: int | None, info: ValidationInfo) -> int | None:
        epochs = info.data.get("local_epochs", 1)
        if steps is not None and epochs != 1:
            raise ValueError(f"it takes the place of local_epochs={epochs}; set that to 1, or leave one of them out")
        return steps

    @field_validator("own_every")
    @classmethod
    def _own_models_are_evaluated_beside_the_global_one(cls, rounds: int, info: ValidationInfo) -> int:
        every = info.data.get("eval_every", 1)
        if rounds % every:
            raise ValueError(f"it must be a multiple of eval_every={every}")
        return rounds


OPTIMISER_KEYS = frozenset(
    {
        "optimizer",
        "lr",
        "momentum",
        "weight_decay",
        "beta1",
        "beta2",
        "eps",
        "lr_decay",
        "lr_schedule",
        "warmup_rounds",
        "clip_norm",
    }
)
"""Settings that a method's recipe may set; everything else of ``Training`` is the comparison's budget."""
_NOT_BUDGET = OPTIMISER_KEYS | {"eval_every", "own_every", "finetune_epochs"}
BUDGET = tuple(name for name in Training.model_fields if name not in _NOT_BUDGET)
"""Fields of `Training` in which runs of one table must agree, the ``precision`` aside, which may be a column."""


class RunSpec(BaseModel):
    """One method (or stack) on one data set, scenario, backbone and seed."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str = Field("embedded", description="data set, see `fedbench list datasets`")
    scenario: Scenario = Field(default_factory=lambda: Scenario(), description="how data are partitioned among clients")
    backbone: str = Field("clip:embedded", description="backbone, see `fedbench list backbones`")
    text_encoder: str = Field(
        "auto",
        description="text encoder of methods that compare images with words; auto = the CLIP backbone's, else the "
        "embedded one's (also written backbone.text)",
    )
    teacher: str = Field(
        "auto",
        description="CLIP that teaches the backbone; auto = the backbone itself if it is CLIP, else the embedded one "
        "(also written backbone.teacher)",
    )
    tune: Literal["auto", "head", "full"] = Field(
        "auto", description="what is trained: a head on frozen features, or everything; auto = head for CLIP, full else"
    )
    head_scale: float | None = Field(
        None, gt=0, le=1000, description="logit scale of a CLIP head; none = the scale the backbone learned"
    )
    templates: tuple[str, ...] = Field(("a photo of a {}",), min_length=1, description="prompts; {} is the class name")
    metrics: tuple[str, ...] = later(
        (), description="metrics of plug-ins beside the standard ones, see `fedbench list metrics`"
    )
    method: str = Field("fedavg", description="method or stack (`a+b`), see `fedbench list methods`")
    params: dict[str, dict[str, Any]] = Field(default_factory=dict, description="hyper-parameters by method")
    training: Training = Field(default_factory=lambda: Training(), description="budget and optimiser")
    seed: int = Field(0, ge=0, le=MOST_SEED, description="seed of everything drawn in the run")
    device: str = Field("cpu", description="torch device")
    tuned: str = Field("", description="study whose best parameters the run has; empty for the suite's own")
    # what a suite calls the run: no part of its identity, nor of what is dumped
    label: str = Field("", exclude=True, description="name of the row in leaderboards; the method where empty")
    setting: str = Field("", exclude=True, description="name of the suite's setting")
    scale: str = Field("", exclude=True, description="name of the suite's scale")
    published: tuple[dict[str, str], ...] = Field((), exclude=True, description="keys of published numbers replayed")
    tuning: dict[str, str] = Field(
        default_factory=dict, exclude=True, description="what the study spent: trials, seeds, pruner, objective"
    )

    @property
    def stack(self) -> tuple[str, ...]:
        """The stacked methods in name order: `b+a` is the same run as `a+b`."""
        return stack_names(self.method)

    @property
    def run_id(self) -> str:
        """sha256 of the content, the first 16 hex digits. Same id, code, data and weights: same numbers."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    @property
    def row(self) -> str:
        """The name of the leaderboard row: label or method, backbone, and unusual settings."""
        notes = [] if self.tune == "auto" else [str(self.tune)]
        notes += ["no labels"] if self.scenario.labels == "hidden" else []
        notes += ["tuned"] if self.tuned else []
        return f"{self.label or self.method} · {self.backbone}" + (f" ({', '.join(notes)})" if notes else "")

    @property
    def title(self) -> str:
        """The run's name in progress views and messages: its setting and row."""
        return f"{self.setting} · {self.row}" if self.setting else self.row


def untuned(row: str) -> str:
    """The name of a row (`RunSpec.row`) without what says that it is tuned."""
    return row.replace(", tuned)", ")").replace(" (tuned)", "")


def stack_names(method: str) -> tuple[str, ...]:
    """The methods of a stack ``a+b``, sorted; fedavg is dropped beside others, since it is every method's default."""
    names = sorted({part.strip() for part in method.split("+")})
    return tuple(n for n in names if n != "fedavg") or ("fedavg",)
