"""A look at runs before anything is trained: each is prepared in a worker (`Worker`), which says what it found.

Nothing that a method does to its process while it is prepared reaches the rows after it, and a process that dies is the
fault of its own row.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fedbench.core.errors import REASON, FedbenchError, MethodFault, NotHere, raised_at, reason_of, shortened, text_of
from fedbench.core.records import RunInfo
from fedbench.core.spec import RunSpec
from fedbench.kinds.registry import plugins_everywhere
from fedbench.rounds.private import shared
from fedbench.rounds.run import Run
from fedbench.runs.engines import can_fork
from fedbench.runs.engines.worker import Apart, Work, exit_text
from fedbench.runs.loaded import Loaded, Loader
from fedbench.runs.memory import MeasuredMemory, Memory, measure, memory_of
from fedbench.runs.prepare import Settings, backbone_for, dataset_for, enlargement, prepare

if TYPE_CHECKING:
    from torch import nn

    from fedbench.core.types import Backbone


@dataclass(frozen=True)
class Prepared:
    """What preparing a run shows."""

    info: RunInfo
    memory: Memory | None = None
    """Of a dry run only."""
    sent: int = 0
    """Trained parameters that leave the client; its private ones do not. Of a dry run only."""
    measured: Mapping[str, MeasuredMemory] = field(default_factory=dict)
    """What was tried out for ``memory``, by what it depends on."""


@dataclass(frozen=True)
class Failed:
    """The run's method is at fault."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """What was requested can't be run as it is."""

    text: str
    is_of_loading: bool = False
    """Data or backbone can't be loaded; else they don't fit the method, or each other."""
    absent: Literal["", "data", "weights"] = ""
    """What is not on this machine."""


Found = Prepared | Failed | Refused


@dataclass(frozen=True)
class LookRequest:
    """A run to look at."""

    spec: RunSpec
    known: Mapping[str, MeasuredMemory] | None = None
    """What was measured for other runs; None: its memory is not wanted, and all its features are to be encoded."""


def look(request: LookRequest, settings: Settings, loaded: Loaded, emit: Callable[[Any], None]) -> bool:
    """Prepare the run; emits what there is to say of its images ("" for nothing), and `Found`. Whether it ended well.

    What is wrong with loading, FedbenchError aside, is raised, before anything is emitted.
    """
    spec, dataset = request.spec, loaded.dataset
    try:
        dataset = dataset or dataset_for(spec, settings)
        backbone = loaded.backbone or backbone_for(spec, dataset, settings)
        line = enlargement(dataset, backbone)
    except FedbenchError as error:
        absent: Literal["data", "weights"] = "data" if dataset is None else "weights"
        emit(Refused(str(error), is_of_loading=True, absent=absent if isinstance(error, NotHere) else ""))
        return True
    except Exception as error:
        error.add_note(f"while preparing row {spec.title!r}; nothing was run")
        raise
    emit(line)
    try:
        run = prepare(spec, settings, dataset=dataset, backbone=backbone, encode_all=request.known is None)
        emit(Prepared(run.info) if request.known is None else _measured(run, backbone, request.known))
        return True
    except MethodFault as error:
        emit(Failed(shortened(" ".join(text_of(error).split()), REASON)))
    except FedbenchError as error:  # a text encoder or a teacher may be absent as well
        emit(Refused(text_of(error), absent="weights" if isinstance(error, NotHere) else ""))
    except BaseException as error:  # a method may raise SystemExit or KeyboardInterrupt as well
        if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            raise  # Ctrl-C, which a process of its own ignores
        emit(Failed(f"{reason_of(error)} ({raised_at(error)})"))
    return False


def looks(
    specs: Sequence[RunSpec], settings: Settings, *, is_dry: bool, in_process: bool, tell: Callable[[str], None]
) -> Generator[tuple[RunSpec, Found], None, None]:
    """Look at all runs, those that read the same one after the other, and tell each line on their images once.

    With ``in_process``, and where the system can't fork, a run may change those after it. A dry look encodes no more
    images than it takes to tell what memory a run needs. Raises FedbenchError where a run's process ends before its
    data are loaded.
    """
    known: dict[str, MeasuredMemory] = {}
    absent: dict[tuple[str, str], Refused] = {}
    shown = {""}
    with closing(_Here(settings) if in_process or not can_fork() else _Elsewhere(settings)) as place:
        for spec in _by_what_they_read(specs):
            same = absent.get((spec.dataset, spec.backbone))
            for answer in [same] if same else place.look(LookRequest(spec, known if is_dry else None)):
                if isinstance(answer, Refused) and answer.absent and answer.is_of_loading:
                    absent[spec.dataset, spec.backbone] = answer
                if not isinstance(answer, str):
                    known |= answer.measured if isinstance(answer, Prepared) else {}
                    yield spec, answer
                elif answer not in shown:
                    shown.add(answer)
                    tell(answer)


class _Here:
    """This process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loader = Loader(settings)

    def look(self, request: LookRequest) -> list[str | Found]:
        events: list[str | Found] = []
        with plugins_everywhere(self._settings.plugin_files):
            look(request, self._settings, self._loader.load(request.spec), events.append)
        return events

    def close(self) -> None:
        """Nothing to give back."""


class _Elsewhere:
    """Workers, one after another."""

    def __init__(self, settings: Settings) -> None:
        self._apart = Apart(settings)

    def look(self, request: LookRequest) -> list[str | Found]:
        events: list[str | Found] = []
        try:
            code = self._apart.carry_out(Work(look, request, request.spec), events.append)
        except (OSError, EOFError) as error:
            raise FedbenchError(
                f"no process could be started to prepare row {request.spec.title!r}: {type(error).__name__} {error}; "
                "end others, or use --engine in-process."
            ) from error
        if not events:
            reason = f"while its data and backbone were loaded, {exit_text(code)}."
            raise FedbenchError(f"row {request.spec.title!r}: {reason} Nothing was run.")
        return events if not isinstance(events[-1], str) else [*events, Failed(exit_text(code))]

    def close(self) -> None:
        """End the process, and with it the run that it prepares."""
        self._apart.close()


def _by_what_they_read(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """The runs by data set and backbone, which are loaded anew where they change, in the order of their first ones."""
    datasets = list(dict.fromkeys(spec.dataset for spec in specs))
    backbones = list(dict.fromkeys(spec.backbone for spec in specs))
    return sorted(specs, key=lambda spec: (datasets.index(spec.dataset), backbones.index(spec.backbone)))


def _measured(run: Run, backbone: Backbone, known: Mapping[str, MeasuredMemory]) -> Prepared:
    """Runs that differ in nothing that matters to their memory are measured once."""
    key = _memory_key(run)
    measured = known[key] if key in known else measure(run)
    sent = sum(tensor.numel() for tensor in shared(run.model.weights, run.private).values())
    return Prepared(run.info, memory_of(run, _frozen(run, backbone), measured), sent, {key: measured})


def _memory_key(run: Run) -> str:
    """What a local step's memory depends on: neither on the partition of the data, nor on seeds, rates and budget.

    Rows of one method are taken to be alike where their models' weights are, by name and shape: a measurement with all
    of ViT-B/16 takes ten seconds, and a paper's suite has dozens of ablations that change the server alone.
    """
    spec, model = run.spec, run.model
    alike = spec.model_dump(mode="json", exclude={"scenario", "training", "seed", "tuned", "params"})
    of_training = spec.training.model_dump(include={"optimizer", "precision", "augment"})
    shapes = {name: tuple(t.shape) for name, t in (*model.weights.items(), *model.buffers.items())}
    encoders = [encoder.key for encoder in (model.encoder, *model.side_encoders.values()) if encoder is not None]
    return repr((alike, of_training, spec.scenario.labels, run.info.classnames, shapes, encoders))


def _frozen(run: Run, backbone: Backbone) -> list[nn.Module]:
    """The frozen modules that a process holds for the run."""
    encoders = [run.model.encoder, *run.model.side_encoders.values()]
    beside = [getattr(encoder, "backbone", None) for encoder in encoders]
    return [backbone.module, *(other.module for other in beside if other is not None)]
