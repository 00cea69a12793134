"""From a spec to a run that is ready to train: plugins, data, federation, labels, backbone, model, inputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedbench.core.arithmetic import float32_products
from fedbench.core.errors import FedbenchError, MethodFault, Unworkable
from fedbench.core.federation import Dataset, Federation, Shards, Split
from fedbench.core.method.answers import require_labels
from fedbench.core.method.base import declares
from fedbench.core.method.tasks import Hooks, LabelledSamples, LabelTask, ModelSetup, ServerData
from fedbench.core.records import RECORDED_CLIENTS, RunInfo
from fedbench.core.spec import RunSpec
from fedbench.core.types import FrozenEncoder, InputSource, Model
from fedbench.datasets import load_dataset, takes_image_size
from fedbench.kinds.registry import find_method, plugins_everywhere
from fedbench.models import image_size_of, load_backbone
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.inputs import FeatureInputs, ImageInputs, ImagesOnDevice, UncachedFeatures, encode
from fedbench.models.names import is_dual_encoder, is_pretrained
from fedbench.plugins.assembly import Assembly, assemble
from fedbench.plugins.guards import Pixels, Withheld, partitioned, withheld
from fedbench.plugins.requirements import (
    GRANTED_SERVER_DATA,
    refuse_backbone,
    refuse_drift,
    refuse_model,
    refuse_settings,
    refuse_towers,
)
from fedbench.rounds.clients import keep_freed_memory
from fedbench.rounds.executors import ExecutorName, executor_for
from fedbench.rounds.measures import metrics_named
from fedbench.rounds.metrics import size_in_bytes
from fedbench.rounds.run import Run, UnseenTest, model_on, private_names, shared
from fedbench.runs.checkpoint import Checkpointing
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
    """Folders, plugin files and threads of a run on this machine; not part of the run's identity."""

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
    devices: tuple[str, ...] = ()
    """The CUDA cards for runs with ``device=cuda``, as cuda:0; empty: all that torch sees."""


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
    encoded when they are read and no cache is filled: for a run that is looked at, not trained. What is computed here
    is float32 whatever the run's ``precision``, since other runs read features as well.
    """
    with plugins_everywhere(settings.plugin_files), float32_products("float32"):
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
    _refuse_tf32_elsewhere(spec)
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


def _refuse_tf32_elsewhere(spec: RunSpec) -> None:
    """FedbenchError for TF32 on a device that has none."""
    if spec.training.precision == "tf32" and torch.device(spec.device).type != "cuda":
        raise FedbenchError(
            f"precision=tf32 is for CUDA alone, and the run is on device={spec.device}; set device=cuda, or "
            "precision=float32."
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
    """The hash of the backbone and of all other pretrained weights that the model reads."""
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


@dataclass(frozen=True)
class Loaded:
    """What is None, the run loads itself."""

    dataset: Dataset | None = None
    backbone: Backbone | None = None


NOTHING = Loaded()
_NO_NAMES: tuple[tuple[str, int | None], tuple[str, str]] = (("", None), ("", ""))


class Loader:
    """Loads what runs read, and keeps it until another run reads something else."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._names = _NO_NAMES
        self._loaded = NOTHING

    def load(self, spec: RunSpec) -> Loaded:
        """The run's data set, and its backbone unless that is drawn from the run's seed.

        Where they can't be loaded, the run is left to load them, and fails as if it had been alone.
        """
        try:
            image_size = image_size_for(spec)
            is_given = is_dual_encoder(spec.backbone) and is_pretrained(spec.backbone)
            backbone_name = spec.backbone if is_given else ""
            names = ((spec.dataset, image_size), (backbone_name, spec.device))
            dataset = self._loaded.dataset if names[0] == self._names[0] else None
            backbone = self._loaded.backbone if names[1] == self._names[1] else None
            # the others are let go before anything is loaded: a run's memory must not depend on the runs before it
            self._names, self._loaded = _NO_NAMES, NOTHING
            data_dir, cache_dir = self._settings.data_dir, self._settings.cache_dir
            if dataset is None:
                dataset = load_dataset(spec.dataset, data_dir=data_dir, cache_dir=cache_dir, image_size=image_size)
                _ = dataset.content_hash  # computed once for all runs
            if backbone is None and backbone_name:
                backbone = load_backbone(spec.backbone, data_dir=data_dir, seed=spec.seed)
                _ = backbone.weights_hash
                backbone.module.to(spec.device)
            if isinstance(backbone, ClipBackbone):
                with float32_products("float32"):
                    backbone.text_features(dataset.classnames, spec.templates)  # which it keeps
            self._names, self._loaded = names, Loaded(dataset, backbone)
        except Exception:  # the run meets it again, and says so
            return NOTHING
        return self._loaded


def labelled(
    federation: Federation,
    assembly: Assembly,
    setup: ModelSetup,
    features: Callable[[Split, FrozenEncoder], InputSource],
    *,
    is_run: bool,
) -> tuple[Federation, Tensor | None]:
    """``federation`` with the answer to the hook `label` where clients have no label, and which samples these are.

    (n,) bool, None where no method gives labels: then the federation has those that are there, or stays without where
    they are hidden. Clients lose the samples without a label; who has none left takes no part. The hidden labels are
    in no part of it. A run that is only looked at (not ``is_run``) has labels in turn, since real ones would need
    every image encoded.
    """
    train, shards, is_hidden = federation.train, federation.shards, not federation.labels_visible
    own = torch.full((len(train),), -1) if is_hidden else train.labels
    missing = torch.zeros(len(train), dtype=torch.bool)
    missing[federation.held] = own[federation.held] < 0
    if not missing.any():
        return federation, None
    given = None
    if "labels" in assembly.provides or is_hidden:
        given = _given(federation, missing, assembly, setup, features, is_run=is_run)
    if given is None and is_hidden:
        return federation, None
    labels = own if given is None else torch.where(missing, given, own)
    kept, *later = [
        [replace(client, indices=client.indices[labels[client.indices] >= 0]) for client in stretch]
        for stretch in (shards, *federation.later)
    ]
    if not any(len(client.indices) for client in kept):
        raise Unworkable(f"{assembly.answers_first('label')} gives no client's samples a label; let it label more.")
    # samples without a label are no client's; 0 stands for theirs, since labels count from 0
    split = replace(train, labels=labels.clamp(min=0))
    moved = tuple(map(Shards.of, later))
    whole = replace(federation, train=split, labels_visible=True, clients=kept, later=moved)
    return whole, None if given is None else missing


def _given(
    federation: Federation,
    missing: Tensor,
    assembly: Assembly,
    setup: ModelSetup,
    features: Callable[[Split, FrozenEncoder], InputSource],
    *,
    is_run: bool,
) -> Tensor | None:
    count, classes, server = len(federation.train), federation.num_classes, federation.server
    if not is_run:
        return torch.arange(count) % classes if "labels" in assembly.provides else None
    # the task is handed out: what it can reach has no labels
    images = Withheld(federation.train, "the clients' samples")
    of_server = None
    if server is not None and "server_labels" in assembly.requires:
        pictures = Withheld(server, "the server's samples")
        of_server = LabelledSamples(lambda encoder: features(pictures, encoder), server.labels)
    clients = [client.indices[missing[client.indices]] for client in federation.shards]
    task = LabelTask(setup, lambda encoder: features(images, encoder), clients, count, of_server)
    answer = assembly.hooks.label(task=task)
    if answer is None:
        return None
    return require_labels(answer, count, classes, assembly.answers_first("label"), "label").cpu()


@dataclass(frozen=True, eq=False)
class Renamed:
    """The run's methods with a model of other class names, whose weights are those of the run's own model."""

    hooks: Hooks
    model: Model


def renamed_model(
    setup: ModelSetup, model: Model, names: tuple[str, ...], plugin_files: Sequence[Path]
) -> Renamed | str:
    """The model that ``build_model`` gives for ``names``; or, in a few words, why it can't take the trained tensors.

    ``model`` is that of ``setup``. Other plugin objects answer, so that what a method keeps on itself
    while it builds never meets training. As many classes may have tensors of the same shape by accident: a head of
    five classes fits five others. A further model then tells whether the number matters.
    """
    hooks = assemble(setup.spec.method, setup.spec.params, plugin_files).hooks
    try:
        renamed = hooks.build_model(setup=replace(setup, classnames=names))
    except Unworkable as error:
        return str(error).rstrip(".")
    compared = [renamed]
    if len(names) == len(setup.classnames):
        one_more = (*names, setup.classnames[0])
        apart = assemble(setup.spec.method, setup.spec.params, plugin_files).hooks
        compared.append(apart.build_model(setup=replace(setup, classnames=one_more)))
    bound = next((name for other in compared for name in _differing(model, other)), "")
    return f"{bound} depends on the number of classes" if bound else Renamed(hooks, renamed)


def _differing(one: Model, other: Model) -> list[str]:
    """Weights and running statistics that the models don't share by name and shape, those of ``one`` first.

    What clients have beside a model is no part of what names classes.
    """
    shapes = [{n: t.shape for n, t in {**m.weights, **m.buffers}.items() if n not in m.own} for m in (one, other)]
    return [name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name)]
