"""Which methods compose: every learner with every personalisation and every rule of the server, these with each
other and with local objectives, and drawn triples.

``matrix.json`` has what was found: stack -> "" where two rounds kept the contract, else the sentence that refuses it.
The tables of plugins/README.md are made of it. ``python -m tests.contract.matrix`` finds it anew and rewrites both, in
ten minutes on two cores; with ``--new`` only what is not recorded yet, as after adding a method.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch

from fedbench.core.errors import FedbenchError, MethodFault
from fedbench.core.spec import stack_names
from fedbench.kinds.methods import wraps
from fedbench.kinds.registry import find_method, method_names
from fedbench.plugins.assembly import role_of
from fedbench.testing import check_training

RECORD = Path(__file__).with_name("matrix.json")
README = Path(__file__).parents[2] / "plugins" / "README.md"
BEGIN, END = "<!-- matrix -->", "<!-- end of matrix -->"
TRIPLES = 200
UNTRAINED = {"clip-zs"}
COLUMNS = ("personalisation", "server step", "aggregation", "compression", "defence")
TITLES = (
    "Personalisations",
    "Steps of the server",
    "What the server makes of updates, or sends",
    "Encodings of what is sent",
    "Defences of the server",
)
MET = {
    "learner": COLUMNS,
    "personalisation": COLUMNS[1:],
    "aggregation": ("server step", "local objective", "compression", "defence"),
    "defence": ("server step", "compression"),
    "compression": ("server step",),
}
"""Role -> those whose methods each of its own is paired with."""


def by_role() -> dict[str, list[str]]:
    """The installed methods, by role."""
    found: dict[str, list[str]] = {}
    for name in method_names():
        if find_method(name).__module__.startswith("fedbench") and name not in UNTRAINED:
            found.setdefault(role_of(find_method(name)), []).append(name)
    return found


def stack(*names: str) -> str:
    """As it is recorded; fedavg is what all others go without."""
    return "+".join(sorted(set(names) - {"fedavg"})) or "fedavg"


def pairs() -> list[str]:
    """Every two methods of `MET`."""
    roles = by_role()
    return [
        stack(one, other) for role, others in MET.items() for one in roles[role] for to in others for other in roles[to]
    ]


def triples() -> list[str]:
    """Drawn of learners, personalisations and all that is neither, the same whenever there are the same methods."""
    roles, rng = by_role(), random.Random(0)
    rest = [name for role in ("server step", "aggregation", "local objective") for name in roles[role]]
    return sorted(
        {
            stack(rng.choice(roles["learner"]), rng.choice(roles["personalisation"]), rng.choice(rest))
            for _ in range(2 * TRIPLES)
        }
    )[:TRIPLES]


def verdict(composed: str) -> str:
    """Nothing where two rounds of the stack keep the contract; else what refuses it.

    Raises what else goes wrong, and where a method of the server makes no difference.
    """
    torch.set_num_threads(1)
    try:
        ended = check_training(composed, participation=1.0)
        for name in filter(_moves, stack_names(composed)):
            others = [other for other in stack_names(composed) if other != name]
            if not any(_does(other, "federate") for other in others):  # of one pooled client there is nothing to weigh
                assert ended != _ended(stack(*others)), f"{name} changes nothing"
    except MethodFault:
        raise
    except FedbenchError as error:
        text = str(error)
        assert text and "\n" not in text, f"{composed} is refused in more than one line: {text}"
        return text
    return ""


def _moves(name: str) -> bool:
    """Whether the state ends otherwise where the method is in a stack: it works at the server, in every round.

    A bound need not be met.
    """
    return name != "norm-bound" and role_of(find_method(name)) in COLUMNS[1:] and not _does(name, "evaluate")


def _does(name: str, hook: str) -> bool:
    cls = find_method(name)
    return hasattr(getattr(cls, hook, None), "fedbench_impl") or hook in wraps(cls)


@cache
def _ended(composed: str) -> str:
    return check_training(composed, participation=1.0)


def _tried(composed: str) -> tuple[str, str, str]:
    try:
        return composed, verdict(composed), ""
    except Exception as error:
        return composed, "", f"{type(error).__name__}: {error}"


def found(stacks: Iterable[str], done: Callable[[str], None] = print) -> tuple[dict[str, str], dict[str, str]]:
    """The verdicts by stack, and of what fails otherwise the errors."""
    verdicts, faults = {}, {}
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for composed, text, fault in pool.map(_tried, stacks, chunksize=4):
            verdicts[composed] = text
            if fault:
                faults[composed] = fault
                done(f"{composed}: {fault}")
    return verdicts, faults


def recorded() -> dict[str, str]:
    """What was found the last time."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}


def in_general(text: str, learner: str, other: str) -> str:
    """A refusal without the names of the two methods, so that many pairs share it."""
    text = re.sub(r"'?[\w-]+(\+[\w-]+)+'?", "the stack", text).replace("the stack the stack", "the stack")
    for name, word in ((learner, "LEARNER"), (other, "COLUMN")):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w.-])", word, text)
    text = text.replace("COLUMN and LEARNER", "LEARNER and COLUMN").replace(
        "clip-lora and LEARNER", "LEARNER and clip-lora"
    )
    return re.sub(r"'[\w.]+' never", "something never", text)


def tables(verdicts: dict[str, str]) -> str:
    """Learners by personalisations and by the server's rules, in Markdown, with the reasons of refusals."""
    roles, reasons = by_role(), list[str]()
    lines: list[str] = []
    for role, title in zip(COLUMNS, TITLES, strict=True):
        others = roles[role]
        lines += [f"**{title}**", "", f"| learner | {' | '.join(f'`{name}`' for name in others)} |"]
        lines += ["|---" * (len(others) + 1) + "|"]
        for learner in roles["learner"]:
            cells = []
            for other in others:
                text = in_general(verdicts[stack(learner, other)], learner, other)
                if text and text not in reasons:
                    reasons.append(text)
                cells.append(f"{reasons.index(text) + 1}" if text else "✓")
            lines.append(f"| `{learner}` | {' | '.join(cells)} |")
        lines.append("")
    lines += [f"{number}. {text}" for number, text in enumerate(reasons, 1)]
    return "\n".join(lines)


def main() -> None:
    """Find it anew and rewrite record and README; what fails otherwise is printed and ends in exit code 1."""
    stacks = dict.fromkeys([*pairs(), *triples()])
    known = {one: text for one, text in recorded().items() if one in stacks} if "--new" in sys.argv else {}
    verdicts, faults = found(one for one in stacks if one not in known)
    verdicts = {one: text for one, text in (known | verdicts).items() if one not in faults}
    RECORD.write_text(json.dumps(verdicts, indent=0, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8")
    if faults:
        raise SystemExit(f"{len(faults)} stacks fail without a sentence that refuses them, and are not recorded")
    text = README.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n{tables(verdicts)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
