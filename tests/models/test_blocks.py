"""Where convolution blocks end, and changing feature maps there."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fedbench.core.randomness import torch_generator
from fedbench.core.types import Model
from fedbench.models.cnn.backbone import CnnBackbone, cnn_model
from fedbench.models.cnn.nets import block_channels, build_body, with_changed_blocks
from fedbench.models.inputs import PixelTransform
from fedbench.models.names import parse_backbone

TRANSFORM = PixelTransform((0.0,) * 3, (1.0,) * 3, None, mode="squash", interpolation="bilinear")


def model_of(name: str) -> Model:
    """The classifier of four classes on the body ``name``."""
    body, width = build_body(parse_backbone(name))
    weights, buffers, forward = cnn_model(CnnBackbone(name, body, width, TRANSFORM), 4, seed=0)
    return Model(weights, forward, buffers)


def images(size: int) -> Tensor:
    return torch.randn(2, 3, size, size, generator=torch_generator(0, "images"))


@pytest.mark.parametrize(
    ("name", "size", "shapes"),
    [
        ("resnet8?width=1", 32, [(16, 32), (16, 32), (32, 16), (64, 8)]),
        ("resnet8?width=2&projector=5", 16, [(32, 16), (32, 16), (64, 8), (128, 4)]),
        ("convnet", 32, [(6, 14), (16, 5)]),
        ("convnet", 28, [(6, 12), (16, 4)]),
        ("fedavg-cnn", 32, [(32, 16), (64, 8)]),
        ("vgg11", 32, [(64, 16), (128, 8), (256, 4), (512, 2), (512, 1)]),
        ("resnet18?stem=cifar", 8, [(64, 8), (64, 8), (128, 4), (256, 2), (512, 1)]),
    ],
)
def test_changes_meet_every_block_once_in_order_with_its_channels(
    name: str, size: int, shapes: list[tuple[int, int]]
) -> None:
    model, seen = model_of(name), []

    def record(position: int, features: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        seen.append((position, features.shape[1], features.shape[2]))
        return features

    changed = with_changed_blocks(model, record)
    tensors = {**model.weights, **model.buffers}
    out = changed.forward(tensors, images(size), True).logits
    assert seen == [(position, *shape) for position, shape in enumerate(shapes)]
    assert block_channels(build_body(parse_backbone(name))[0]) == tuple(channels for channels, _ in shapes)
    assert torch.equal(out, model.forward(tensors, images(size), True).logits)


@pytest.mark.parametrize(
    ("name", "channels"),
    [
        ("alexnet", (64, 192, 384, 256, 256)),
        ("alexnet?dense=1", (64, 192, 384, 256, 256)),
        ("resnet18", (64, 64, 128, 256, 512)),
        ("resnet50", (64, 256, 512, 1024, 2048)),
    ],
)
def test_large_networks_have_five_blocks(name: str, channels: tuple[int, ...]) -> None:
    with torch.device("meta"):
        body, _ = build_body(parse_backbone(name))
    assert block_channels(body) == channels


def test_alexnets_blocks_end_behind_their_pooling() -> None:
    with torch.device("meta"):
        layers = list(dict(build_body(parse_backbone("alexnet?dense=1"))[0].get_submodule("features").named_children()))
    ends = {name: layers[position - 1] for position, name in enumerate(layers) if name.startswith("end")}
    assert ends == {"end1": "pool1", "end2": "pool2", "end3": "relu3", "end4": "relu4", "end5": "pool5"}


def test_marks_add_no_tensor() -> None:
    names = [name for name, _ in build_body(parse_backbone("resnet18"))[0].named_parameters()]
    assert names[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"] and "layer1.1.conv1.weight" in names
    assert not any("end" in name or "pool" in name for name in names)


def test_what_the_change_returns_goes_on_in_training_only_and_it_may_read_further_tensors() -> None:
    model = model_of("convnet")
    closed = with_changed_blocks(model, lambda position, features, tensors: features * tensors["factor"][position])
    x = images(32)
    open_, shut = ({**model.weights, "factor": torch.tensor(factor)} for factor in ((1.0, 1.0), (1.0, 0.0)))
    assert torch.equal(closed.forward(open_, x, True).logits, model.forward(model.weights, x, True).logits)
    rows = closed.forward(shut, x, True).logits
    assert torch.equal(rows[0], rows[1]), "nothing of the images is left"
    assert torch.equal(closed.forward(shut, x, False).logits, model.forward(model.weights, x, False).logits)


def test_a_change_that_fails_leaves_other_models_as_they_were() -> None:
    model = model_of("convnet")

    def fail(position: int, features: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        raise ValueError("no")

    expected = model.forward(model.weights, images(32), True).logits
    with pytest.raises(ValueError, match="no"):
        with_changed_blocks(model, fail).forward(model.weights, images(32), True)
    assert torch.equal(model.forward(model.weights, images(32), True).logits, expected)


def test_threads_that_pass_side_by_side_keep_their_own_changes() -> None:
    model, x, meet = model_of("convnet"), images(32), threading.Barrier(2, timeout=20)

    def scaled(position: int, features: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        meet.wait()  # both are between the same two blocks
        return features * tensors["factor"]

    changed, found = with_changed_blocks(model, scaled), {}

    def run(factor: float) -> None:
        found[factor] = changed.forward({**model.weights, "factor": torch.tensor(factor)}, x, True).logits

    threads = [threading.Thread(target=run, args=(factor,)) for factor in (1.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = with_changed_blocks(model, lambda _, features, tensors: features * tensors["factor"])
    for factor, logits in found.items():
        assert torch.equal(logits, alone.forward({**model.weights, "factor": torch.tensor(factor)}, x, True).logits)
    assert not torch.equal(found[1.0], found[3.0])
