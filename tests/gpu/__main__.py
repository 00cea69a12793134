"""What an accelerator makes of fedbench, as one Markdown table: ``python -m tests.gpu``; ``--dry-run`` on a CPU.

Every method trains a tiny run on the device and on the CPU, and the weights are compared. Then the workloads of
``tests.bench`` are timed on the device: with both executors, in bfloat16, and images with clients stacked.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from fedbench.kinds.registry import method_names
from tests.gpu import methods, workloads
from tests.gpu.table import Table


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.add_argument("--device", default="cuda", help="a torch device (default cuda)")
    parser.add_argument("--dry-run", action="store_true", help="everything on the CPU, with tiny workloads")
    parser.add_argument("--methods", nargs="*", metavar="METHOD", help="only these (default all)")
    parser.add_argument("--skip-workloads", action="store_true", help="only compare methods with the CPU")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    given = parser.parse_args(arguments)
    if given.dry_run:
        given.device = "cpu"
    elif given.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --dry-run tries everything on the CPU")
    return given


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; 1 where a method's weights differ from the CPU's, or a workload fails."""
    given = options(arguments)
    began = time.perf_counter()
    table = Table(given.device, is_dry_run=given.dry_run)
    table.say(table.head())
    for name in given.methods or method_names():
        table.add(methods.compare(name, given.device))
    if not given.skip_workloads:
        for line in workloads.measure(given.device, is_tiny=given.dry_run):
            table.add(line)
    table.say(f"\n{time.perf_counter() - began:.0f} s in all.")
    if given.markdown is not None:
        given.markdown.write_text(table.markdown(), encoding="utf-8")
    return 1 if table.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
