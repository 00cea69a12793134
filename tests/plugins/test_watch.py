"""What hooks are handed stays as it is: a method that changes a tensor in place is refused, under either executor."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import STEPS, hookimpl
from fedbench.core.types import Broadcast
from fedbench.models.heads import default_model
from fedbench.plugins.guards import Snapshot, contents, versions, withheld
from fedbench.testing import check_training, final_state, tiny_run, tiny_spec
from fedbench.toolkit.fedavg import average, largest_logit
from fedbench.toolkit.local_training import local_sgd


def pull(step):
    return 1e-3 * step.weights["head.bias"].square().sum()


ANSWERS = {
    "federate": lambda federation: federation,
    "build_model": default_model,
    "broadcast": lambda task: Broadcast(task.weights),
    "local_train": local_sgd,
    "loss_terms": pull,
    "aggregate": average,
    "evaluate": largest_logit,
}


def answering(hook, change):
    """An answer to ``hook``, the default's where it has one, after ``change`` of its first argument."""

    def answered(first):
        change(first)
        return ANSWERS[hook](first) if hook in ANSWERS else None

    answers = {
        "federate": lambda self, federation, spec: answered(federation),
        "build_model": lambda self, setup: answered(setup),
        "loss_terms": lambda self, step: answered(step),
        "after_training": lambda self, task, update: answered(update),
    }
    return hookimpl(answers.get(hook, lambda self, task: answered(task)))


def run_of(mine, hook, change, executor="auto"):
    return tiny_run(tiny_spec(mine(**{hook: answering(hook, change)}), rounds=1), executor=executor)


CHANGES = {
    "the labels dealt": ("federate", lambda f: f.train.labels.add_(0), "federation.train.labels"),
    "the clients' samples": ("federate", lambda f: f.clients.indices.add_(0), "federation.clients.indices"),
    "test samples' domains": ("federate", lambda f: f.test.domains.add_(0), "federation."),
    "the backbone": ("build_model", lambda s: next(s.backbone.module.parameters()).detach().add_(0), "setup.backb"),
    "the model, at the start": ("start", lambda t: t.model.weights["head.bias"].add_(0), "task.model.weights['head.b"),
    "weights sent": ("broadcast", lambda t: t.weights["head.bias"].add_(0), "task.weights['head.bias']"),
    "weights received": ("local_train", lambda t: t.received["head.bias"].add_(0), "task.received['head.bias']"),
    "the samples": ("local_train", lambda t: t.inputs.features.zero_(), "task.inputs.features"),
    "a client's labels": ("local_train", lambda t: t.labels.zero_(), "task.labels"),
    "a client's counts": ("local_train", lambda t: t.class_counts.zero_(), "task.class_counts"),
    "the weights of a step": ("loss_terms", lambda s: s.weights["head.bias"].detach().add_(0), "step.weights['head.b"),
    "the batch": ("loss_terms", lambda s: s.batch.inputs.mul_(2), "step.batch.inputs"),
    "received, in a step": ("loss_terms", lambda s: s.received["head.bias"].add_(0), "step.task.received['head.bias']"),
    "an update": ("after_training", lambda u: u.weights["head.bias"].add_(0), "update.weights['head.bias']"),
    "global weights": ("aggregate", lambda t: t.weights["head.bias"].add_(0), "task.weights['head.bias']"),
    "a client's weights": ("aggregate", lambda t: t.updates[1].weights["head.bias"].add_(0), "task.updates[1].weights"),
    "weights to evaluate": ("evaluate", lambda t: t.weights["head.bias"].add_(0), "task.weights['head.bias']"),
    "test samples": ("evaluate", lambda t: t.inputs.features.zero_(), "task.inputs.features"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_method_that_changes_what_it_is_handed_is_refused(mine, what):
    hook, change, name = CHANGES[what]
    with pytest.raises(FedbenchError) as refused:
        final_state(run_of(mine, hook, change))
    assert str(refused.value).startswith(f"mine changes {name}") and "\n" not in str(refused.value)
    assert f"in place in the hook {hook}" in str(refused.value) and ".clone()" in str(refused.value)


def test_domains_of_test_samples_are_watched_though_their_labels_are_withheld():
    federation = tiny_run(tiny_spec("fedavg", rounds=1)).federation
    # in memory of their own: the tiny data set's train and test share theirs
    test = replace(federation.test, domains=federation.test.domains.clone())
    handed = withheld(replace(federation, test=test))
    before = Snapshot({"federation": handed})
    handed.test.domains.zero_()
    with pytest.raises(FedbenchError, match="mine changes federation.test.domains in place in the hook federate"):
        before.require_unchanged("mine", "federate")


def test_the_whole_of_local_training_is_watched_not_its_first_step_alone(mine):
    late = lambda step: step.received["head.bias"].add_(0) if step.number == 1 else None  # noqa: E731
    for executor in ("sequential", "auto"):
        with pytest.raises(FedbenchError, match=r"mine changes task.received\['head.bias'\] in place in the hook l"):
            final_state(run_of(mine, "loss_terms", late, executor))


def test_clients_who_train_at_once_are_watched_in_every_step(mine):
    def broadcast(self, task):
        return Broadcast(task.weights, {"own": torch.tensor([float(task.client)])})

    def late(self, step):
        # a step in which no client's gradients are compared with those of its own loss
        if step.number == 1:
            step.task.payload["own"].add_(1)
        return 1e-3 * step.task.payload["own"].sum() * step.weights["head.bias"].square().sum()

    name = mine(broadcast=hookimpl(broadcast), loss_terms=hookimpl(late))
    run = tiny_run(tiny_spec(name, rounds=1, local_epochs=3))
    with pytest.raises(FedbenchError, match=r"mine changes task.payload\['own'\] in place in the hook local_train"):
        final_state(run)


def test_what_a_client_keeps_is_replaced_not_changed(mine):
    def keep(self, task, update):
        task.state.setdefault("mine", {"sum": torch.zeros(4)})["sum"].add_(1)

    def replaced(self, task, update):
        task.state["mine"] = {"sum": task.state.get("mine", {"sum": torch.zeros(4)})["sum"] + 1}

    run = tiny_run(tiny_spec(mine(after_training=hookimpl(keep))))
    with pytest.raises(FedbenchError, match=r"mine changes task.state\['mine'\]\['sum'\] in place"):
        final_state(run)
    assert final_state(tiny_run(tiny_spec(mine(after_training=hookimpl(replaced))))).clients


def test_a_forward_pass_that_changes_weights_is_refused(mine):
    def clamped(self, setup):
        model = default_model(setup)

        def forward(tensors, inputs, training):
            tensors["head.bias"].detach().clamp_(-1, 1)
            return model.forward(tensors, inputs, training)

        return replace(model, forward=forward)

    with pytest.raises(FedbenchError, match=r"mine changes task.weights\['head.bias'\] in place in the hook evaluate"):
        final_state(tiny_run(tiny_spec(mine(build_model=hookimpl(clamped)))))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda t: t.received["head.bias"].data.add_(1), r"task.received\['head.bias'\]"),
        (lambda t: t.inputs.features.numpy().fill(0), "task.inputs.features"),
    ],
)
def test_the_contract_sees_changes_that_torch_does_not_count(mine, change, name):
    method = mine(local_train=answering("local_train", change))
    with pytest.raises(FedbenchError, match=f"mine changes {name} in place in the hook local_train"):
        check_training(method)


def test_hooks_that_run_no_methods_code_are_called_as_they_are():
    fedavg, fedprox = (tiny_run(tiny_spec(name)).assembly.hooks for name in ("fedavg", "fedprox"))
    assert all(hasattr(getattr(fedavg, hook), "get_hookimpls") for hook in STEPS)
    wrapped = {hook for hook in STEPS if not hasattr(getattr(fedprox, hook), "get_hookimpls")}
    assert wrapped == {"local_train", "loss_terms"}


def test_tensors_without_a_count_are_watched_by_their_bytes_alone():
    with torch.inference_mode():
        made = torch.zeros(2)
    assert versions([made, torch.zeros(1)]) == [0, 0]
    before = contents([made, torch.tensor(True), torch.zeros(0)])
    made.numpy()[0] = float("nan")
    assert contents([made, torch.tensor(True), torch.zeros(0)])[1:] == before[1:]
    assert contents([made])[0] != before[0]
