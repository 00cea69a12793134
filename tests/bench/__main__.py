"""The benchmark of fedbench against a plain loop and its peers: ``python -m tests.bench --help``."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from tests.bench.cells import ROOT, SYSTEMS, WORKLOADS, Cell, Workload, command, cores, environment, obstacle
from tests.bench.measure import measure
from tests.bench.table import NOTE, Result, as_markdown, as_rich, remarks, rows
from tests.bench.workloads import make_data


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help="all by default; see --list")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="of every row, interleaved (default 5)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="only these")
    parser.add_argument(
        "--python", action="append", default=[], metavar="SYSTEM=PATH", help="interpreter of a system; repeat it"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every measurement")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    parser.add_argument("--list", action="store_true", help="name the workloads and their rows")
    given = parser.parse_args(arguments)
    known = {workload.name: workload for workload in WORKLOADS}
    unknown = [name for name in given.workloads if name not in known]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; choose from {', '.join(known)}")
    given.chosen = [known[name] for name in given.workloads] or [each for each in WORKLOADS if not each.hidden]
    wrong = [pair for pair in given.python if pair.partition("=")[0] not in SYSTEMS or "=" not in pair]
    if wrong:
        parser.error(f"--python {wrong[0]!r}: write SYSTEM=PATH, SYSTEM one of {', '.join(SYSTEMS)}")
    given.pythons = dict(pair.split("=", 1) for pair in given.python)
    if given.repeats < 1:
        parser.error("--repeats must be 1 or more")
    return given


class Bench:
    """The runs of one command."""

    def __init__(self, given: argparse.Namespace, folder: Path, console: Console) -> None:
        self.given = given
        self.folder = folder
        self.console = console
        self.reasons = {system: obstacle(system, given.pythons) for system in given.systems}

    def repeat(self, workload: Workload, number: int) -> list[Result]:
        """Every row once, one after the other."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            return [
                self.run(workload, cell, number, Path(scratch))
                for cell in workload.cells
                if cell.system in self.given.systems
            ]

    def run(self, workload: Workload, cell: Cell, number: int, scratch: Path) -> Result:
        """One row once, in a process of its own."""
        if reason := self.reasons[cell.system]:
            return Result(workload.name, cell.row, number, 0.0, None, None, None, f"skipped: {reason}")
        data = None if cell.job is None else make_data(cell.job, self.folder)
        with tempfile.TemporaryDirectory(dir=self.folder) as own:
            line = command(cell, self.given.pythons, scratch, data, Path(own))
            cost = measure(line, cwd=ROOT, env=environment(self.folder))
            file = Path(own) / "report.json"
            report = json.loads(file.read_text("utf-8")) if file.exists() else None
        problem = ""
        if cost.code or (report is None and not cell.is_suite):
            self.console.print(f"{workload.name} {cell.row}: exit status {cost.code}\n{cost.output}", markup=False)
            problem = f"failed: exit status {cost.code}"
        result = Result(workload.name, cell.row, number, cost.wall, cost.cpu, cost.peak, report, problem)
        taken = "failed" if result.seconds is None else f"{result.seconds:.4g} s"
        self.console.print(f"[dim]{workload.name}  repeat {number + 1}  {cell.row}  {taken}")
        return result


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    models = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": cores(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 where a row failed."""
    given = options(arguments)
    console = Console(width=None if sys.stdout.isatty() else 140)
    if given.list:
        for workload in WORKLOADS:
            if not workload.hidden:
                console.print(f"{workload.name}  {workload.title}: {'; '.join(cell.row for cell in workload.cells)}")
        return 0
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="fedbench-bench-") as folder:
        bench = Bench(given, Path(folder), console)
        for number in range(given.repeats):
            for workload in given.chosen:
                results += bench.repeat(workload, number)
                save(given.json, results)
    show(given, results, console)
    return int(any(result.problem.startswith("failed") for result in results))


def save(file: Path | None, results: Sequence[Result]) -> None:
    """What was measured so far, so that an interruption loses little."""
    if file is not None:
        told = {"machine": machine(), "runs": [asdict(one) for one in results]}
        file.write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def show(given: argparse.Namespace, results: Sequence[Result], console: Console) -> None:
    """Tables to the terminal, and to the file that was asked for."""
    told = machine()
    where = (
        f"{told['cpu']}, {told['cores']} cores, Python {told['python']}, torch {told['torch']}, {given.repeats} repeats"
    )
    pages = []
    for workload in given.chosen:
        own = [result for result in results if result.workload == workload.name]
        body = rows(own, [cell.row for cell in workload.cells if cell.system in given.systems])
        if body:
            title, below = f"{workload.name}: {workload.title}", remarks(own)
            console.print(as_rich(title, body), *below, sep="\n", markup=False, highlight=False)
            pages.append(as_markdown(title, body, below))
    console.print(f"{where}\n{NOTE}")
    if given.markdown:
        given.markdown.write_text("\n\n".join([*pages, where + ".", NOTE]) + "\n", "utf-8")


if __name__ == "__main__":
    sys.exit(main())
