"""What a dry run tells before anything is trained: parameters that are sent, and the memory a run needs."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedbench.core.spec import RunSpec, Training
from fedbench.models.inputs import ImageInputs
from fedbench.rounds.run import Run
from fedbench.runs import inspection
from fedbench.runs import inspection as memory
from fedbench.runs.inspection import measure, memory_of, moments, saved_bytes, step_bytes
from fedbench.runs.prepare import Settings, prepare
from fedbench.testing import tiny_backbone, tiny_dataset, tiny_spec

FLOAT = 4


def looked_at(spec: RunSpec) -> Run:
    """``spec`` assembled as a dry run does, with no folder that anything could be written to."""
    settings = Settings(data_dir=Path("/nowhere"), cache_dir=Path("/nowhere"))
    backbone = tiny_backbone(spec.backbone)
    return prepare(spec, settings, dataset=tiny_dataset(), backbone=backbone, encode_all=False)


@pytest.mark.parametrize(
    ("method", "backbone", "changed"),
    [
        ("promptfl", "clip:embedded", {}),
        ("capt", "clip:embedded", {}),
        ("fedavg", "clip:embedded", {"tune": "full"}),
        ("fedavg", "resnet8?width=1", {}),
    ],
)
def test_a_measured_step_grows_to_what_a_whole_batch_takes(method: str, backbone: str, changed: dict[str, str]) -> None:
    run = looked_at(tiny_spec(method, backbone=backbone).model_copy(update=changed))
    on_32 = saved_bytes(memory._on_samples(memory._first_task(run), 32))
    assert step_bytes(run).on(32) == pytest.approx(on_32, rel=0.05)


def test_a_linear_heads_step_saves_what_its_gradient_needs() -> None:
    run = looked_at(tiny_spec("fedavg", backbone="clip:embedded"))
    width, classes = 128, 4
    # features, log-probabilities and label of each sample
    assert step_bytes(run).per_sample == FLOAT * width + FLOAT * classes + 8


def test_saved_bytes_are_the_most_at_once_not_the_sum_over_steps() -> None:
    run = looked_at(tiny_spec("fedavg", backbone="convnet", local_epochs=1))
    task = memory._on_samples(memory._first_task(run), 4)
    longer = task.spec.model_copy(update={"training": task.training.model_copy(update={"local_epochs": 5})})
    assert saved_bytes(replace(task, spec=longer)) == saved_bytes(task)


def test_weights_are_counted_by_their_copies() -> None:
    run = looked_at(tiny_spec("fedavg", backbone="clip:embedded"))
    clip = tiny_backbone("clip:embedded").module
    frozen = sum(t.numel() * t.element_size() for t in (*clip.parameters(), *clip.buffers()))
    head = FLOAT * (128 * 4 + 4)
    constants = sum(t.numel() * t.element_size() for t in run.model.constants.values())
    # initial, global, the client's own, gradient, momentum; and one update for each of two clients a round
    assert memory.weight_bytes(run, [clip]) == frozen + constants + 5 * head + 2 * head
    assert memory.weight_bytes(run, [clip, clip]) == memory.weight_bytes(run, [clip])


@pytest.mark.parametrize(
    ("training", "count"),
    [({"momentum": 0.0}, 0), ({"momentum": 0.9}, 1), ({"optimizer": "adam"}, 2), ({"optimizer": "adamw"}, 2)],
)
def test_optimisers_keep_their_moments(training: dict[str, object], count: int) -> None:
    assert moments(Training(**training)) == count  # type: ignore[arg-type]


def test_samples_are_pixels_once_and_a_row_of_features_each() -> None:
    data = tiny_dataset()
    pixels = (len(data.train) + len(data.test)) * 3 * 32 * 32  # type: ignore[arg-type]
    features = looked_at(tiny_spec("fedavg", backbone="clip:embedded"))
    found = measure(features)
    assert found.table_row == FLOAT * 128
    rows = len(features.train) + len(features.test)
    assert memory.sample_bytes(features, found.table_row) == pixels + rows * FLOAT * 128
    images = looked_at(tiny_spec("fedavg", backbone="convnet"))
    assert measure(images).table_row == 0 and memory.sample_bytes(images, 0) == pixels


def test_a_client_that_keeps_its_images_while_it_trains_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = looked_at(tiny_spec("fedavg", backbone="convnet"))
    assert isinstance(run.train, ImageInputs)
    found, image = measure(run), FLOAT * 3 * 32 * 32
    assert found.inputs == image and found.step is not None
    sizes = sorted(run.federation.shards.sizes.tolist())
    step = found.step.on(8) + 8 * image
    assert memory_of(run, [], found).step == step + sizes[-1] * image
    monkeypatch.setattr(memory, "RESIDENT_BYTES", sizes[0] * image)
    assert memory_of(run, [], found).step == step + sizes[0] * image
    monkeypatch.setattr(memory, "RESIDENT_BYTES", image - 1)
    assert memory_of(run, [], found).step == step


def test_a_step_that_cannot_be_taken_is_told_and_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = looked_at(tiny_spec("fedavg", backbone="convnet"))

    def broken(_: object) -> int:
        raise RuntimeError("wants a survey\nfirst")

    monkeypatch.setattr(memory, "saved_bytes", broken)
    needs = memory_of(run, [], measure(run))
    assert (needs.step, needs.total, needs.unmeasured) == (None, None, "RuntimeError: wants a survey")


def test_a_model_without_weights_takes_no_step() -> None:
    run = looked_at(tiny_spec("clip-zs", backbone="clip:embedded"))
    needs = memory_of(run, [], measure(run))
    assert needs.step == 0 and needs.total == needs.weights + needs.samples


@pytest.fixture
def planned(fedbench, tiny: None):
    """`fedbench ARGUMENTS` on the tiny data set; what it says."""

    def call(*arguments: str) -> str:
        ended = fedbench(*arguments)
        assert not ended.code, ended
        return ended.out

    return call


SMALL = ("--set", "rounds=3", "clients=4", "batch_size=8", "--scenario", "iid", "--cache-dir", "cache")


def test_enlarged_images_are_told_once(planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = tiny_dataset().name
    line = f"images of {name}, the smallest of 32 px, are enlarged to 48 px for convnet?resize=48"
    larger = ("--method", "fedavg", "--method", "fedprox", *SMALL, "--dry-run")
    assert planned("run", *larger, "--set", "backbone=convnet?resize=48").count(line) == 1
    assert "enlarged" not in planned("run", *larger, "--set", "backbone=convnet")
    data = replace(tiny_dataset(), shortest_side=20)
    monkeypatch.setattr("fedbench.runs.prepare.load_dataset", lambda *_, **__: data)
    assert planned("run", *larger, "--set", "backbone=convnet").count("of 20 px, are enlarged to 32 px") == 1


def test_a_dry_run_encodes_a_few_images_and_leaves_no_file(
    planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[int] = []
    clip = importlib.import_module("fedbench.models.clip.backbone")
    encode = clip.ClipBackbone.encode_images

    def counting(self: object, pixels: torch.Tensor) -> torch.Tensor:
        seen.append(len(pixels))
        return encode(self, pixels)  # type: ignore[no-any-return]

    monkeypatch.setattr(clip.ClipBackbone, "encode_images", counting)
    methods = ("--method", "clip-zs", "--method", "promptfl", "--seed", "0", "--seed", "1")
    out = planned("run", *methods, *SMALL, "--dry-run")
    assert sum(seen) <= 20 and not list(tmp_path.iterdir())
    row = next(line for line in out.splitlines() if line.startswith("promptfl"))
    assert row.split()[-1] == "MB" and "backbone clip:embedded" in out
    assert "of 4" in row  # settings behind the first --set count


def test_rows_that_differ_in_how_data_are_dealt_are_measured_once(
    planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured: list[str] = []

    def counting(run: Run) -> memory.MeasuredMemory:
        measured.append(run.spec.setting)
        return measure(run)

    monkeypatch.setattr(inspection, "measure", counting)
    (tmp_path / "grid.yaml").write_text(
        "name: grid\nscenario: {preset: label-skew, clients: 4, min_client_size: 2}\nbackbone: convnet\n"
        "training: {rounds: 1, batch_size: 8}\nrows: [{method: fedavg}]\n"
        "scales: {one: {settings: [{name: a, set: {dirichlet_alpha: 0.5}}, {name: b, set: {dirichlet_alpha: 5}},\n"
        "  {name: c, set: {batch_size: 4, lr: 0.1}}, {name: d, set: {backbone: fedavg-cnn}}]}}\n"
    )
    out = planned("run", "--suite", "grid.yaml", "--dry-run", "--cache-dir", "cache")
    assert measured == ["a", "d"] and out.count("fedavg · convnet") >= 3


def test_private_parameters_are_trained_but_not_sent(planned) -> None:
    out = planned("run", "--method", "fedbn", "--set", "backbone=resnet8?width=1", *SMALL, "--dry-run")
    heading, row = (
        next(line.split() for line in out.splitlines() if line.startswith(word)) for word in ("row", "fedbn")
    )
    assert heading[-5:] == ["trained", "sent", "MB/client", "MB/run", "memory"]
    trained, sent = (int(row[position].replace(",", "")) for position in (-6, -5))
    run = looked_at(tiny_spec("fedbn", backbone="resnet8?width=1"))
    norms = sum(run.model.weights[name].numel() for name in run.private if name in run.model.weights)
    assert (trained, trained - sent) == (run.info.trainable_parameters, norms) and norms > 0


def test_a_plan_without_data_and_weights_says_what_to_get(fedbench, tmp_path: Path) -> None:
    settings = ("--setting", "CIFAR-10-LT IF 100, 0.5", "--setting", "ImageNet-LT, 0.5")
    ended = fedbench("run", "--suite", "capt", "--scale", "paper", *settings, "--dry-run", "--data-dir", "nowhere")
    assert not ended.code and ended.out.count("not here") > 20 and not list(tmp_path.iterdir())
    said = ended.said
    assert "CIFAR-10 (cifar10): cifar-10-python.tar.gz; ?download=true fetches it" in said
    assert "ImageNet-LT (listfile:ImageNet-LT)" in said and "as 'nowhere/ImageNet-LT'" in said
    assert said.count("clip:ViT-B-16-quickgelu@openai: downloaded where there is a network; else download it from") == 1
    # data that nobody has published are a mistake, as ever
    ended = fedbench("run", "--method", "fedavg", "--dataset", "imagefolder:x", "--dry-run")
    assert ended.code == 2 and "'x' does not exist" in ended.said


def test_weights_of_cnns_and_word_vectors_are_listed_once_each(
    planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("fedbench.models.weight_files.can_reach", lambda url: False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "hub"))
    small = (*SMALL, "--dry-run", "--data-dir", "mine")
    started = planned(
        "run",
        "--method",
        "fedavg",
        "--method",
        "fedpcl",
        "--set",
        "backbone=alexnet?weights=imagenet&resize=64",
        *small,
    )
    said = " ".join(started.split())
    assert (
        said.count("alexnet?weights=imagenet&resize=64: downloaded where there is a network; else download it from")
        == 1
    )
    assert "put it at 'mine/torchvision/alexnet-owt-7be5be79.pth'" in said
    # the data and the backbone are there, and another row with them is planned
    name = "glove:glove.6B.300d.txt"
    words = planned(
        *("run", "--method", "fedavg", "--method", "fedglcl", "--set", "backbone=convnet"),
        *("--set", f"backbone.text={name}", *small[1:]),
    )
    said = " ".join(words.split())
    assert (
        f"{name}: download https://nlp.stanford.edu/data/glove.6B.zip and put it, packed or unpacked, in 'mine/glo"
        in said
    )
    assert said.count("not here") == 2  # of one row and of the list below
    monkeypatch.setenv("FEDBENCH_DATA", "mine")
    described = planned("describe", "alexnet?weights=imagenet")
    assert "weights=imagenet starts from torchvision's" in " ".join(described.split())
    assert "mine/torchvision/alexnet-owt-7be5be79.pth" in "".join(described.split())
