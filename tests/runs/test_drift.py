"""Data that drift, and clients that never train, in whole runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import ClientTask
from fedbench.core.spec import RunSpec
from fedbench.rounds import loop, messages
from fedbench.rounds.executors import ExecutorName
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate
from fedbench.rounds.metrics import client_accuracies
from fedbench.rounds.run import Run
from fedbench.rounds.state import load_state, save_state
from fedbench.testing import digest, final_state, tiny_run, tiny_spec

ROUNDS = 4


def drifting(method: str = "fedavg", **more: object) -> RunSpec:
    spec = tiny_spec(method, rounds=ROUNDS)
    scenario = spec.scenario.model_copy(
        update={"partition": "label_drift?stretches=2&alpha=0.5", "clients": 3, "participation": 1.0, **more}
    )
    return spec.model_copy(update={"scenario": scenario})


def with_new_clients(method: str = "fedavg", **training: object) -> RunSpec:
    spec = tiny_spec(method, rounds=2, **training)
    scenario = spec.scenario.model_copy(update={"partition": "iid", "clients": 5, "holdout_clients": 0.4})
    return spec.model_copy(update={"scenario": scenario})


@pytest.mark.parametrize("executor", ["auto", "sequential"])
def test_clients_train_on_what_they_hold_in_the_round(executor: ExecutorName, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(drifting(), executor=executor)
    seen: dict[int, list[tuple[int, list[int]]]] = {}

    def recorded(of: Run, state: object, number: int, *rest: object) -> ClientTask:
        task: ClientTask = messages.client_task(of, state, number, *rest)  # type: ignore[arg-type]
        assert task.class_counts is not None and task.labels is not None
        assert task.class_counts.tolist() == torch.bincount(task.labels, minlength=4).tolist()
        seen.setdefault(number, []).append((task.client, task.class_counts.tolist()))
        return task

    monkeypatch.setattr(loop, "client_task", recorded)
    final_state(run)
    for number in range(1, ROUNDS + 1):
        table = run.federation.in_round(number, ROUNDS).class_table.rows(0, 3).tolist()
        assert seen[number] == [(client, counts) for client, counts in enumerate(table) if sum(counts)]
    assert seen[1] == seen[2] != seen[3] == seen[4]


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "moon", "fedproto"])
def test_both_executors_and_a_stop_give_the_same(method: str, tmp_path: Path) -> None:
    spec = drifting(method)
    one_by_one = final_state(tiny_run(spec, executor="sequential"))
    at_once = final_state(tiny_run(spec))
    for name, wanted in one_by_one.weights.items():
        assert torch.allclose(at_once.weights[name], wanted, rtol=1e-4, atol=1e-5), name
    run = tiny_run(spec)
    save_state(final_state(run, until=2), tmp_path / "half.safetensors", spec.run_id)
    half = load_state(tmp_path / "half.safetensors", spec.run_id, spec.device)
    assert digest(final_state(tiny_run(spec), half)) == digest(at_once)


def test_clients_are_scored_by_what_they_hold_in_the_round() -> None:
    run = tiny_run(drifting())
    state = final_state(run)
    metrics, predictions = evaluate(run, state)
    last = replace(run, federation=run.in_round(ROUNDS).federation, scored=run.scored.in_round(ROUNDS, ROUNDS))
    assert predictions.labels is not None
    right = predictions.labels == run.scored.test.labels
    by_class = torch.tensor([float(right[run.scored.test.labels == c].double().mean()) for c in range(4)])
    counts = last.scored.class_table.rows(0, 3).double()
    held = counts[counts.sum(1) > 0]
    expected = 100 * (held @ by_class.double() / held.sum(1)).mean()
    assert metrics["mean_client_accuracy"] == pytest.approx(float(expected))


@pytest.mark.parametrize("number", [2, 4])
def test_clients_whose_domain_drifts_are_scored_on_the_domain_that_they_are_at(number: int) -> None:
    spec = drifting(partition="domain_drift?stretches=2", clients=2)
    run = tiny_run(spec)
    metrics, predictions = evaluate(run, final_state(run, until=number))
    test, tested = run.scored.test, run.scored.test.domains
    assert predictions.labels is not None and tested is not None
    right = predictions.labels == test.labels
    by_domain = [100 * float(right[tested == domain].double().mean()) for domain in (0, 1)]
    # both are at a domain of their own in both stretches; in the second each is at the other one's
    assert metrics["mean_client_accuracy"] == pytest.approx(sum(by_domain) / 2)
    assert metrics["worst_client_accuracy"] == pytest.approx(min(by_domain))
    own = client_accuracies(predictions.labels, run.scored.in_round(number, ROUNDS))
    assert own == pytest.approx(by_domain if number == 2 else by_domain[::-1])


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("fst-cbdg", "fst-cbdg keeps something about every sample of a client from round to round"),
        ("clip-linear-centralized", "data drift; run it without"),
    ],
)
def test_methods_that_need_their_samples_to_stay_are_refused(method: str, message: str) -> None:
    spec = drifting(method)
    with pytest.raises(FedbenchError, match=message):
        tiny_run(spec)


def test_new_clients_are_scored_and_in_no_task(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(with_new_clients(finetune_epochs=2))
    assert len(run.federation.clients) == 3 and len(run.scored.new_clients) == 2
    new = {int(index) for client in run.scored.new_clients for index in client.indices}
    assert new.isdisjoint(run.federation.held.tolist())
    state = final_state(run)
    metrics, predictions = evaluate(run, state)
    # the clients of iid parts without test samples of their own: by their class shares
    assert predictions.labels is not None
    right = predictions.labels == run.scored.test.labels
    by_class = torch.tensor([float(right[run.scored.test.labels == c].double().mean()) for c in range(4)])
    counts = run.scored.of_new_clients.class_table.rows(0, 2).double()
    each = 100 * (counts @ by_class.double()) / counts.sum(1)
    assert metrics["heldout_mean_client_accuracy"] == pytest.approx(float(each.mean()))
    assert metrics["heldout_worst_client_accuracy"] == pytest.approx(float(each.min()))
    before = digest(state)
    tuned = finetuned_metrics(run, state)
    assert set(tuned) == {
        f"finetuned_{who}{which}_client_accuracy" for who in ("", "heldout_") for which in ("mean", "worst")
    }
    assert digest(state) == before


@pytest.mark.parametrize("method", ["capt", "scaffold", "fedbn"])
def test_new_clients_are_fine_tuned_whatever_a_method_keeps_for_those_it_knows(method: str) -> None:
    run = tiny_run(with_new_clients(method, finetune_epochs=1))
    assert finetuned_metrics(run, final_state(run))["finetuned_heldout_mean_client_accuracy"] > 0


def test_runs_without_either_keep_their_ids() -> None:
    dumped = RunSpec().model_dump(mode="json")
    assert "holdout_clients" not in dumped["scenario"] and "metrics" not in dumped
