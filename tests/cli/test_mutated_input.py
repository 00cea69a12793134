"""Mutated suites, settings and options at the command line: planned, or refused with one message and nothing left.

Hypothesis deals the cases: by default a hundred, the same ones every time; `pytest -m slow` deals 2,000, others every
time. `FEDBENCH_MUTANTS` sets how many these are.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fedbench.cli.app import main
from fedbench.core.method.hyper import declared
from fedbench.core.scenario import Scenario
from fedbench.core.spec import Training
from fedbench.kinds.registry import find_method
from fedbench.suites.suite import load_suite, suite_names
from tests.cli.conftest import Ended
from tests.cli.test_refusals import ADDED

DATA = "embedded?train=200&test=40"
TINY: dict[str, Any] = {
    "name": "tiny",
    "description": "two rows",
    "dataset": DATA,
    "backbone": "clip:embedded",
    "scenario": {"preset": "iid", "clients": 2, "participation": 1.0},
    "training": {"rounds": 1, "batch_size": 32, "lr": 0.01},
    "seeds": [0],
    "baseline": "fedavg",
    "headline": "global_accuracy",
    "columns": ["worst_client"],
    "target": 60.0,
    "rows": [{"method": "fedavg"}, {"method": "fedprox", "label": "prox", "set": {"fedprox.mu": 0.01, "lr": 0.02}}],
}
GRID: dict[str, Any] = {
    "name": "grid",
    "backbone": "clip:embedded",
    "scenario": "iid",
    "training": {"local_epochs": 1, "momentum": 0.5},
    "seeds": [3],
    "scales": {
        "small": {
            "set": {"dataset": DATA, "clients": 5, "rounds": 1},
            "of": {"fedprox": {"fedprox.mu": 0.1}},
            "settings": [
                {"name": "one", "set": {"participation": 0.5}},
                {"name": "two", "set": {"partition": "shards"}, "of": {"fedavg": {"lr": 0.1}}},
            ],
        },
        "large": {"seeds": [1], "settings": [{"name": "three", "set": {"dataset": "embedded?train=400&test=40"}}]},
    },
    "published": "capt",
    "rows": [{"method": "fedavg", "only": ["one"]}, {"method": "fedprox", "at": {"small": {"lr": 0.02}}}],
}
SHIPPED = suite_names()
ON_TINY_DATA = ["--method", "fedavg", "--seed", "0", "--set", f"dataset={DATA}", "--set", "backbone=clip:embedded"]
for _assignment in ("imbalance=none", "partition=iid", "server_samples=0", "clients=2", "unseen_classes=0", "rounds=1"):
    ON_TINY_DATA += ["--set", _assignment]
METHODS = ("fedavg", "fedprox", "fedclip", "moon", "fedglcl", "promptfl")

WORDS = ["", " ", "none", "nan", "NaN", "inf", "-inf", "-1", "0", "1", "2", "0.5", "1.5", "1e9", "1e-400", "true"]
WORDS += ["yes", "1_000", "0x10", "٣", "½", "9" * 30, "9" * 5000, "x" * 300, "héhé", "\u202eabc", "a\tb", "a\nb"]
WORDS += ["{}", "[1]", "a=b", "a.b", ".", "..", "../..", "/", "~nobody/x", "'", '"', "%s", "{0}", "?", "?a", "?a="]
WORDS += ["$HOME", "[/red]", "[bold]x", "iid", "fedavg", "fedprox.mu", "cpu", "cuda:9", "meta", "sgd", "+", "\x1b[31m"]
JUNK = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from([None, True, False, [], {}, [[]], [None], {"a": 1}, {1: 2}, {None: None}, [1, "a", 2.5]]),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), -1, 0, 1, 2, 10**9, 10**30, 2**63, -(2**70), 1e300]),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
)


@dataclass(frozen=True)
class Case:
    """A command, the suite file it reads, and the words of which its refusal has to say one."""

    arguments: tuple[str, ...]
    fields: tuple[str, ...]
    suite: bytes | None = None
    dry: bool = True
    """Whether the command has a dry run."""


def paths(node: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where in a suite there is something to mutate."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield (*before, key)
        yield from paths(value, (*before, key))


@st.composite
def misspelled(draw: st.DrawFn, word: str) -> str:
    """``word`` with a letter lost, doubled or replaced."""
    at = draw(st.integers(0, max(len(word) - 1, 0)))
    return word[:at] + draw(st.sampled_from(["", word[at : at + 1] * 2, "_", "é", " "])) + word[at + 1 :]


@st.composite
def mutated(draw: st.DrawFn, suite: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """``suite`` with one or two places changed, and the words that name them."""
    suite, named = copy.deepcopy(suite), []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2]))):
        where = draw(st.sampled_from(list(paths(suite))))
        place = suite
        for part in where[:-1]:
            place = place[part]
        key = where[-1]
        named += [str(part) for part in where if isinstance(part, str)]
        match draw(st.sampled_from(["delete", "rename", "add", "junk", "junk", "junk", "wrap", "string", "word"])):
            case "delete":
                # what else of the suite names what is gone is refused by that name
                named += re.findall(r"\w+", str(place[key]))
                del place[key]
            case "rename" if isinstance(key, str) and isinstance(place, dict):
                new = draw(misspelled(key))
                place[new] = place.pop(key)
                named.append(new)
            case "add" if isinstance(place, dict):
                new = draw(st.sampled_from([*WORDS[:30], *METHODS, "fedprox.nu", "rounds", "scenario.clients", "seed"]))
                place[new] = draw(JUNK)
                named.append(new)
            case "wrap":
                place[key] = draw(st.sampled_from([[place[key]], {"a": place[key]}]))
            case "string":
                place[key] = str(place[key])
                named.append(place[key][:20])
            case "word" if isinstance(place[key], str):
                place[key] = draw(misspelled(place[key]))
                named.append(place[key])
            case _:
                place[key] = draw(JUNK)
                named.append(str(place[key]))
    return suite, tuple(named)


def shipped(name: str) -> dict:
    """A suite as its file has it."""
    suite = load_suite(name)
    return suite.model_dump(mode="json", exclude_defaults=True)


@st.composite
def suites(draw: st.DrawFn) -> Case:
    """A suite of valid YAML with wrong content."""
    name = draw(st.sampled_from(["tiny", "tiny", "grid", "grid", *SHIPPED]))
    if name in ("tiny", "grid"):
        suite, named = draw(mutated(TINY if name == "tiny" else GRID))
        further = ["--set", f"dataset={DATA}"] if draw(st.integers(0, 3)) == 0 else []
    else:
        suite, named = draw(mutated(shipped(name)))
        further = ON_TINY_DATA
    text = yaml.safe_dump(suite, sort_keys=False, allow_unicode=draw(st.booleans()), width=10**6)
    return Case(("run", "--suite", "mutant.yaml", *further), (*named, "YAML"), text.encode("utf-8", "surrogatepass"))


@st.composite
def texts(draw: st.DrawFn) -> Case:
    """A suite file that is damaged as text."""
    text = yaml.safe_dump(TINY, sort_keys=False)
    lines = text.encode().splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    match draw(st.sampled_from(["line", "line", "line", "alone", "cut", "bytes", "code", "letter", "double"])):
        case "line" | "alone" as way:
            line = draw(st.sampled_from([line for line, _ in ADDED]))
            line = line if isinstance(line, bytes) else line.encode()
            content = line if way == "alone" else b"".join(lines + [line] if at else [line, b"\n", *lines])
        case "cut":
            content = text.encode()[: draw(st.integers(0, len(text)))]
        case "bytes":
            content = draw(st.binary(max_size=200))
        case "code":
            content = (text + "description: é\n").encode(draw(st.sampled_from(["utf-16", "latin-1", "utf-8-sig"])))
        case "letter":
            at = draw(st.integers(0, len(text) - 1))
            content = (text[:at] + draw(st.sampled_from("\x00\x07\t:-[{&*!|>'\"%@`#,?\u2028é")) + text[at:]).encode()
        case _:
            content = b"".join([*lines[: at + 1], lines[at], *lines[at + 1 :]])
    return Case(("run", "--suite", "mutant.yaml"), ("mutant.yaml", "row 'f", "YAML"), content)


def hyper_parameters() -> dict[str, Any]:
    """What the methods under test declare, as ``method.name``."""
    return {f"{method}.{name}": one for method in METHODS for name, one in declared(find_method(method).Params).items()}


KEYS = [*Scenario.model_fields, *Training.model_fields, "backbone", "text_encoder", "tune", "head_scale", "templates"]
KEYS += ["scenario", "device", "dataset", "seed", "method", "scenario.clients", "training.lr", "backbone.text"]
KEYS += [*hyper_parameters(), "fedprox.", ".mu", ".", "", "fedprox.mu.x", "scenario.", "x.y", "training", "a b", "é"]


@st.composite
def values(draw: st.DrawFn) -> str:
    """A value as it is typed."""
    return draw(
        st.one_of(
            st.sampled_from(WORDS),
            st.integers().map(str),
            st.floats().map(str),
            st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=8),
        )
    )


@st.composite
def data_names(draw: st.DrawFn) -> str:
    """A data set's name, wrong somewhere."""
    option = draw(st.sampled_from(["train", "test", "classes", "seed", "clases", "", "train=200&train"]))
    scheme = draw(st.sampled_from(["embedded", "embedded:x", "embeded", "imagefolder:nowhere", "listfile:nowhere", ""]))
    value = draw(values())
    small = not (value.isdigit() and int(value[:20]) > 1000 and len(value) < 9)
    further = "".join(f"&{rest}" for rest in ("train=200", "test=40") if not rest.startswith(f"{option}="))
    return f"{scheme}?{option}={value if small else 'many'}{further}"


@st.composite
def backbone_names(draw: st.DrawFn) -> str:
    """A backbone's name, wrong somewhere."""
    if draw(st.booleans()):
        option = draw(st.sampled_from(["width", "projector", "projector_layers", "stem", "dense", "resize", "widht"]))
        return f"{draw(st.sampled_from(['convnet', 'resnet8', 'vgg11', 'rsnet8']))}?{option}={draw(values())}"
    arch = draw(st.sampled_from(["embedded", "ViT-B-32", "ViT-B-33", "", "RN50", "coca_ViT-B-32"]))
    return f"clip:{arch}{draw(st.sampled_from(['@', ':', '']))}{draw(values())}"


@st.composite
def assignments(draw: st.DrawFn) -> Case:
    """``--set`` of anything."""
    arguments, named = [], []
    for _ in range(draw(st.sampled_from([1, 1, 2]))):
        key = draw(st.one_of(st.sampled_from(KEYS), st.sampled_from(KEYS).flatmap(misspelled)))
        if key == "dataset":
            value = draw(data_names())
        elif key == "backbone":
            value = draw(backbone_names())
        else:
            value = draw(values())
        sign = draw(st.sampled_from(["=", "=", "=", "=", "=", "=", "", "==", " = "]))
        arguments += ["--set", f"{key}{sign}{value}"]
        named += [key.rpartition(".")[2], key.partition(".")[0], key, "--set", *re.split("[?:@=&]", value)]
    methods = draw(st.sets(st.sampled_from(METHODS[:4]), min_size=1, max_size=2))
    rows = [word for method in sorted(methods) for word in ("--method", method)]
    command = ["run", "--set", f"dataset={DATA}", "--scenario", "iid", *rows]
    small = ["--set", "clients=2", "--set", "rounds=1"] if not {"clients", "rounds"} & set(named) else []
    return Case((*command, *small, *arguments), tuple(filter(None, named)))


@st.composite
def hypers(draw: st.DrawFn) -> Case:
    """A hyper-parameter at any value, in a row of a suite or by ``--set``."""
    key = draw(st.sampled_from(sorted(hyper_parameters())))
    method, _, name = key.partition(".")
    known = hyper_parameters()[key]
    edges = [edge for edge in (known.hyper.low, known.hyper.high) if edge is not None]
    near = [edge * factor for edge in edges for factor in (0.5, 0.999, 1, 1.001, 2, -1)]
    value = draw(st.one_of(JUNK, st.sampled_from([*near, known.default])))
    by_hand = draw(st.booleans())
    row = {"method": method, "set": {} if by_hand else {key: value}}
    suite = {**TINY, "rows": [row], "baseline": method}
    text = "" if value is None else str(value).replace("\x00", "")
    further = ["--set", f"{key}={text}"] if by_hand else []
    content = yaml.safe_dump(suite, sort_keys=False, width=10**6).encode("utf-8", "surrogatepass")
    return Case(("run", "--suite", "mutant.yaml", *further), (key, name), content)


OPTIONS = ["--seed", "--method", "--scale", "--setting", "--scenario", "--dataset", "--tuned"]
OPTIONS += [
    "--storage",
    "--executor",
    "--jobs",
    "--store",
    "--suite",
    "--data-dir",
    "--cache-dir",
    "--plugin",
    "--nothing",
]
TUNE = ["--trials", "--objective", "--param", "--pruner", "--validation", "--study", "--seed", "--method", "--set"]
SHOW = ["--dataset", "--seed", "--set", "--setting", "--scale"]
READ = ["--metric", "--baseline", "--target", "--test", "--format", "--suite", "--store", "--published"]


@st.composite
def options(draw: st.DrawFn) -> Case:
    """A wrong value of an option, of several verbs."""
    verb, known, dry = draw(
        st.sampled_from(
            [
                (("run", "--suite", "mutant.yaml"), OPTIONS, True),
                (("run", "--suite", "mutant.yaml"), OPTIONS, True),
                (("tune", "--suite", "mutant.yaml", "--trials", "2"), TUNE, True),
                (("scenario", "show", "iid", "--dataset", DATA), SHOW, False),
                (("scenario", "show", "--suite", "mutant.yaml"), SHOW, False),
                (("leaderboard", "--suite", "mutant.yaml"), READ, False),
            ]
        )
    )
    option = draw(st.sampled_from(known))
    value = draw(values())
    if option == "--dataset":
        value = draw(data_names())
    elif option == "--set":
        value = f"{draw(st.sampled_from(KEYS))}={value}"
    elif option in ("--cache-dir", "--data-dir", "--store", "--storage"):
        odd = ["a?b", "://", "x://y"] if option in ("--store", "--storage") else ["mutant.yaml/y/z"]
        value = draw(st.sampled_from(["x" * 300, "mutant.yaml", "mutant.yaml/x", "~nobody/x", *odd]))
    elif option == "--param":
        value = draw(st.one_of(st.just(value), st.sampled_from(["lr", "fedprox.mu", "mu", "fedprox.nu", "rounds"])))
    suite = TINY if verb[0] == "scenario" else draw(st.sampled_from([TINY, GRID]))
    content = yaml.safe_dump(suite, sort_keys=False).encode()
    named = [option, option.strip("-"), "database", "store", "stud", *re.split("[?:@=&]", value)]
    if option == "--cache-dir":
        named += ["cache"]
    return Case((*verb, option, value), tuple(filter(None, named)), content, dry)


CASES = st.one_of(suites(), suites(), texts(), assignments(), assignments(), hypers(), options())


class Bench:
    """Runs cases, each in an empty folder, and counts how they end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.counts = folder, Counter[str]()

    def call(self, *arguments: str) -> Ended:
        """``fedbench ARGUMENTS`` in this process."""
        out, err = io.StringIO(), io.StringIO()
        before, code = sys.argv, None
        sys.argv = ["fedbench", *arguments]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 0 if end.code is None else None
            except Exception:
                err.write(traceback.format_exc())
            finally:
                sys.argv = before
        return Ended(-1 if code is None else code, out.getvalue(), err.getvalue())

    def check(self, case: Case) -> str:
        """What is wrong with how the command treats ``case``; nothing if it is planned, or refused as it should be."""
        self.counts["all"] += 1
        work = self.folder / f"{self.counts['all']}"
        work.mkdir()
        with contextlib.chdir(work):
            if case.suite is not None:
                Path("mutant.yaml").write_bytes(case.suite)
            planned = self.call(*case.arguments, *(["--dry-run"] if case.dry else []))
            if planned.code == 0:
                self.counts["valid"] += 1
                left = self.left(work, case)
                return f"a plan left {left}" if left and case.dry else ""
            self.counts["invalid"] += 1
            ended = self.call(*case.arguments) if case.dry else planned
        for one in (planned, ended):
            wrong = self.not_a_refusal(one, case)
            if wrong:
                return f"{wrong}\n{one.out}\n{one.err}"
        left = self.left(work, case)
        return f"left behind: {left}\n{ended.err}" if left else ""

    @staticmethod
    def left(work: Path, case: Case) -> list[str]:
        """What lies in the folder that was not there before."""
        return sorted(path.name for path in work.iterdir() if path.name != "mutant.yaml")

    @staticmethod
    def not_a_refusal(ended: Ended, case: Case) -> str:
        """Why ``ended`` is no clean refusal of the case; empty if it is one."""
        message = " ".join(ended.err.split())
        if "Traceback" in ended.err or ended.code == -1:
            return "a traceback"
        if ended.code != 2:
            return f"exit code {ended.code}"
        if len(re.findall(r"\berror: |╭─ Error", ended.err)) != 1:
            return "not one message"
        if len(message) > 4000:
            return f"a message of {len(message)} characters"
        squeezed = re.sub(r"[\s│]+", "", message)
        if not any(re.sub(r"\s+", "", field) in squeezed or repr(field)[1:-1] in message for field in case.fields):
            return f"the message names none of {case.fields}"
        return ""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """Commands without a network, on data rendered once."""
    folder = tmp_path_factory.mktemp("mutants")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDBENCH_CACHE", str(folder / "cache"))
        patch.setenv("COLUMNS", "200")
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        patch.setattr("fedbench.models.weight_files.can_reach", lambda url: False)
        yield Bench(folder)


LOOSE = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))


def decided(bench: Bench, sure: settings) -> None:
    """Cases as ``sure`` says, every one of them planned or refused."""

    @sure
    @given(CASES)
    def every(case: Case) -> None:
        wrong = bench.check(case)
        assert not wrong, f"{case.arguments}\n{(case.suite or b'').decode('utf-8', 'replace')}\n{wrong}"

    every()
    print(dict(bench.counts))
    assert bench.counts["invalid"] > bench.counts["valid"] > 0


def test_mutated_input_is_planned_or_refused(bench: Bench) -> None:
    decided(bench, settings(LOOSE, max_examples=8, derandomize=True))


@pytest.mark.slow
def test_much_mutated_input_is_planned_or_refused(bench: Bench) -> None:
    decided(bench, settings(LOOSE, max_examples=int(os.environ.get("FEDBENCH_MUTANTS", "2000")), derandomize=False))


@pytest.mark.slow
def test_what_was_planned_runs(bench: Bench) -> None:
    """Valid mutants of the tiny suite finish, or training diverges: anything else the plan had to say."""

    @settings(LOOSE, max_examples=60)
    @given(mutated(TINY))
    def every(mutant: tuple[dict[str, Any], tuple[str, ...]]) -> None:
        content = yaml.safe_dump(mutant[0], sort_keys=False).encode("utf-8", "surrogatepass")
        command = ("run", "--suite", "mutant.yaml", "--set", "rounds=1", "--set", "local_epochs=1", "--seed", "0")
        work = bench.folder / f"run-{bench.counts['runs']}"
        bench.counts["runs"] += 1
        work.mkdir()
        with contextlib.chdir(work):
            Path("mutant.yaml").write_bytes(content)
            if bench.call(*command, "--set", f"dataset={DATA}", "--dry-run").code == 0:
                ended = bench.call(*command, "--set", f"dataset={DATA}", "--jobs", "1")
                assert ended.code == 0 or "diverged" in ended.err, f"{content.decode()}\n{ended.out}\n{ended.err}"

    every()
