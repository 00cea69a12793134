"""What a client's loss gets to see: inputs that belong to their labels, augmented where the run says so."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.federation import TensorImages
from fedbench.rounds.loop import train_round
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import tiny_backbone, tiny_dataset, tiny_spec
from fedbench.toolkit import fedavg as defaults


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """The batches of one round as (inputs, what the model reads for the picture of each label).

    Every class of the data is one picture, so the two are equal where nothing is augmented.
    """

    cross_entropy = defaults.cross_entropy

    def train(backbone, augment):
        data = tiny_dataset()
        pictures = data.train.images.read(torch.arange(4))  # sample i of the tiny data set has class i mod 4
        data = replace(data, train=replace(data.train, images=TensorImages(pictures[data.train.labels])))
        spec = tiny_spec("fedavg", backbone=backbone, rounds=1, augment=augment)
        settings = Settings(data_dir=tmp_path, cache_dir=tmp_path, executor="sequential")
        run = prepare(spec, settings, dataset=data, backbone=tiny_backbone(backbone))
        by_class = run.train.read(torch.arange(4))
        batches = []

        def spy(step):
            batches.append((step.batch.inputs, by_class[step.batch.labels]))
            return cross_entropy(step)

        monkeypatch.setattr(defaults, "cross_entropy", spy)
        train_round(run, run.initial_state())
        assert len(batches) > 4
        return batches

    return train


def share_equal(batches):
    """Share of the samples whose input is their label's picture."""
    pairs = [pair for inputs, pictures in batches for pair in zip(inputs, pictures, strict=True)]
    return sum(torch.allclose(x, y, atol=1e-4) for x, y in pairs) / len(pairs)


@pytest.mark.parametrize(
    ("backbone", "augment"), [("clip:embedded", "none"), ("convnet", "none"), ("clip:embedded", "sample")]
)
def test_inputs_are_those_of_their_labels_and_features_are_never_augmented(seen, backbone, augment):
    assert share_equal(seen(backbone, augment)) == 1


@pytest.mark.parametrize("augment", ["sample", "batch"])
def test_images_are_augmented_where_the_run_says_so(seen, augment):
    # one of 9 * 9 crops, one of 2 flips leaves a picture as it was: a share of 1/162 is expected
    assert share_equal(seen("convnet", augment)) < 0.5


def test_one_draw_serves_a_batch_or_one_sample_as_the_run_says(seen):
    def alike(augment):
        """Whether samples of one class are equal, for every pair of neighbours in a batch that share their class."""
        same = []
        for inputs, pictures in seen("convnet", augment):
            pairs = [k for k in range(len(inputs) - 1) if torch.equal(pictures[k], pictures[k + 1])]
            same += [torch.equal(inputs[k], inputs[k + 1]) for k in pairs]
        assert len(same) > 4
        return sum(same) / len(same)

    assert alike("batch") == 1
    assert alike("sample") < 0.5
