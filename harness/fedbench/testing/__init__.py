"""The contract every method must keep: `fedbench check METHOD`, or in a test of one's own

    @pytest.mark.parametrize("check", fedbench.testing.CHECKS)
    def test_contract(check): check("my-method")

A check trains on a tiny federation for seconds. It raises an error, or returns a reason where it does not apply.
`fedbench.testing.plugins` has the contracts of data sets, partitions, backbones, text encoders, metrics and suites.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.method.hooks import STEPS
from fedbench.core.method.hyper import declared
from fedbench.core.randomness import torch_generator
from fedbench.kinds.methods import HOOK_NAMES
from fedbench.kinds.registry import PLUGIN_FILES, find_method
from fedbench.plugins.assembly import assemble
from fedbench.plugins.guards import contents, watched
from fedbench.rounds.loop import evaluate
from fedbench.rounds.run import shared
from fedbench.rounds.state import RunState, all_tensors, private_tensors, save_state
from fedbench.testing.tiny import (
    TINY_ROUNDS,
    contract_backbone,
    digest,
    final_state,
    scratch_folder,
    tiny_backbone,
    tiny_dataset,
    tiny_run,
    tiny_spec,
    with_learner,
)

__all__ = [
    "CHECKS",
    "check_executors",
    "check_hidden_labels",
    "check_own_models",
    "check_resume",
    "check_resumes",
    "check_same_seed",
    "check_stacking",
    "check_training",
    "contract_backbone",
    "digest",
    "final_state",
    "scratch_folder",
    "tiny_backbone",
    "tiny_dataset",
    "tiny_run",
    "tiny_spec",
    "with_learner",
]
RESUME_SECONDS = 900
WITH_STATISTICS = "resnet8?width=1"
"""A backbone with running statistics."""
LEAST_LINES = 4
"""Of a module's docstring."""
EXECUTOR_TOLERANCE = 1e-4
"""Between executors, relative to a tensor's largest value; rounding alone gives about 1e-6."""


def check_declaration(name: str) -> None:
    """Citation and docstring tell the paper; every hyper-parameter has symbol and source; it can be made."""
    cls = find_method(name)
    assert len(cls.citation) > 20, f"the citation {cls.citation!r} is too short; name authors, title and year"
    module = sys.modules[cls.__module__]
    lines = len((module.__doc__ or "").strip().splitlines())
    assert lines >= LEAST_LINES, (
        f"the file begins with a docstring of {lines} lines; write citation and equations there, which `fedbench "
        f"describe` prints, in {LEAST_LINES} lines or more"
    )
    for parameter in declared(cls.Params).values():
        assert parameter.hyper.symbol and parameter.hyper.source, f"{parameter.name} lacks symbol or source"
    cls(cls.Params())


def check_hooks(name: str) -> None:
    """It answers a hook, every method that bears a hook's name is marked, and documented."""
    assemble(name, {})
    cls = find_method(name)
    undocumented = [h for h in HOOK_NAMES if hasattr(cls, h) and not (getattr(cls, h).__doc__ or "").strip()]
    assert not undocumented, f"{', '.join(undocumented)}: no docstring, which `fedbench describe` prints"


def check_training(name: str, *, participation: float = 0.5) -> str:
    """Two rounds are finite and move the weights, but not backbone, global generators, or what hooks are handed.

    Private weights must move with some client, in four rounds if not in two; where all are private there need not be a
    global model. Gives the `digest` of the state after them. With a ``participation`` of 1 clients take part again."""
    spec = tiny_spec(name, rounds=2)
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"participation": participation})})
    run = tiny_run(spec, executor="sequential")
    hooks = watched(run.assembly.hooks, dict.fromkeys(STEPS, name), contents)
    run = replace(run, assembly=replace(run.assembly, hooks=hooks))
    backbone = tiny_backbone(run.spec.backbone)
    before = {k: v.clone() for k, v in backbone.module.state_dict().items()}
    generator = torch.get_rng_state()
    # without the harness's own seeding, which puts them back
    with patch("fedbench.rounds.loop.global_generators", lambda *_: nullcontext()):
        state = final_state(run)
    metrics, predictions = evaluate(run, state)
    shared_weights = shared(state.weights, run.private)
    if predictions.labels is None:
        assert state.weights and not shared_weights, "weights are shared, so there is a global model: predict by it"
        assert "personal_mean_client_accuracy" in metrics, "neither a global model nor models of the clients' own"
    else:
        assert 0 <= metrics["global_accuracy"] <= 100
        assert len(predictions.labels) == len(run.federation.test)
    assert all(0 <= metrics[key] <= 100 for key in metrics if key.startswith("personal_"))
    for key, tensor in {**state.weights, **private_tensors(state)}.items():
        assert torch.isfinite(tensor).all(), f"{key} is not finite after two rounds"
    moved = any(not torch.equal(run.model.weights[k], v) for k, v in shared_weights.items())
    assert moved or not shared_weights, "two rounds left every weight as it was"
    private = run.private & run.model.weights.keys()

    def some_moved(state: RunState) -> bool:
        return any(not torch.equal(run.model.weights[k], own[k]) for own in state.own.values() for k in private)

    # a method may begin with them when a client takes part again, as one has by then
    moved = (
        not private or some_moved(state) or some_moved(final_state(tiny_run(tiny_spec(name), executor="sequential")))
    )
    assert moved, "four rounds left every client's private weights as they were"
    frozen = all(torch.equal(before[k], v) for k, v in backbone.module.state_dict().items())
    assert frozen, "the backbone's own tensors changed; train copies of them"
    assert torch.equal(generator, torch.get_rng_state()), "drew from torch's global generator"
    return digest(state)


def check_own_models(name: str) -> str | None:
    """A model of each client's own beside the global one is what clients predict by, and no part of it is sent."""
    try:
        run = tiny_run(tiny_spec(name, backbone=WITH_STATISTICS, rounds=1))
    except MethodFault:
        raise
    except FedbenchError:
        run = tiny_run(tiny_spec(name, rounds=1))
    if not run.model.own:
        return "no model of the clients' own beside the global one"
    state = final_state(run)
    rng = torch_generator(0, "tensors that no client has trained")

    def untrained(kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        drawn = {k: torch.randn(v.shape, generator=rng).to(v.dtype) for k, v in kept.items() if k in run.model.own}
        return {**kept, **drawn}

    others = {client: untrained(kept) for client, kept in state.own.items()}
    predicted, changed = (evaluate(run, each)[1].by_client for each in (state, replace(state, own=others)))
    assert predicted, "no predictions by clients' own models: add Predictions.by_client in evaluate"
    assert any(not torch.equal(labels, changed[client]) for client, labels in predicted.items()), (
        "clients predict alike whatever is in the tensors they keep: read them in evaluate, by task.own_model(client)"
    )
    return None


def check_same_seed(name: str) -> None:
    """The same spec gives the same bits; another seed gives others."""
    spec = tiny_spec(name, rounds=2)
    first, second = final_state(tiny_run(spec)), final_state(tiny_run(spec))
    assert digest(first) == digest(second), "two runs of the same spec differ"
    other = final_state(tiny_run(spec.model_copy(update={"seed": 1})))
    assert not first.weights or digest(first) != digest(other), "another seed gives the same weights"


def check_resume(name: str) -> None:
    """Four rounds equal two rounds, save, load in a new process, two more."""
    check_resumes([name])


def check_resumes(names: list[str]) -> None:
    """`check_resume` for many methods with one new process between them."""
    with tempfile.TemporaryDirectory() as folder:
        expected = {}
        for name in names:
            spec = tiny_spec(name)
            half = final_state(run := tiny_run(spec), until=TINY_ROUNDS // 2)
            save_state(half, Path(folder) / f"{name}.safetensors", spec.run_id)
            expected[name] = digest(final_state(run, half))
        command = [sys.executable, "-m", "fedbench.testing", folder, *names, "--", *map(str, PLUGIN_FILES.get())]
        try:
            child = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RESUME_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"resumed in a new process, it takes more than {RESUME_SECONDS} s") from None
        assert child.returncode == 0, child.stderr
        got = {name: (Path(folder) / f"{name}.digest").read_text(encoding="utf-8") for name in names}
    wrong = [name for name in names if got[name] != expected[name]]
    assert not wrong, f"{', '.join(wrong)}: resumed in a new process, the run ends elsewhere than without a break"


def check_executors(name: str) -> None:
    """However a cohort is trained, the weights are the same: at once, to float tolerance; in threads, to the bit."""
    # three of four clients, of unequal sizes and with a short last batch, so that batches are padded
    spec = tiny_spec(name, rounds=2, local_epochs=2)
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"participation": 0.75})})
    one_by_one = final_state(tiny_run(spec, executor="sequential"))
    assert digest(final_state(tiny_run(spec, executor="sequential", cores=2))) == digest(one_by_one), (
        "clients trained in two threads end elsewhere than one after another: hooks must not share what they change"
    )
    at_once = final_state(tiny_run(spec))
    for key, wanted in all_tensors(one_by_one).items():
        value = all_tensors(at_once)[key]
        difference, size = (value - wanted).abs().max(), wanted.abs().max()
        assert difference <= EXECUTOR_TOLERANCE * size + 1e-6, (
            f"{key} differs by {difference:.1e} between clients trained at once and one after another"
        )


def check_stacking(name: str) -> str | None:
    """It stacks with fedprox in either order with the same result, or refuses in one sentence."""
    try:
        first = final_state(tiny_run(tiny_spec(f"{name}+fedprox", rounds=1)))
    except FedbenchError as error:
        return _refusal(error, name)
    second = final_state(tiny_run(tiny_spec(f"fedprox+{name}", rounds=1)))
    assert digest(first) == digest(second), "a+b and b+a differ"
    return None


def check_neutral(name: str) -> str | None:
    """With its parameters at their neutral values it equals FedAvg bit for bit, one client after another."""
    known = declared(find_method(name).Params).values()
    if not (neutral := {p.name: p.hyper.neutral for p in known if p.hyper.neutral is not None}):
        return "no hyper-parameter declares a neutral value"
    spec = tiny_spec(name, rounds=2)
    spec = spec.model_copy(update={"params": {name: {**spec.params[name], **neutral}}})
    plain = spec.model_copy(update={"method": "fedavg", "params": {}})
    # clients trained at once may have FedAvg's own gradient in closed form, which rounds otherwise than autograd's
    ours, fedavgs = (digest(final_state(tiny_run(each, executor="sequential"))) for each in (spec, plain))
    assert ours == fedavgs, f"{neutral} is not FedAvg"
    return None


def check_hidden_labels(name: str) -> str | None:
    """Under hidden labels it trains without them, or refuses in one sentence before anything is trained."""
    try:
        run = tiny_run(tiny_spec(name, hidden=True, rounds=1))
    except FedbenchError as error:
        return _refusal(error, name, "label")
    final_state(run)  # a method that refuses only here has to declare requires = ("labels",)
    return None


def check_other_backbone(name: str) -> str | None:
    """On a CNN from scratch it trains, or says in one sentence which backbone it needs."""
    try:
        state = final_state(tiny_run(tiny_spec(name, backbone="convnet", rounds=1)))
    except FedbenchError as error:
        return _refusal(error, name, "backbone")
    for key, tensor in state.weights.items():
        assert torch.isfinite(tensor).all(), f"{key} is not finite after a round"
    return None


def _refusal(error: FedbenchError, name: str, about: str = "") -> str:
    """The sentence by which a run of ``name`` is refused; AssertionError where it is none, or not ``about`` that.

    Raises what refuses every run of the method: it is broken.
    """
    tiny_run(tiny_spec(name, rounds=1))
    if isinstance(error, MethodFault):
        raise error
    text = str(error)
    assert "\n" not in text, f"refused in more than one line: {text}"
    assert about in text, f"refused for another reason than its {about}: {text}"
    return text


CHECKS: tuple[Callable[[str], str | None], ...] = (
    check_declaration,
    check_hooks,
    check_training,
    check_own_models,
    check_same_seed,
    check_resume,
    check_executors,
    check_stacking,
    check_neutral,
    check_hidden_labels,
    check_other_backbone,
)
