"""FedBN: Li et al. 2021, batch-norm layers that stay with the client."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.method.tasks import AggregationTask, EvaluationTask
from fedbench.core.types import Model, Outputs, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.rounds.loop import evaluate, train_round
from fedbench.rounds.metrics import size_in_bytes
from fedbench.testing import check_training, final_state, tiny_backbone, tiny_spec
from fedbench_methods.fedbn import FedBN, FedBnParams, mean_layers
from tests.equations.kit import CLIP, RESNET, run_of, task_of

METHOD = FedBN(FedBnParams())


class Watched:
    """An executor that remembers the updates as the clients made them."""

    def __init__(self, inner):
        self.inner, self.description, self.updates = inner, "watched", {}

    def train(self, tasks):
        self.updates = {update.client: update for update in self.inner.train(tasks)}
        return list(self.updates.values())


@pytest.mark.parametrize("backbone", ["resnet8", "resnet18"])
def test_exactly_the_tensors_of_batch_norm_layers_are_private_whatever_their_names(backbone):
    run = run_of("fedbn", backbone=backbone)
    layers = {n for n, m in tiny_backbone(backbone).module.named_modules() if isinstance(m, torch.nn.BatchNorm2d)}
    entries = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert run.private == {f"body.{layer}.{entry}" for layer in layers for entry in entries}
    # those of the shortcuts, which the released code finds in a net of its own but not in torchvision's
    shortcut = {"resnet8": "body.block2.shortcut.bn.weight", "resnet18": "body.layer2.0.downsample.1.running_var"}
    assert shortcut[backbone] in run.private
    by_name = {n for n in (*run.model.weights, *run.model.buffers) if "bn" in n}
    assert (by_name == run.private) == (backbone == "resnet8")


def test_a_projectors_batch_norm_is_private_too():
    run = run_of("fedbn+fedglcl", backbone="clip:embedded", rounds=1)
    assert run.private == frozenset()
    run = run_of("fedbn+fedglcl", {"fedglcl": {"projector_norm": "bn"}}, backbone=CLIP, rounds=1)
    assert "projector.norm.weight" in run.private and "projector.norm.running_mean" in run.private
    assert not any(name.startswith("projector.fc") for name in run.private)


def test_batch_norm_stays_as_the_client_left_it_and_everything_else_is_the_mean():
    run = run_of("fedbn", backbone=RESNET, rounds=2)
    watched = Watched(run.executor)
    run = replace(run, executor=watched)
    after, record = train_round(run, run.initial_state())
    first = {k: {**u.weights, **u.buffers} for k, u in watched.updates.items()}
    assert len({watched.updates[k].num_examples for k in record.cohort}) > 1
    for name, initial in {**run.model.weights, **run.model.buffers}.items():
        values = {k: first[k][name] for k in record.cohort}
        if name in run.private:
            # neither averaged at the server nor lost at the client, the running statistics as little as the weights
            assert torch.equal({**after.weights, **after.buffers}[name], initial)
            assert all(torch.equal(after.own[k][name], values[k]) for k in record.cohort)
        else:
            mean = sum(values[k].double() for k in record.cohort) / len(record.cohort)
            torch.testing.assert_close(after.weights[name].double(), mean, rtol=1e-5, atol=1e-7)
    tasks = {k: task_of(run, k, state=after, round=2) for k in record.cohort}
    for k, task in tasks.items():
        for name, tensor in {**task.received, **task.buffers}.items():
            wanted = first[k][name] if name in run.private else after.weights[name]
            assert torch.equal(tensor, wanted)
    one, other = (tasks[k].buffers["body.bn1.running_mean"] for k in record.cohort)
    assert not torch.equal(one, other)


def test_each_client_counts_its_own_batches():
    run = run_of("fedbn", backbone=RESNET, rounds=2, scenario={"participation": 1.0})
    state = final_state(run)
    for k, own in state.own.items():
        batches = len(task_of(run, k, state=state).inputs)
        assert own["body.bn1.num_batches_tracked"] == 2 * _steps(batches, 8)


def _steps(samples, batch):
    full, rest = divmod(samples, batch)
    return full + (rest > 1)


def test_batch_norm_is_neither_sent_nor_counted():
    run = run_of("fedbn", backbone=RESNET, rounds=1)
    after, record = train_round(run, run.initial_state())
    everything = size_in_bytes(run.model.weights, run.model.buffers)
    # three layers each of 16, 32 and 64 channels: four float32 a channel and one int64 counter a layer
    kept = 3 * (16 + 32 + 64) * 4 * 4 + 9 * 8
    assert kept == size_in_bytes(after.own[record.cohort[0]])
    assert record.bytes_up == record.bytes_down == 2 * (everything - kept)


def aggregated(**params):
    """The mean of 1 and 5 as a weight, of 2 and 10 as a statistic and of counters 7 and 8, from 1 and 3 samples."""
    updates = tuple(
        Update(k, {"w": torch.tensor(w)}, {"mean": torch.tensor(2 * w), "count": torch.tensor(7 + k)}, n)
        for k, (w, n) in enumerate(((1.0, 1), (5.0, 3)))
    )
    buffers = {"mean": torch.tensor(0.0), "count": torch.tensor(0)}
    spec = tiny_spec("fedavg", backbone="convnet", weighting="samples")
    task = AggregationTask(1, {"w": torch.tensor(0.0)}, buffers, updates, Model({}, None), spec, {})
    made = FedBN(FedBnParams(**params)).aggregate(task)
    return {name: tensor.item() for name, tensor in {**made.weights, **made.buffers}.items()}


def test_the_mean_of_weights_and_of_other_statistics_is_plain_whatever_the_runs_weighting():
    assert aggregated() == {"w": 3.0, "mean": 6.0, "count": 7}
    assert aggregated(weighting="samples") == {"w": 4.0, "mean": 8.0, "count": 7}


# by FedBN's option, and by that of the run that FedAvg reads


def test_one_client_alone_is_fedavg_bit_for_bit():
    ours, plain = (
        run_of(method, backbone=RESNET, scenario={"clients": 1, "participation": 1.0}, rounds=2)
        for method in ("fedbn", "fedavg")
    )
    one, other = final_state(ours), final_state(plain)
    wanted = {**other.weights, **other.buffers}
    found = {**one.weights, **one.buffers, **one.own[0]}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    metrics, expected = evaluate(ours, one)[0], evaluate(plain, other)[0]
    assert {name: metrics[name] for name in expected} == expected
    assert metrics["personal_mean_client_accuracy"] == pytest.approx(expected["mean_client_accuracy"])


def test_reported_layers_are_the_unweighted_mean_and_the_first_clients_counter():
    own = {
        7: {"mean": torch.tensor([1.0, 4.0]), "tracked": torch.tensor(9)},
        2: {"mean": torch.tensor([3.0, 0.0]), "tracked": torch.tensor(5)},
    }
    got = mean_layers(own)
    assert got["mean"].tolist() == [2.0, 2.0]
    assert got["tracked"] == 5 and got["tracked"].dtype == torch.int64
    assert mean_layers({3: own[7]})["mean"].tolist() == [1.0, 4.0]


def shifted(tensors, inputs, training):
    """Logits (x + shift, shared): class 0 where x + shift exceeds the shared weight."""
    return Outputs(torch.stack([inputs[:, 0] + tensors["shift"], tensors["shared"].expand(len(inputs))], 1), inputs)


def evaluation(client=None, clients=(0, 1, 2), own=None):
    # shift: 1 at client 0, -3 at client 1; client 2 has not taken part; initially 0
    held = {0: {"shift": torch.tensor(1.0)}, 1: {"shift": torch.tensor(-3.0)}} if own is None else own
    weights = {"shared": torch.tensor(0.0), "shift": torch.tensor(0.0)}
    model = Model(weights, shifted, batch_norm=frozenset({"shift"}))
    inputs = FeatureInputs(torch.tensor([[-0.5], [0.5], [2.0]]))
    private = frozenset({"shift"})
    return EvaluationTask(model, weights, {}, inputs, 2, client, clients=clients, own=held, private=private)


def test_global_columns_and_who_never_took_part_use_the_mean_and_own_models_their_own_layers():
    got = METHOD.evaluate(evaluation())
    # mean shift -1: -1.5, -.5, 1
    assert got.labels.tolist() == [1, 1, 0]
    own = {client: found.tolist() for client, found in got.by_client.items()}
    # client 2 by the mean layers; by the initial ones it would be 1, 0, 0
    assert own == {0: [0, 0, 0], 1: [1, 1, 1], 2: [1, 1, 0]}
    assert METHOD.evaluate(evaluation(clients=())).by_client == {}


def test_before_anyone_took_part_the_initial_layers_are_used():
    assert METHOD.evaluate(evaluation(own={})).labels.tolist() == [1, 0, 0]


def test_a_fine_tuned_model_is_evaluated_as_it_is():
    # the weights are client 1's own, here with shift 0, and no mean takes their place
    assert METHOD.evaluate(evaluation(client=1, clients=())).labels.tolist() == [1, 0, 0]


def test_it_keeps_the_contract_of_training_on_a_net_with_batch_norm(monkeypatch):
    monkeypatch.setattr("fedbench.testing.tiny.contract_backbone", lambda method: RESNET)
    check_training("fedbn")
