"""FedConcat: Diao, Li, He 2024: models of clusters, then one head on the features of all of them."""

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.tasks import AggregationTask, BroadcastTask, EvaluationTask, StartTask
from fedbench.core.spec import RunSpec, Training
from fedbench.core.types import ClientReport, LinearHead, Model, Outputs, Update
from fedbench.models.inputs import FeatureInputs
from fedbench.plugins.requirements import refuse_model
from fedbench.rounds.executors.sequential import train_client
from fedbench.rounds.finetuning import finetuned_metrics
from fedbench.rounds.loop import evaluate, predict, rounds, train_round
from fedbench.rounds.messages import broadcast
from fedbench.rounds.metrics import size_in_bytes
from fedbench.rounds.state import load_state, save_state
from fedbench.testing import digest, final_state
from fedbench.toolkit.local_training import batches_of
from fedbench_methods.fedconcat import (
    BIAS,
    CLUSTER,
    ENCODERS,
    HEADS,
    REACHED,
    WEIGHT,
    FedConcat,
    FedConcatParams,
    first_stage,
    warm_start,
)
from tests.equations.kit import end_of, run_of, task_of

CNN = "resnet8?width=1"


def cluster_model(server, cluster):
    return {name: tensor[cluster] for name, tensor in {**server[ENCODERS], **server[HEADS]}.items()}


def flat(server):
    """Copies of all that the server keeps."""
    return {f"{part}/{name}": t.clone() for part, kept in server.items() for name, t in kept.items()}


def shifted(tensors, inputs, training):
    """Features e x + m (b, 1), with a statistic m that training moves and does not use."""
    if training:
        tensors["mean"] += 1
    features = tensors["enc"] * inputs + (0 if training else tensors["mean"])
    return Outputs(torch.nn.functional.linear(features, tensors["head.weight"], tensors["head.bias"]), features)


def small_model() -> Model:
    """e = 1, m = 0, W = 0 and b = 0 for two classes."""
    return Model(
        weights={"enc": torch.tensor(1.0), "head.weight": torch.zeros(2, 1), "head.bias": torch.zeros(2)},
        buffers={"mean": torch.zeros(()), "count": torch.tensor(0)},
        forward=shifted,
        head=LinearHead(),
    )


def started(counts, *, model=None, rounds=4, weighting="samples", **params):
    """The plugin, the run's spec, and the server's state after ``start`` on clients with these samples by class."""
    plugin = FedConcat(FedConcatParams(**params))
    spec = RunSpec(method="fedconcat", training=Training(rounds=rounds, weighting=weighting))
    clients = [ClientReport(k, sum(row), torch.tensor(row)) for k, row in enumerate(counts)]
    task = StartTask(clients, model or small_model(), spec, {})
    sent = plugin.start(task)
    return plugin, spec, task.state, sent


def update(client, size, enc, mean=0.0, count=0):
    weights = {"enc": torch.tensor(enc), "head.weight": torch.full((2, 1), enc), "head.bias": torch.full((2,), enc)}
    return Update(client, weights, {"mean": torch.tensor(mean), "count": torch.tensor(count)}, size)


def aggregated(plugin, spec, state, updates, round=1, model=None):
    model = model or small_model()
    task = AggregationTask(round, model.weights, model.buffers, tuple(updates), model, spec, state)
    return plugin.aggregate(task)


FOUR = ([100, 0], [1, 0], [0, 100], [0, 1])


def test_clusters_are_by_label_shares_not_by_counts():
    # by counts, (100, 0) and (0, 100) would be alone and (1, 0), (0, 1) together
    _, _, state, _ = started(FOUR, clusters=2)
    assert state["fedconcat"][CLUSTER].tolist() == [0, 0, 1, 1]


def test_every_client_sends_its_label_shares_once():
    *_, sent = started([[3, 1], [0, 8]], clusters=1)
    assert sent["label_shares"].tolist() == [[0.75, 0.25], [0.0, 1.0]]
    run = run_of("fedconcat", rounds=1)
    _, record, _ = next(iter(rounds(run, run.initial_state())))
    assert record.bytes_up == 4 * 4 * 4  # four clients, four classes


def test_means_are_by_samples_inside_a_cluster_and_global_ones_over_all():
    plugin, spec, state, _ = started(FOUR, clusters=2)
    updates = [update(0, 1, 1.0, 2.0, 7), update(1, 3, 5.0, 6.0, 8), update(2, 2, 10.0, 3.0, 9)]
    weights = aggregated(plugin, spec, state, updates)
    kept, heads = state[ENCODERS], state[HEADS]
    # cluster 0: (1·1 + 3·5) / 4 = 4, statistic (1·2 + 3·6) / 4 = 5, counter of its first client; cluster 1: client 2's
    assert kept["enc"].tolist() == [4.0, 10.0]
    assert heads["head.weight"].tolist() == [[[4.0], [4.0]], [[10.0], [10.0]]]
    assert heads["head.bias"].tolist() == [[4.0, 4.0], [10.0, 10.0]]
    assert kept["mean"].tolist() == [5.0, 3.0]
    assert kept["count"].tolist() == [7, 9]
    # (1·1 + 3·5 + 2·10) / 6 = 6
    assert weights["enc"].item() == 6.0


def test_a_state_of_an_earlier_round_is_left_as_it_was():
    plugin, spec, state, _ = started(FOUR, clusters=2)
    earlier = dict(state[ENCODERS])
    before = {name: tensor.clone() for name, tensor in earlier.items()}
    aggregated(plugin, spec, state, [update(0, 1, 4.0, 2.0, 7), update(2, 2, 10.0, 3.0, 9)])
    assert all(torch.equal(before[name], tensor) for name, tensor in earlier.items())
    assert state[ENCODERS]["enc"].tolist() == [4.0, 10.0]


def test_a_cluster_without_participants_keeps_its_model():
    plugin, spec, state, _ = started(FOUR, clusters=2)
    aggregated(plugin, spec, state, [update(2, 2, 10.0, 3.0, 9)])
    assert state[ENCODERS]["enc"].tolist() == [1.0, 10.0]
    aggregated(plugin, spec, state, [update(0, 2, 4.0, 2.0, 5)], round=2)
    kept = state[ENCODERS]
    assert kept["enc"].tolist() == [4.0, 10.0]
    assert kept["mean"].tolist() == [2.0, 3.0]
    assert kept["count"].tolist() == [5, 9]


@pytest.mark.parametrize("clusters", [1, 2])
def test_clusters_start_as_copies_not_as_one_tensor(clusters):
    model = small_model()
    _, _, state, _ = started(FOUR, model=model, clusters=clusters)
    tensor = state[ENCODERS]["enc"]
    tensor[0] = 9.0
    assert tensor.tolist() == [9.0, 1.0][:clusters]
    assert model.weights["enc"].item() == 1.0


def test_stage_1_sends_each_client_the_weights_and_statistics_of_its_cluster():
    plugin, spec, state, _ = started(FOUR, clusters=2)
    aggregated(plugin, spec, state, [update(0, 1, 4.0, 5.0, 7), update(2, 2, 10.0, 3.0, 9)])
    for client, enc, mean, count in ((1, 4.0, 5.0, 7), (3, 10.0, 3.0, 9)):
        sent = plugin.broadcast(BroadcastTask(client, 2, 0, small_model().weights, spec, state))
        assert sent.weights["enc"].item() == enc
        assert sent.weights["head.bias"].tolist() == [enc, enc]
        assert {name: t.item() for name, t in sent.buffers.items()} == {"mean": mean, "count": count}
        assert not sent.payload and not sent.held


@pytest.mark.parametrize("backbone", ["clip:embedded", CNN])
def test_one_cluster_in_stage_1_is_fedavg_bit_for_bit(backbone):
    settings = {"backbone": backbone, "rounds": 2, "executor": "sequential"}
    run = run_of("fedconcat", {"fedconcat": {"clusters": 1, "stage1": 1.0}}, **settings)
    plain = run_of("fedavg", **settings)
    state, fedavg = final_state(run), final_state(plain)
    assert digest(state) == digest(fedavg)
    for name, tensor in cluster_model(state.server, 0).items():
        assert torch.equal(tensor, {**fedavg.weights, **fedavg.buffers}[name])
    _, predictions = evaluate(run, state)
    expected = predict(plain, fedavg, plain.test).labels
    assert torch.equal(predictions.labels, expected)
    # what every client is left with
    assert all(torch.equal(own, expected) for own in predictions.by_client.values()) and predictions.by_client


def test_rounds_of_stage_1_are_a_share_of_all_and_at_least_one():
    got = [first_stage(Training(rounds=r), share) for r, share in ((20, 0.5), (1050, 50 / 1050), (4, 1.0), (9, 0.0))]
    assert got == [10, 50, 4, 1]


def test_warm_head_is_the_heads_side_by_side_and_the_sum_of_their_biases():
    weights = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])  # two clusters, two classes, d = 2
    weight, bias = warm_start(weights, torch.tensor([[1.0, -1.0], [10.0, 20.0]]))
    assert weight.tolist() == [[1.0, 2.0, 5.0, 6.0], [3.0, 4.0, 7.0, 8.0]]
    assert bias.tolist() == [11.0, 19.0]


def test_warm_logits_are_exactly_the_sum_of_the_clusters_logits():
    generator = torch.Generator().manual_seed(0)
    # whole numbers, so that no order of summation rounds
    weights, features = (torch.randint(-9, 10, (3, n, 5), generator=generator).float() for n in (4, 7))
    biases = torch.randint(-9, 10, (3, 4), generator=generator).float()
    weight, bias = warm_start(weights, biases)
    wide = torch.cat(list(features), dim=1) @ weight.T + bias
    assert torch.equal(wide, sum(z @ w.T + b for z, w, b in zip(features, weights, biases, strict=True)))


def stage_2(model=None, **params):
    """Two clusters with e = 4, m = 5 and e = 10, m = 3, their heads filled with e; stage 2 begins."""
    plugin, spec, state, _ = started(FOUR, clusters=2, model=model, **params)
    updates = [update(0, 1, 4.0, 5.0, 7), update(2, 2, 10.0, 3.0, 9)]
    aggregated(plugin, spec, state, updates, round=1, model=model)
    assert WEIGHT not in state["fedconcat"]
    aggregated(plugin, spec, state, updates, round=2, model=model)
    return plugin, spec, state


def test_stage_2_starts_warm_after_its_rounds():
    _, _, state = stage_2()
    assert state["fedconcat"][WEIGHT].tolist() == [[4.0, 10.0], [4.0, 10.0]]
    assert state["fedconcat"][BIAS].tolist() == [14.0, 14.0]


def test_a_fresh_wide_head_is_drawn_within_one_over_the_root_of_its_width():
    _, _, state = stage_2(head_start="fresh")
    for name, shape in ((WEIGHT, (2, 2)), (BIAS, (2,))):
        drawn = state["fedconcat"][name]
        assert drawn.shape == shape and 0 < drawn.abs().max() <= 2**-0.5


def test_a_fresh_bias_under_a_head_scale_is_divided_by_it_and_the_weight_is_not():
    plain = stage_2(head_start="fresh")[2]["fedconcat"]
    scaled = stage_2(replace(small_model(), head=LinearHead(scale=4.0)), head_start="fresh")[2]["fedconcat"]
    # a layer on the features 4 z: logits 4 (W z + b) have the bias of one without scale
    assert torch.equal(4 * scaled[BIAS], plain[BIAS]) and plain[BIAS].all()
    assert torch.equal(scaled[WEIGHT], plain[WEIGHT])


def test_stage_2_sends_the_wide_head_and_the_encoders_once_a_client_that_answered():
    plugin, spec, state = stage_2()
    task = BroadcastTask(1, 3, 0, small_model().weights, spec, state)
    first = plugin.broadcast(task)
    assert set(first.weights) == {WEIGHT, BIAS} and first.buffers == {} and first.held == {}
    assert {name: t.tolist() for name, t in first.payload.items()} == {
        "enc": [4.0, 10.0],
        "mean": [5.0, 3.0],
        "count": [7, 9],
    }
    wide = {WEIGHT: torch.ones(2, 2), BIAS: torch.zeros(2)}
    # clients 1 and 3 were sent them, client 3 dropped out
    aggregated(plugin, spec, state, [Update(1, wide, {}, 5)], round=3)
    assert state["fedconcat"][REACHED].tolist() == [False, True, False, False]
    again = plugin.broadcast(BroadcastTask(1, 4, 0, small_model().weights, spec, state))
    assert again.payload == {} and again.held.keys() == first.payload.keys() and again.buffers == {}
    lost = plugin.broadcast(BroadcastTask(3, 4, 0, small_model().weights, spec, state))
    assert lost.payload.keys() == first.payload.keys() and lost.held == {}


def test_wide_heads_are_averaged_uniformly_and_the_global_weights_stay():
    plugin, spec, state = stage_2()
    before = {name: t.clone() for name, t in state[ENCODERS].items()}
    updates = [
        Update(0, {WEIGHT: torch.full((2, 2), 1.0), BIAS: torch.full((2,), 2.0)}, {}, 1),
        Update(1, {WEIGHT: torch.full((2, 2), 5.0), BIAS: torch.full((2,), 4.0)}, {}, 3),
    ]
    weights = aggregated(plugin, spec, state, updates, round=3)
    # by samples they would be 4 and 3.5
    assert state["fedconcat"][WEIGHT].tolist() == [[3.0, 3.0], [3.0, 3.0]]
    assert state["fedconcat"][BIAS].tolist() == [3.0, 3.0]
    assert weights["enc"].item() == 1.0
    assert all(torch.equal(before[name], t) for name, t in state[ENCODERS].items())


def test_stage_2_loss_is_cross_entropy_on_eval_features_that_training_does_not_move(make_step):
    plugin = FedConcat(FedConcatParams())
    wide = {
        WEIGHT: torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True),
        BIAS: torch.tensor([0.0, 0.5], requires_grad=True),
    }
    encoders = {"enc": torch.tensor([2.0, 1.0]), "mean": torch.tensor([1.0, 0.5]), "count": torch.tensor([0, 0])}
    step = make_step(small_model(), torch.tensor([[0.5]]), [0], weights=wide, received=wide, payload=encoders)
    # z = (2·0.5 + 1, 1·0.5 + 0.5) = (2, 1); logits (2, 1.5); −log softmax = log(1 + e^−0.5) = 0.474077
    # in train mode z = (1, 0.5): logits (1, 1), 0.693147
    loss = plugin.local_loss(step)
    assert loss.item() == pytest.approx(0.474077, abs=1e-6)
    assert encoders["mean"].tolist() == [1.0, 0.5]
    loss.backward()
    # (p − onehot) zᵀ with p_2 = 0.377541
    residual = torch.tensor([[-0.377541], [0.377541]])
    torch.testing.assert_close(wide[WEIGHT].grad, residual * torch.tensor([[2.0, 1.0]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(wide[BIAS].grad, residual[:, 0], atol=1e-5, rtol=0)


def test_the_heads_scale_multiplies_the_wide_logits(make_step):
    wide = {WEIGHT: torch.tensor([[1.0, 0.0], [0.0, 1.0]]), BIAS: torch.tensor([0.0, 0.5])}
    encoders = {"enc": torch.tensor([2.0, 1.0]), "mean": torch.tensor([1.0, 0.5]), "count": torch.tensor([0, 0])}
    model = replace(small_model(), head=LinearHead(scale=2.0))
    step = make_step(model, torch.tensor([[0.5]]), [0], weights=wide, received=wide, payload=encoders)
    # twice (2, 1.5): log(1 + e^−1) = 0.313262
    assert FedConcat(FedConcatParams()).local_loss(step).item() == pytest.approx(0.313262, abs=1e-6)


@lru_cache
def cnn_run():
    """Two rounds of each stage on a CNN with batch-norm: the run, and the states after each round."""
    run = run_of("fedconcat", {"fedconcat": {"clusters": 2}}, backbone=CNN, executor="sequential")
    # the server's mapping goes from round to round
    return run, [(replace(s, server=dict(s.server)), record) for s, record, _ in rounds(run, run.initial_state())]


def test_encoders_and_their_statistics_are_bit_for_bit_constant_in_stage_2():
    _, after = cnn_run()
    first, last = (after[i][0].server[ENCODERS] for i in (2, 4))
    assert any("running_var" in name for name in first)
    assert all(torch.equal(tensor, last[name]) for name, tensor in first.items())
    heads = [after[i][0].server["fedconcat"][WEIGHT] for i in (2, 4)]
    assert not torch.equal(*heads)
    assert digest(after[2][0]) == digest(after[4][0])


def test_bytes_of_stage_2_are_wide_heads_and_encoders_once():
    run, after = cnn_run()
    wide = 4 * (2 * 64 * 4 + 4)  # M d C + C
    encoders = 2 * (size_in_bytes(run.model.weights, run.model.buffers) - 4 * (64 * 4 + 4))
    assert [record.bytes_up for _, record in after[3:]] == [2 * wide, 2 * wide]
    cohorts = [record.cohort for _, record in after[3:]]
    new = [2, len(set(cohorts[1]) - set(cohorts[0]))]
    assert new[1] < 2
    assert [record.bytes_down for _, record in after[3:]] == [2 * wide + n * encoders for n in new]


def test_warm_head_of_trained_clusters_gives_the_sum_of_their_logits():
    run, after = cnn_run()
    state = after[2][0].server["fedconcat"]
    images = run.test.read(torch.arange(6))
    outputs = [run.model.forward(cluster_model(after[2][0].server, m), images, False) for m in range(2)]
    wide = torch.cat([o.features for o in outputs], dim=1) @ state[WEIGHT].T + state[BIAS]
    torch.testing.assert_close(wide, outputs[0].logits + outputs[1].logits, atol=1e-5, rtol=1e-5)


def test_a_client_of_stage_2_takes_all_batches_of_its_epochs():
    run, after = cnn_run()
    state = after[2][0]
    run = replace(run, spec=run.spec.model_copy(update={"training": Training(local_epochs=2, batch_size=4, lr=0.1)}))
    task = task_of(run, 1, state=state, round=3)
    got = train_client(task).weights
    kept = state.server["fedconcat"]
    with torch.no_grad():
        images = task.inputs.read(torch.arange(len(task.inputs)))
        features = [run.model.forward(cluster_model(state.server, m), images, False).features for m in range(2)]
    layer = torch.nn.Linear(128, 4)
    with torch.no_grad():
        layer.weight.copy_(kept[WEIGHT])
        layer.bias.copy_(kept[BIAS])
    optimiser = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    batches = batches_of(task)
    assert len(batches) > 3
    for index in batches:
        optimiser.zero_grad()
        loss = torch.nn.functional.cross_entropy(layer(torch.cat(features, dim=1)[index]), task.labels[index])
        loss.backward()
        optimiser.step()
    torch.testing.assert_close(got[WEIGHT], layer.weight.detach(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(got[BIAS], layer.bias.detach(), atol=1e-5, rtol=1e-4)


def asked(state, clients=(), client=None, weights=None):
    """The plugin's answer on x = 1 and x = -1."""
    model = small_model()
    task = EvaluationTask(
        model=model,
        weights=weights or model.weights,
        buffers=model.buffers,
        inputs=FeatureInputs(torch.tensor([[1.0], [-1.0]])),
        num_classes=2,
        client=client,
        state=state,
        clients=clients,
    )
    return FedConcat(FedConcatParams()).evaluate(task)


def opposed(state):
    """Encoders z = x, heads (x, 0) and (-3 x, 0): cluster 0 says class 0 where x > 0, their sum where x < 0."""
    state[ENCODERS] |= {"enc": torch.ones(2), "mean": torch.zeros(2)}
    state[HEADS] = {"head.weight": torch.tensor([[[1.0], [0.0]], [[-3.0], [0.0]]]), "head.bias": torch.zeros(2, 2)}
    return state


def test_stage_1_is_evaluated_with_the_warm_head_and_each_client_by_its_clusters_model():
    _, _, state, _ = started(FOUR, clusters=2)
    got = asked(opposed(state), clients=(0, 2))
    assert got.labels.tolist() == [1, 0]
    assert {client: own.tolist() for client, own in got.by_client.items()} == {0: [0, 1], 2: [1, 0]}
    assert WEIGHT not in state["fedconcat"]


def test_stage_2_is_evaluated_with_the_trained_head_and_each_client_still_by_its_clusters_model():
    _, _, state, _ = started(FOUR, clusters=2)
    opposed(state)["fedconcat"] |= {WEIGHT: torch.tensor([[9.0, 1.0], [0.0, 0.0]]), BIAS: torch.zeros(2)}
    got = asked(state, clients=(0, 2))
    assert got.labels.tolist() == [0, 1]
    assert {client: own.tolist() for client, own in got.by_client.items()} == {0: [0, 1], 2: [1, 0]}


def test_a_fine_tuned_client_is_evaluated_with_what_it_tuned():
    _, _, state, _ = started(FOUR, clusters=2)
    tuned = {**small_model().weights, "head.weight": torch.tensor([[2.0], [0.0]])}
    assert asked(opposed(state), client=2, weights=tuned).labels.tolist() == [0, 1]
    state["fedconcat"] |= {WEIGHT: torch.zeros(2, 2), BIAS: torch.zeros(2)}
    wide = {WEIGHT: torch.tensor([[0.0, -1.0], [0.0, 0.0]]), BIAS: torch.zeros(2)}
    assert asked(state, client=2, weights=wide).labels.tolist() == [1, 0]


@pytest.mark.parametrize("stage1", [0.5, 1.0])
def test_clients_can_be_fine_tuned_after_either_stage(stage1):
    params = {"clusters": 2, "stage1": stage1}
    run = run_of("fedconcat", {"fedconcat": params}, backbone="convnet", rounds=2, finetune_epochs=1)
    state = final_state(run)
    assert (WEIGHT in state.server["fedconcat"]) == (stage1 < 1)
    before = flat(state.server)
    assert 0 <= finetuned_metrics(run, state)["finetuned_mean_client_accuracy"] <= 100
    assert all(torch.equal(before[name], t) for name, t in flat(state.server).items())


def test_stage_2_resumes_from_a_saved_state(tmp_path):
    run, after = cnn_run()
    save_state(after[3][0], tmp_path / "state.safetensors", "id")
    resumed = final_state(run, load_state(tmp_path / "state.safetensors", "id"))
    for name, tensor in flat(after[4][0].server).items():
        assert torch.equal(flat(resumed.server)[name], tensor)


def test_on_frozen_features_an_encoder_has_no_weights_and_all_parts_are_the_same():
    run = run_of("fedconcat", {"fedconcat": {"clusters": 2}}, backbone="clip:embedded", rounds=2)
    state = final_state(run, until=1)
    sent = broadcast(run, state, 0)
    width = run.model.weights["head.weight"].shape[1]
    assert sent.payload == {} and sent.weights[WEIGHT].shape == (4, 2 * width)
    labels = predict(run, state, run.test).labels
    heads, biases = (state.server[HEADS][f"head.{name}"] for name in ("weight", "bias"))
    features = run.model.forward(run.model.weights, run.test.features, False).features
    assert torch.equal(labels, (features @ heads.sum(0).T + biases.sum(0)).argmax(1))
    assert train_round(run, state)[1].executor == "cohort"


def test_a_method_that_reads_the_models_outputs_is_refused_in_stage_2():
    with pytest.raises(FedbenchError, match="stack it only with methods whose terms read weights"):
        end_of("fedconcat+fedntd", backbone="convnet", rounds=2)


def test_a_method_that_keeps_tensors_private_is_refused():
    run = run_of("fedconcat", backbone="convnet")
    with pytest.raises(FedbenchError, match="fedconcat needs the clients' whole models"):
        refuse_model(run.assembly.requires, run.model, {"head.weight"}, run.train, torch.device("cpu"))
