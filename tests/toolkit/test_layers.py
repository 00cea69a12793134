"""A model in two parts: the last layers and those before them, or the vectors of its one prompt."""

import pytest
import torch

from fedbench.core.errors import FedbenchError, Unworkable
from fedbench.core.types import LinearHead, Model, Outputs
from fedbench.toolkit.layers import layer_of, layers, two_parts, vectors_apart


def model(*names, buffers=(), head=None):
    tensors = {name: torch.zeros(1) for name in names}
    return Model(tensors, None, buffers={name: torch.zeros(1) for name in buffers}, head=head)


def test_a_layer_is_a_name_without_its_last_part_but_with_the_digits_there():
    assert layer_of("body.conv1.weight") == layer_of("body.conv1.bias") != layer_of("body.conv2.weight")
    assert layer_of("adapter.W1") == layer_of("adapter.b1") != layer_of("adapter.W2")
    assert layer_of("prompt.0") != layer_of("prompt.1")
    assert layer_of("lora.text.3.v.A") == layer_of("lora.text.3.v.B") != layer_of("lora.text.2.v.A")
    assert layer_of("body.bn1.running_mean") == layer_of("body.bn1.weight")
    assert layer_of("scale") == "scale"


def test_layers_are_in_the_models_order_and_a_linear_head_is_the_last():
    made = model("head.weight", "head.bias", "body.conv.weight", "body.bn.weight", head=LinearHead())
    assert layers(made) == ["body.conv.", "body.bn.", "head."]
    assert layers(model("b.weight", "a.weight")) == ["b.", "a."]


def test_running_statistics_go_with_their_layer():
    made = model("a.weight", "bn.weight", "c.weight", buffers=("bn.running_mean",))
    first, last = two_parts(made, 2, "m")
    assert first == {"a.weight"} and last == {"bn.weight", "bn.running_mean", "c.weight"}


@pytest.mark.parametrize("count", [2, 3])
def test_nothing_before_the_last_layers_is_refused(count):
    with pytest.raises(Unworkable, match="m needs a model of more layers than the last"):
        two_parts(model("a.weight", "b.weight"), count, "m")


def prompted(*shape):
    context = torch.arange(float(torch.tensor(shape).prod())).view(shape)

    def forward(tensors, inputs, training):
        return Outputs(inputs, tensors["prompt.context"])

    return Model({"prompt.context": context}, forward, lr_factors={"prompt.context": 2.0})


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 3)])
def test_a_prompts_last_vectors_stand_apart_and_the_forward_pass_puts_them_together(shape):
    whole = prompted(*shape)
    apart = vectors_apart(whole, 0.4, "m")
    # round(0.4 * 5) = 2 of 5
    assert [tuple(w.shape[-2:]) for w in apart.weights.values()] == [(3, 3), (2, 3)]
    assert torch.equal(apart.forward(apart.weights, torch.zeros(1), False).features, whole.weights["prompt.context"])
    assert layers(apart) == ["first.prompt.", "last.prompt."]
    assert set(apart.lr_factors.values()) == {2.0} and apart.lr_factors.keys() == apart.weights.keys()


@pytest.mark.parametrize("share", [0.05, 0.95])
def test_a_share_that_splits_nothing_off_is_refused(share):
    with pytest.raises(FedbenchError, match="choose another private_share"):
        vectors_apart(prompted(5, 3), share, "m")


def test_other_models_stay_as_they_are():
    for made in (model("head.weight"), model("prompt.0", "prompt.1")):
        assert vectors_apart(made, 0.5, "m") is made
