"""From a spec to a run that is ready to train: plugins, data, federation, backbone, model, inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.federation import Dataset, Split
from fedbench.core.method.base import declares
from fedbench.core.method.tasks import ModelSetup, ServerData
from fedbench.core.records import RECORDED_CLIENTS, RunInfo
from fedbench.core.spec import RunSpec
from fedbench.core.types import FrozenEncoder, InputSource, Model
from fedbench.datasets import load_dataset, takes_image_size
from fedbench.kinds.registry import find_method, plugins_everywhere
from fedbench.models import image_size_of, load_backbone
from fedbench.models.inputs import FeatureInputs, ImageInputs, ImagesOnDevice, UncachedFeatures, encode
from fedbench.plugins.assembly import Assembly, assemble
from fedbench.plugins.requirements import (
    GRANTED_SERVER_DATA,
    refuse_backbone,
    refuse_drift,
    refuse_model,
    refuse_settings,
    refuse_towers,
)
from fedbench.plugins.withheld import Pixels, partitioned, withheld
from fedbench.rounds.allocator import keep_freed_memory
from fedbench.rounds.executors import ExecutorName, executor_for
from fedbench.rounds.further import metrics_named
from fedbench.rounds.metrics import size_in_bytes
from fedbench.rounds.private import private_names, shared
from fedbench.rounds.run import Run, UnseenTest, model_on
from fedbench.runs.checkpoint import Checkpointing
from fedbench.runs.labelled import labelled
from fedbench.runs.unseen import Renamed, renamed_model
from fedbench.runs.untouched import Untouched
from fedbench.scenarios import build_federation
from fedbench.scenarios.build import partition_digest
from fedbench.scenarios.labels import as_clients_see_it
from fedbench.scenarios.participation import cohort
from fedbench.toolkit.fedavg import NEEDS_LABELS, FedAvg

if TYPE_CHECKING:
    from fedbench.core.types import Backbone


@dataclass(frozen=True)
class Settings:
    """Where a run finds things on this machine, and how many threads it may use; not part of the run's identity."""

    data_dir: Path
    cache_dir: Path
    plugin_files: tuple[Path, ...] = ()
    threads: int = 1
    """Intra-op threads; runs use one each and cores are filled with runs, so that results don't depend on cores."""
    cores: int = 1
    """How many clients a run may train side by side; more than one where there are fewer runs than cores."""
    executor: ExecutorName = "auto"
    checkpoints: Checkpointing | None = None
    """None: runs keep none, and begin anew when they are stopped."""


def prepare(
    spec: RunSpec,
    settings: Settings,
    *,
    listeners: Sequence[object] = (),
    dataset: Dataset | None = None,
    backbone: Backbone | None = None,
    encode_all: bool = True,
) -> Run:
    """Load data and backbone, deal the federation, build the model. Raises FedbenchError for anything unusable.

    ``dataset`` and ``backbone`` spare the loading where a caller already has them. Without ``encode_all`` images are
    encoded when they are read and no cache is filled: for a run that is looked at, not trained.
    """
    with plugins_everywhere(settings.plugin_files):
        return _prepared(spec, settings, listeners, dataset, backbone, encode_all)


def _prepared(
    spec: RunSpec,
    settings: Settings,
    listeners: Sequence[object],
    dataset: Dataset | None,
    backbone: Backbone | None,
    encode_all: bool,
) -> Run:
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    untouched = Untouched(spec.title)
    assembly = assemble(spec.method, spec.params, settings.plugin_files, listeners)
    _refuse_parts_of_one_step(spec)
    refuse_settings(assembly.requires, spec, assembly.provides)
    refuse_backbone(assembly.requires, spec)
    device = _device(spec.device)
    dataset = dataset or dataset_for(spec, settings)
    backbone = backbone or backbone_for(spec, dataset, settings)
    refuse_towers(assembly.requires, backbone)
    backbone.module.to(device)
    untouched.keep(backbone.module)
    scored = build_federation(dataset, spec.scenario, spec.seed)
    seen = as_clients_see_it(scored, spec.scenario, spec.seed)
    refuse_drift(assembly.requires, scored)
    handed = withheld(seen)
    answer = assembly.hooks.federate(federation=handed, spec=spec)
    federation = partitioned(seen, handed, answer, assembly.answers_first("federate"))
    if spec.training.finetune_epochs and len(federation.clients) != len(scored.clients):
        raise FedbenchError(f"{spec.method} pools the clients; finetune_epochs needs clients, set it to 0.")
    _refuse_ignored_settings(spec, assembly, settings.plugin_files)
    setup = ModelSetup(backbone, scored.classnames, spec, settings.data_dir)
    model = assembly.hooks.build_model(setup=setup)
    model = model_on(model, device)
    _refuse_hidden_labels(spec, assembly, model)
    granted = next((kind for name, kind in reversed(GRANTED_SERVER_DATA.items()) if name in assembly.requires), "")
    private = private_names(assembly, model, spec)
    keeping = assembly.personalisation or ", ".join(assembly.answers("private"))
    if keeping and len(federation.clients) != len(scored.clients):
        raise FedbenchError(
            f"{spec.method} pools the clients, and {keeping} has something of its own for each of them; run the two as "
            "separate rows."
        )
    new = scored.unseen
    renamed = None if new is None else renamed_model(setup, model, new.classnames, settings.plugin_files)

    there = ImagesOnDevice(device)

    def features(split: Split, encoder: FrozenEncoder) -> InputSource:
        if not encode_all:
            return UncachedFeatures(Pixels(split.images), encoder, device)
        untouched.require()
        untouched.require_modes(encoder)
        check = partial(untouched.require_weights, encoder)
        rows = encode(split.images, encoder, settings.cache_dir, device=device, check=check)
        return FeatureInputs(rows.to(device))

    def inputs(split: Split, of: Model = model) -> InputSource:
        if of.encoder is not None:
            return features(split, of.encoder)
        if of.transform is None:
            raise MethodFault(f"{spec.method}: build_model gave neither an encoder nor a transform.")
        return ImageInputs(Pixels(there(split.images)), of.transform, device)

    federation, given = labelled(federation, assembly, setup, features, is_run=encode_all)
    recorded = min(len(scored.clients), RECORDED_CLIENTS)
    info = RunInfo(
        owners=assembly.recorded_owners(),
        data_hash=_data_hash(dataset, spec),
        files_hash=dataset.files_hash,
        weights_hash=_weights_hash(backbone, model),
        num_clients=len(federation.clients),
        cohort_size=len(cohort(1, len(federation.clients), spec.scenario.participation, 0.0, spec.seed)),
        num_train=len(federation.shards.indices),
        num_test=len(federation.test),
        trainable_parameters=sum(t.numel() for t in model.weights.values()),
        round_bytes=size_in_bytes(shared(model.weights, private), shared(model.buffers, private | model.of_server)),
        classnames=scored.classnames,
        class_counts=tuple(map(tuple, scored.class_table.rows(0, recorded).tolist())),
        groups=scored.groups,
        scenario_clients=len(scored.clients),
        server_data=granted,
        not_on_unseen=renamed if isinstance(renamed, str) else "",
    )
    validation = None if federation.validation is None else inputs(federation.validation)
    train, test = inputs(federation.train), inputs(federation.test)
    refuse_model(assembly.requires, model, private, train, device)
    side = {name: features(federation.train, encoder) for name, encoder in model.side_encoders.items()}
    executor = executor_for(settings.executor, spec.training, assembly, model, settings.cores)
    server = None
    if granted and federation.server is not None:
        labels = federation.server.labels.to(device) if granted == "labelled" else None
        server = ServerData(inputs(federation.server), labels)
    named = None
    if new is not None and isinstance(renamed, Renamed):
        of_new = model_on(renamed.model, device)
        named = UnseenTest(renamed.hooks, of_new, inputs(new.test, of_new))
    return Run(
        spec,
        assembly,
        federation,
        scored,
        model,
        info,
        train,
        test,
        validation,
        side,
        executor,
        private,
        server,
        named,
        metrics_named(spec.metrics),
        given,
    )


def _data_hash(dataset: Dataset, spec: RunSpec) -> str:
    """That of the data set, and of the files that its partition reads."""
    of_files = partition_digest(spec.scenario)
    both = f"{dataset.content_hash} {of_files}".encode()
    return hashlib.sha256(both).hexdigest() if of_files else dataset.content_hash


def image_size_for(spec: RunSpec) -> int | None:
    """The side in pixels that images of differing sizes are brought to for this run; None where it doesn't matter.

    It is the larger one where backbone and teacher differ: what is cut away cannot be brought back.
    """
    if not takes_image_size(spec.dataset):
        return None
    readers = (spec.backbone, *([] if spec.teacher == "auto" else [spec.teacher]))
    return max(filter(None, map(image_size_of, readers)), default=None)


def enlargement(dataset: Dataset, backbone: Backbone) -> str:
    """What to say where images are enlarged to what the backbone takes; "" where none is."""
    decoded = min(dataset.train.images.read(torch.zeros(1, dtype=torch.int64)).shape[-2:])
    side, wanted = dataset.shortest_side or decoded, backbone.transform.size or decoded
    if side >= wanted:
        return ""
    return f"images of {dataset.name}, the smallest of {side} px, are enlarged to {wanted} px for {backbone.name}"


def _refuse_parts_of_one_step(spec: RunSpec) -> None:
    """FedbenchError for stragglers, who do a part of their steps, where clients take one alone."""
    if spec.scenario.stragglers and spec.training.local_steps == 1:
        raise FedbenchError(
            f"stragglers={spec.scenario.stragglers:g} has clients do a part of their local steps, and local_steps=1 "
            "has no parts; set stragglers=0, or more local steps."
        )


def _refuse_hidden_labels(spec: RunSpec, assembly: Assembly, model: Model) -> None:
    """FedbenchError for the default loss of weights where labels are hidden."""
    if "labels" in assembly.provides:
        return
    default = all(assembly.answerer(hook) == FedAvg.name for hook in ("local_train", "local_loss"))
    if default and model.weights and spec.scenario.labels == "hidden":
        raise FedbenchError(NEEDS_LABELS)


def dataset_for(spec: RunSpec, settings: Settings) -> Dataset:
    """The run's data set, read once for runs of one process that follow each other."""
    return _dataset(spec.dataset, settings.data_dir, settings.cache_dir, image_size_for(spec))


def backbone_for(spec: RunSpec, dataset: Dataset, settings: Settings) -> Backbone:
    """The run's backbone; FedbenchError where the data set's images are too small for it."""
    height, width = dataset.train.images.read(torch.zeros(1, dtype=torch.int64)).shape[-2:]
    return load_backbone(spec.backbone, data_dir=settings.data_dir, seed=spec.seed, image_size=(height, width))


def _refuse_ignored_settings(spec: RunSpec, assembly: Assembly, plugin_files: Sequence[Path]) -> None:
    """A setting of the default model that the run's method would not read is a mistake, not a no-op."""
    owner = assembly.answerer("build_model")
    if owner == FedAvg.name:
        return
    reads = declares(find_method(owner, plugin_files), "reads")
    for name, value, unset in (("tune", spec.tune, "auto"), ("head_scale", spec.head_scale, None)):
        if value != unset and name not in reads:
            raise FedbenchError(f"{owner} builds its own model and does not read {name}={value}; leave {name} unset.")


def _weights_hash(backbone: Backbone, model: Model) -> str:
    """Of the backbone, and of whatever pretrained the model reads beside it."""
    beside = [name for name in model.weights_hashes if name != backbone.weights_hash]
    if not beside:
        return backbone.weights_hash
    return hashlib.sha256(" ".join([backbone.weights_hash, *beside]).encode()).hexdigest()


@lru_cache(maxsize=1)
def _dataset(name: str, data_dir: Path, cache_dir: Path, image_size: int | None) -> Dataset:
    # for the runs of the in-process engine, and the first rounds that tuning looks at
    return load_dataset(name, data_dir=data_dir, cache_dir=cache_dir, image_size=image_size)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise FedbenchError(f"device {name!r} is not a torch device; use for instance cpu or cuda:0.") from error
    if device.type not in ("cpu", "cuda", "mps"):
        raise FedbenchError(f"device {name!r} is none that runs train on; use cpu, cuda, cuda:N or mps.")
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}[device.type]
    if (device.index or 0) >= there:
        seen = f"{there} devices of that kind" if there else f"no {device.type.upper()} device"
        raise FedbenchError(f"device {name!r} is not available: torch sees {seen} here; use device=cpu.")
    return device
