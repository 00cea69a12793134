"""What an accelerator makes of fedbench, in stages, the most valuable first: ``python -m tests.gpu``.

``--dry-run`` tries everything on a CPU.
With ``--output`` every row goes to a file as it is measured, and every stage's table as the stage ends.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path

import torch

from fedbench.kinds.registry import method_names
from tests.gpu import arithmetic, methods, workloads
from tests.gpu.table import Line, Place, Report, Row


@dataclass(frozen=True)
class Stage:
    """Rows that stand in one table."""

    name: str
    minutes: float
    """Reckoned, on an H200."""
    title: str
    rows: Callable[[Place], Iterable[Row]]


def compared(place: Place, names: Sequence[str] = ()) -> Iterator[Row]:
    """Every method against the CPU, or those of ``names``."""
    for name in names or method_names():
        yield Row(name, "tiny", partial(methods.compare, name, place.device))


STAGES = (
    Stage("ceiling", 0.2, "a large matrix product in every precision", arithmetic.ceilings),
    Stage("graphs", 1.2, "W1, a small network on images: one by one, as graphs, at once", workloads.graphs),
    Stage("w11", 2.2, "CAPT on a ViT-B/16, tokens in the image tower", workloads.w11),
    Stage("w10", 1.6, "PromptFL on a ViT-B/16, 100 classes and 10", workloads.w10),
    Stage("w9", 1.0, "pfl's CIFAR-10 workload, as many of its 1,500 rounds as there is time for", workloads.w9),
    Stage("w2-w3", 0.8, "a linear head, and PromptFL on the embedded CLIP", workloads.w2_w3),
    # behind what is timed in this process, whose launches a profiler may leave slower
    Stage("profile", 0.6, "kernels and operations of W11 and W1", workloads.profiles),
    Stage("w6", 1.7, "16 short runs of the suite longtail", workloads.w6),
    Stage("longtail", 2.5, "the suite longtail as one command", workloads.longtail),
    Stage("methods", 3.0, "every method against the CPU", compared),
)  # fmt: skip


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    names = [stage.name for stage in STAGES]
    parser.add_argument("--device", default="cuda", help="a torch device (default cuda)")
    parser.add_argument("--dry-run", action="store_true", help="everything on the CPU, with tiny workloads")
    parser.add_argument("--stages", nargs="+", choices=names, default=names, metavar="STAGE", help=", ".join(names))
    parser.add_argument("--minutes", type=float, metavar="M", help="leave out stages that take longer than is left")
    parser.add_argument("--methods", nargs="+", default=[], metavar="METHOD", help="compare only these (default all)")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="write gpu.md and rows.jsonl there")
    given = parser.parse_args(arguments)
    if given.dry_run:
        given.device = "cpu"
    elif given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --dry-run tries everything on the CPU")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 where a row fails, or a method's weights differ from the CPU's."""
    began = time.perf_counter()
    given = options(arguments)
    ends = float("inf") if given.minutes is None else began + 60 * given.minutes
    report = Report(given.output, given.device, is_dry_run=given.dry_run)
    chosen = [stage for stage in STAGES if stage.name in given.stages]
    report.say("\n".join(f"- {stage.name}, about {stage.minutes:g} min: {stage.title}" for stage in chosen))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        place = Place(given.device, Path(folder), given.dry_run, ends)
        for stage in chosen:
            if 60 * stage.minutes > place.left:
                report.say(f"{stage.name}: left out, about {stage.minutes:g} min where {place.left / 60:.1f} are left")
                continue
            if given.methods and stage.rows is compared:
                stage = replace(stage, rows=partial(compared, names=given.methods))
            carry_out(stage, place, report)
    report.say(f"{time.perf_counter() - began:.0f} s in all.")
    return 1 if report.has_failed else 0


def carry_out(stage: Stage, place: Place, report: Report) -> None:
    """Measure the rows of ``stage`` till the time is over; what fails is a row, and the others go on."""
    began, lines = time.perf_counter(), []
    first: dict[str, float] = {}

    rows: list[Row] = []
    try:
        rows += stage.rows(place)
    except Exception as error:
        lines.append(replace(failed(error), what=stage.name))
        report.row(stage.name, lines[-1])
    for row in rows:
        line = measured(row) if place.left > 0 else Line(found="not measured: the time is over")
        if isfinite(line.seconds):
            line = replace(line, ratio=line.seconds / first.setdefault(row.what, line.seconds))
        aim = "" if row.aim is None else row.aim.judged(line)
        lines.append(replace(line, what=row.what, how=row.how, aim=aim))
        report.row(stage.name, lines[-1])
    report.stage(f"{stage.name}: {stage.title}", lines, time.perf_counter() - began)


def measured(row: Row) -> Line:
    """The row's figures, or what went wrong."""
    try:
        return row.measure()
    except Exception as error:
        return failed(error)


def failed(error: Exception) -> Line:
    """The first line of what went wrong."""
    return Line(found=f"fails: {methods.first_line(error)}", has_failed=True)


if __name__ == "__main__":
    sys.exit(main())
