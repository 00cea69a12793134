"""KgCoOp: Yao et al. 2023, trained by FedAvg."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy, normalize

from fedbench.core.randomness import torch_generator
from fedbench.core.types import Model
from fedbench.models.heads import TextOutputs
from fedbench.testing import final_state, tiny_backbone, tiny_dataset, tiny_run
from fedbench.toolkit.local_training import batch_table
from fedbench_methods.kgcoop import cosine_distance, squared_distance
from tests.equations.kit import coop_texts, spec_of

TEXTS = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
TEACHER = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
FORMS = {"cosine": cosine_distance, "sqeuclid": squared_distance}


def kgcoop_spec(*, method="kgcoop", scenario=None, training=None, templates=None, **params):
    settings = {**(training or {}), **({"templates": templates} if templates else {})}
    return spec_of(method, {method: params}, scenario=scenario, **settings)


def test_distances_by_hand():
    # cosines 0 and 0.6: 1 - 0.3
    assert cosine_distance(TEXTS, TEACHER).item() == pytest.approx(0.7)
    # |(1, -1)|² = 2 and |(-0.4, 0.8)|² = 0.8: twice the other on unit vectors
    assert squared_distance(TEXTS, TEACHER).item() == pytest.approx(1.4)


@pytest.mark.parametrize(("form", "expected"), [("cosine", 5 * 0.7), ("sqeuclid", 5 * 1.4)])
def test_the_term_is_lambda_times_the_mean_over_all_classes(make_step, form, expected):
    # of the three samples none is of class 1, whose text counts all the same
    model = Model({}, forward=None, constants={"text": TEACHER})
    outputs = TextOutputs(torch.zeros(3, 2), torch.zeros(3, 2), TEXTS)
    params = {"kgcoop": {"weight": 5.0, "kg_form": form}}
    step = make_step(model, torch.zeros(3, 2), [0, 0, 0], method="kgcoop", params=params, outputs=outputs)
    (term,) = step.task.hooks.loss_terms(step=step)
    assert term.item() == pytest.approx(expected)


@pytest.mark.parametrize("form", FORMS)
def test_words_are_at_the_minimum_where_the_teacher_has_their_template(form):
    def at_start(template):
        model = tiny_run(kgcoop_spec(templates=(template,))).model
        context = model.weights["prompt.context"].clone().requires_grad_()
        texts = model.forward({"prompt.context": context}, torch.ones(1, 128), True).texts
        distance = FORMS[form](texts, model.constants["text"])
        return distance.item(), torch.autograd.grad(distance, context)[0].abs().max().item()

    assert at_start("a photo of a {}.") == pytest.approx((0, 0), abs=1e-5)
    assert min(at_start("a blurry {}.")) > 1e-3


def test_the_teacher_is_the_mean_over_the_runs_templates_and_has_no_gradient():
    templates = ("a photo of a {}", "a blurry {}")
    teacher = tiny_run(kgcoop_spec(templates=templates)).model.constants["text"]
    clip = tiny_backbone("clip:embedded")
    one, other = (
        normalize(clip.encode_text([form.format(name) for name in tiny_dataset().classnames]), dim=1)
        for form in templates
    )
    torch.testing.assert_close(teacher, normalize(one + other, dim=1))
    assert not teacher.requires_grad


@pytest.mark.parametrize("form", FORMS)
def test_one_client_takes_the_steps_of_the_equations(form):
    run = tiny_run(
        kgcoop_spec(
            kg_form=form,
            weight=3.0,
            scenario={"clients": 1, "participation": 1.0, "partition": "iid"},
            training={"rounds": 1, "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4},
        )
    )
    federated = final_state(run).weights["prompt.context"]
    clip, names = tiny_backbone("clip:embedded"), tiny_dataset().classnames
    shard = run.federation.clients[0].indices
    images, labels = normalize(run.train.read(shard), dim=1), run.federation.train.labels[shard]
    teacher = normalize(clip.encode_text([f"a photo of a {name}" for name in names]), dim=1)
    context = run.model.weights["prompt.context"].clone().requires_grad_()
    optimiser = torch.optim.SGD([context], 0.05, momentum=0.9, weight_decay=5e-4)
    for batch in batch_table(len(shard), 1, run.spec.training.batch_size, torch_generator(0, "batches", 1, 0)):
        texts = coop_texts(context, names)
        apart = {"cosine": 1 - (texts * teacher).sum() / 4, "sqeuclid": (texts - teacher).square().sum() / 4}
        loss = cross_entropy(clip.logit_scale * images[batch] @ texts.T, labels[batch]) + 3 * apart[form]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert (federated - run.model.weights["prompt.context"]).abs().max() > 1e-3
    torch.testing.assert_close(federated, context.detach(), rtol=0, atol=1e-5)


def test_the_text_tower_runs_once_a_step(make_task):
    run, calls = tiny_run(kgcoop_spec()), []

    def counted(*given):
        calls.append(given)
        return run.model.forward(*given)

    model = replace(run.model, forward=counted)
    task = make_task(model, run.train.read(torch.arange(8)), [0] * 8, method="kgcoop", num_classes=4)
    task.hooks.local_train(task=task)
    assert len(calls) == 1


def test_a_larger_weight_keeps_the_texts_nearer_to_the_teacher():
    def end(weight):
        run = tiny_run(kgcoop_spec(weight=weight, init="random", training={"lr": 0.05, "rounds": 2}))
        texts = run.model.forward(final_state(run).weights, run.train.read(torch.arange(2)), False).texts
        return cosine_distance(texts, run.model.constants["text"]).item()

    assert end(20.0) < end(1.0) < end(0.0)
