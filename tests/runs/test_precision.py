"""The setting ``precision``: which switches of torch a run computes under, and that it leaves them as they were."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.core.arithmetic import float32_products
from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.spec import RunSpec
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.inputs import encode
from fedbench.runs import prepare
from fedbench.runs.engines.worker import Apart, Work
from fedbench.runs.job import run_rounds, run_spec
from fedbench.runs.prepare import Loaded, Loader, Settings
from fedbench.runs.untouched import switches
from fedbench.testing import tiny_backbone, tiny_dataset, tiny_spec
from fedbench.toolkit.fedavg import average, cross_entropy, largest_logit

Flags = tuple[bool, bool]
IEEE, DEFAULT, TF32 = (False, False), (False, True), (True, True)
"""Whether matrix products and convolutions may use TF32; DEFAULT is torch's."""


def flags() -> Flags:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


class Looks:
    """Notes the flags where a run computes."""

    def __init__(self) -> None:
        self.seen: dict[str, set[Flags]] = {}

    def note(self, where: str) -> None:
        self.seen.setdefault(where, set()).add(flags())

    @hookimpl
    def private(self, model: Any, spec: Any) -> set[str]:
        self.note("private")
        return set()

    @hookimpl
    def start(self, task: Any) -> None:
        self.note("start")

    @hookimpl
    def local_loss(self, step: Any) -> Any:
        self.note("a step" if step.task.round <= step.task.training.rounds else "a step of fine-tuning")
        return cross_entropy(step)

    @hookimpl
    def aggregate(self, task: Any) -> Any:
        self.note("aggregate")
        return average(task)

    @hookimpl
    def evaluate(self, task: Any) -> Any:
        self.note("evaluate")
        return largest_logit(task)


def spec_of(precision: str) -> RunSpec:
    return tiny_spec("fedavg", backbone="clip:embedded", rounds=2, precision=precision, finetune_epochs=1)


def not_refused() -> Any:
    """TF32 is accepted for a run on the CPU, where the switches are the same."""
    return patch.object(prepare, "_refuse_tf32_elsewhere", lambda spec: None)


def set_flags(matmul: bool, conv: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, conv


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    set_flags(*DEFAULT)
    yield
    set_flags(*DEFAULT)


@pytest.mark.parametrize(
    ("precision", "before", "in_rounds"),
    [("float32", DEFAULT, IEEE), ("float32", TF32, IEEE), ("tf32", DEFAULT, TF32), ("bfloat16", DEFAULT, IEEE)],
)
def test_a_run_computes_as_it_asks_and_begins_in_ieee_always(
    precision: str, before: Flags, in_rounds: Flags, tmp_path: Path
) -> None:
    set_flags(*before)
    looks, was = Looks(), switches()
    in_its_precision = ("start", "a step", "a step of fine-tuning", "aggregate", "evaluate")
    settings = Settings(tmp_path, tmp_path / "cache", executor="sequential", cores=2)
    loaded = Loaded(tiny_dataset(), tiny_backbone("clip:embedded"))
    with not_refused():
        for _ in run_rounds(spec_of(precision), settings, [looks], loaded):
            assert flags() == before  # another run may go on here
    assert looks.seen == {"private": {IEEE}} | {where: {in_rounds} for where in in_its_precision}
    assert switches() == was


def test_features_are_ieee_wherever_they_are_encoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, plain = Looks(), ClipBackbone.encode_text
    monkeypatch.setattr(ClipBackbone, "encode_text", lambda *given: looks.note("texts") or plain(*given))
    set_flags(*TF32)
    encode(tiny_dataset().train.images, lambda pixels: looks.note("images") or pixels.float(), None)
    Loader(Settings(tmp_path, tmp_path / "cache")).load(spec_of("float32"))
    assert looks.seen == {"images": {IEEE}, "texts": {IEEE}} and flags() == TF32


def test_each_run_of_a_worker_has_its_own_and_the_worker_stays(tmp_path: Path) -> None:
    apart, events = Apart(Settings(tmp_path, tmp_path / "cache")), []
    try:
        for precision in ("float32", "tf32", "bfloat16"):
            # of a network that is drawn nothing is computed before the run
            work = Work(noted, precision, tiny_spec("fedavg", backbone="convnet"))
            assert apart.carry_out(work, events.append) == 0
    finally:
        apart.close()
    assert [seen for _, seen in events] == [{IEEE}, {TF32}, {IEEE}]
    assert len({process for process, _ in events}) == 1


def noted(precision: str, settings: Settings, loaded: Loaded, emit: Callable[[Any], None]) -> bool:
    looks = Looks()
    with not_refused():
        run_spec(spec_of(precision), settings, [looks], Loaded(tiny_dataset(), tiny_backbone("clip:embedded")))
    emit((os.getpid(), looks.seen["a step"]))
    return True


def test_tf32_is_refused_where_there_is_none(tmp_path: Path) -> None:
    asked = ["run", "--method", "fedavg", "--seed", "0", "--store", str(tmp_path / "store"), "--set", "precision=tf32"]
    result = CliRunner().invoke(app, [*asked, "--engine", "in-process", "--cache-dir", str(tmp_path / "cache")])
    assert result.exit_code == 2
    said = "precision=tf32 is for CUDA alone, and the run is on device=cpu; set device=cuda, or precision=float32."
    assert said in " ".join(result.output.split())


def test_newer_switches_of_torch_stay_and_are_refused_where_there_is_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixed(self: object) -> bool:
        raise RuntimeError("mix of the legacy and new APIs")

    monkeypatch.setattr(type(torch.backends.cudnn), "allow_tf32", property(mixed))
    with float32_products("float32"):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(FedbenchError, match="fp32_precision"), float32_products("float32"):
        pass
