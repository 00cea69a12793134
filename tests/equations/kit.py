"""What tests of equations begin with: small runs, single steps, random tensors, models of a few weights."""

from collections.abc import Iterable, Mapping, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.federation import ClientShard
from fedbench.core.method.tasks import AggregationTask, ClientTask, LocalStep
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import Model, Outputs, Tensors, Update
from fedbench.rounds.loop import rounds
from fedbench.rounds.messages import broadcast, client_task
from fedbench.rounds.run import Run
from fedbench.rounds.state import RunState
from fedbench.runs import prepare
from fedbench.testing import final_state, tiny_backbone, tiny_run, tiny_spec
from fedbench.toolkit.fedavg import participant_shares
from fedbench.toolkit.local_training import batch_at

CLIP, RESNET = "clip:embedded", "resnet8?width=1"
D_T, D_V = 64, 192
"""Widths of the embedded CLIP's towers, of two and four layers."""
FEW = {
    "ccvr": {"virtual_features": 8, "epochs": 2, "lr_head": 0.1},
    "clip2fl": {"features": 4, "match_steps": 3, "retrain_epochs": 2},
    "creff": {"features": 4, "match_steps": 3, "retrain_epochs": 2},
    "rucr": {"virtual_features": 8, "rectify_epochs": 2},
}
"""By method: few features made at the server, and few steps with them."""
LORA = {"encoders": "text", "dropout": 0.0}
"""CLIP-LoRA with factors in the small text tower alone."""


# --- runs ---


def spec_of(
    stack: str,
    params: Mapping[str, Mapping[str, object]] | None = None,
    *,
    scenario: Mapping[str, object] | None = None,
    backbone: str = "",
    hidden: bool = False,
    **settings: object,
) -> RunSpec:
    """The settings of a tiny run of ``stack``, whose methods have their defaults unless ``params`` has others.

    ``scenario`` has fields of the scenario; ``settings`` are fields of the training or of the spec itself.
    """
    own = {name: settings.pop(name) for name in RunSpec.model_fields if name in settings}
    spec = tiny_spec(stack, backbone=backbone, hidden=hidden, **settings)
    every = {
        **spec.params,
        **{name: {**spec.params.get(name, {}), **values} for name, values in (params or {}).items()},
    }
    scenario = spec.scenario.model_copy(update=scenario or {})
    return spec.model_copy(update={"params": every, "scenario": scenario, **own})


def run_of(stack: str, params=None, *, executor: str = "auto", **settings: object) -> Run:
    """A tiny run; its arguments are those of `spec_of`."""
    return tiny_run(spec_of(stack, params, **settings), executor=executor)


def end_of(stack: str, params=None, **settings: object) -> RunState:
    """The state after the last round of `run_of`."""
    return final_state(run_of(stack, params, **settings))


def runs(method: str, *, backbone: str = CLIP, executor: str = "auto", **values: object):
    """`run_of` for runs of ``method``, alone or in a ``stack``, whose own values are these but for ``params``."""

    def made(stack: str = method, params=None, **settings: object) -> Run:
        own = {method: {**values, **(params or {})}} if method in stack.split("+") else {stack: params or {}}
        return run_of(stack, own, **{"backbone": backbone, "executor": executor, **settings})

    return made


def few(method: str, **params: object) -> dict[str, dict[str, object]]:
    """The values of `FEW` and ``params``; none of a method that makes no features."""
    return {method: {**FEW[method], **params}} if method in FEW else {}


def played(spec: RunSpec):
    """The run, and of every round state, record and predictions."""
    run = tiny_run(spec)
    return run, list(rounds(run, run.initial_state()))


def lora_spec(stack: str, params=None, others=None, **training: object) -> RunSpec:
    """A run with CLIP-LoRA's factors in the text tower; ``params`` are its own, ``others`` those of further methods."""
    params = {"clip-lora": {**LORA, **(params or {})}, **(others or {})}
    return spec_of(stack, params, **{"rounds": 2, "lr": 5e-3, **training})


def with_absent_classes(spec: RunSpec) -> RunSpec:
    """One client a round, with two of the four classes."""
    few = {"partition": "classes_per_client", "classes_per_client": 2, "participation": 0.25}
    return spec.model_copy(update={"scenario": spec.scenario.model_copy(update=few)})


def one_client(patch: pytest.MonkeyPatch) -> None:
    """Runs that are prepared from here on have one client, who has everyone's samples."""
    original = prepare.build_federation

    def merged(*args):
        federation = original(*args)
        return federation.with_clients((ClientShard(0, torch.cat([s.indices for s in federation.clients])),))

    patch.setattr(prepare, "build_federation", merged)


def all_of(inputs):
    """All samples of a run's ``train`` or ``test``."""
    return inputs.read(torch.arange(len(inputs)))


def loss_of(run: Run, weights: Mapping[str, Tensor]) -> float:
    """The cross-entropy of ``weights`` on all training samples."""
    return cross_entropy(
        run.model.forward(weights, all_of(run.train), False).logits, run.federation.train.labels
    ).item()


# --- single steps ---


def task_of(
    run: Run, client: int = 0, *, state: RunState | None = None, round: int = 1, exchange: int = 0
) -> ClientTask:
    """What ``client`` is handed in ``round``, by default of a run that begins."""
    state = state or run.initial_state()
    return client_task(run, state, round, exchange, client, broadcast(run, state, client, exchange))


def step_of(task: ClientTask, number: int = 0) -> LocalStep:
    """A local step from the received weights on the task's first six samples."""
    weights = {name: value.clone().requires_grad_() for name, value in task.received.items()}
    buffers = {name: value.clone() for name, value in task.buffers.items()}
    return LocalStep(weights, buffers, batch_at(task, torch.arange(6), torch.Generator()), task, number)


def updates_of(
    ends: Iterable[object], sizes: Iterable[int], clients: Iterable[int] | None = None
) -> tuple[Update, ...]:
    """Clients 0, 1, .. (or ``clients``) who end at these values of one weight "w", with so many samples each."""
    ended = zip(ends, sizes, strict=True)
    numbered = enumerate(ended) if clients is None else zip(clients, ended, strict=True)
    return tuple(Update(k, {"w": torch.as_tensor(end)}, {}, size) for k, (end, size) in numbered)


def aggregation(
    weights: Tensors, updates: Iterable[Update], state=None, *, round=1, buffers=None, training=None, **rest
):
    """The end of a round that began with ``weights``, of a run with these fields of ``training``."""
    spec = RunSpec(training=Training(**(training or {})))
    state = {} if state is None else state
    model = Model(weights, None)
    return AggregationTask(round, weights, buffers or {}, tuple(updates), model, spec, state, **rest)


# --- tensors ---


def generator(seed: int = 0) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal numbers with the deviation ``scale``."""
    return scale * torch.randn(*shape, generator=generator(seed))


def drawn_context(seed: int, length: int = 4) -> Tensor:
    """A context of so many vectors of the embedded text tower."""
    return drawn(length, D_T, seed=seed, scale=0.5)


def drawn_like(run: Run, scale: float, seed: int = 0) -> dict[str, Tensor]:
    """Weights of the run's shapes, large enough to be told apart."""
    own = generator(seed)
    return {name: scale * torch.randn(value.shape, generator=own) for name, value in run.model.weights.items()}


# --- models ---


def linear(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
    """Two logits (w . x, 0): a logistic regression with weights w (2,)."""
    score = inputs @ tensors["w"]
    return Outputs(torch.stack([score, torch.zeros_like(score)], dim=1), inputs)


def product(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
    """Logits x w of weights w (d, C)."""
    return Outputs(inputs @ tensors["w"], inputs)


def headed(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
    """Logits W x + b: the inputs are the features."""
    return Outputs(inputs @ tensors["head.weight"].T + tensors["head.bias"], inputs)


def body_and_head(tensors: Mapping[str, Tensor], inputs: Tensor, training: bool) -> Outputs:
    """Logits (h b x, 0) of scalars b and h."""
    features = inputs * tensors["body.weight"]
    score = (features * tensors["head.weight"] + tensors["head.bias"])[:, 0]
    return Outputs(torch.stack([score, torch.zeros_like(score)], dim=1), features)


def coop_texts(context: Tensor, names: Sequence[str]) -> Tensor:
    """CoOp's text features written out: prefix, context, suffix, all places of the tower, pooled at the end token."""
    clip = tiny_backbone(CLIP)
    module = clip.module
    tokens = clip.tokenizer([" ".join(["X"] * len(context)) + f" {name}." for name in names])
    embedded = module.token_embedding(tokens)
    context = context.expand(len(names), -1, -1)
    x = torch.cat([embedded[:, :1], context, embedded[:, 1 + context.shape[1] :]], dim=1)
    x = module.ln_final(module.transformer(x + module.positional_embedding, attn_mask=module.attn_mask))
    return normalize(x[torch.arange(len(names)), tokens.argmax(1)] @ module.text_projection, dim=-1)


def pairs(run: Run) -> list[str]:
    """The names of the run's pairs of low-rank factors."""
    return sorted(name.removesuffix(".A") for name in run.model.weights if name.endswith(".A"))


def exact_mean(updates: Sequence[Update], name: str) -> Tensor:
    """The mean of the products B A, weighted by samples."""
    shares = participant_shares(updates, "samples").tolist()
    return sum(p * u.weights[f"{name}.B"] @ u.weights[f"{name}.A"] for p, u in zip(shares, updates, strict=True))
