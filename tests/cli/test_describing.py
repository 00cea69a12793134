"""What the command line says of itself and of what there is: help, lists, descriptions, and what it imports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import typer
from rich.console import Console

from fedbench import __version__
from fedbench.cli.app import app
from fedbench.core.scenario import Scenario
from fedbench.core.spec import Training
from fedbench.kinds.registry import method_names
from fedbench.plugins import description
from fedbench.plugins.description import Descriptions
from fedbench.suites.resolve import RUN_KEYS

HEAVY = ("torch", "mlflow", "pandas", "pydantic", "numpy", "optuna", "open_clip", "yaml")


def test_a_process_of_its_own_ends_with_the_exit_code_and_all_it_has_said(tmp_path: Path) -> None:
    # torch is imported by then, and what is left in the pipe's buffer has to get out although the process just ends
    code = "import sys; sys.argv = ['fedbench', *sys.argv[1:]]; from fedbench.cli.app import command; command()"
    for arguments, status, said in (
        (["describe", "fedprxo"], 2, "did you mean 'fedprox'"),
        (["list"], 0, "fedprox"),
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == status
        assert said in " ".join((done.stdout + done.stderr).split())


def imported_by(code: str, *heavy: str) -> tuple[str, list[str]]:
    """What ``code`` prints in a process of its own, and which of ``heavy`` it has imported."""
    code = f"import sys\ntry:\n {code}\nfinally:\n sys.stderr.write(' '.join(m for m in {heavy!r} if m in sys.modules))"
    writing = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=writing)
    return done.stdout, done.stderr.split()


def command(*arguments: str) -> str:
    return f"sys.argv[1:] = {arguments!r}; from fedbench.cli.app import main; main()"


def test_importing_the_command_line_imports_nothing_heavy() -> None:
    assert imported_by("import fedbench.cli.app", *HEAVY)[1] == []


@pytest.mark.parametrize("arguments", [["list"], ["list", "suites"], ["--help"]], ids=" ".join)
def test_names_are_listed_without_importing_torch(arguments: list[str]) -> None:
    assert imported_by(command(*arguments), "torch")[1] == []


def test_describing_a_method_imports_torch_and_no_other_heavy_library() -> None:
    heavy = ("open_clip", "torchvision", "transformers", "mlflow", "optuna", "sklearn", "pandas", "scipy")
    code = "from fedbench.kinds.registry import find_method, method_names; list(map(find_method, method_names()))"
    assert imported_by(code, *heavy)[1] == []


def test_methods_are_described_without_torch_once_they_have_been() -> None:
    first, _ = imported_by(command("describe", "fedprox"), "torch")
    assert imported_by(command("describe", "fedprox"), "torch") == (first, [])
    assert imported_by(command("list", "methods"), "torch")[1] == []


def test_descriptions_are_kept_as_they_are_until_sources_change_or_the_file_is_damaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    kept = tmp_path / "__pycache__" / "methods-1.json"
    monkeypatch.setattr(description, "_place", lambda: kept)
    made = {name: Descriptions().of(name) for name in method_names()}
    assert {name: Descriptions().of(name) for name in made} == made
    assert set(json.loads(kept.read_text())) == set(made)
    for damaged in ("", "{", "[]", '{"fedprox": {"name": 1}}'):
        kept.write_text(damaged)
        assert Descriptions().of("fedprox") == made["fedprox"]
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    kept.unlink()
    assert Descriptions().of("fedprox") == made["fedprox"] and not kept.exists()


def test_descriptions_are_those_of_the_sources_and_entry_points_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    before = description._place()
    assert description._place() == before
    monkeypatch.setattr(description, "installed", lambda kind: ())
    assert description._place() != before
    monkeypatch.undo()
    monkeypatch.setattr(description, "files_under", lambda root: [("x.py", Path(__file__))])
    assert description._place() != before


def test_help_names_every_verb_and_version_is_the_package_version(fedbench) -> None:
    shown = fedbench("--help").out
    for one in app.registered_commands:
        of_verb = " ".join(fedbench(one.name, "--help").out.split())
        assert one.name in shown and f"Example: fedbench {one.name}" in of_verb
    assert "Example: fedbench scenario show" in fedbench("scenario", "show", "--help").out
    assert fedbench("--version").out == f"fedbench {__version__}\n"


def test_no_option_is_called_like_its_placeholder() -> None:
    # typer 0.27 then takes the placeholder for the name: --METHOD instead of --method
    groups = [app, *(group.typer_instance for group in app.registered_groups)]
    for one in [one for group in groups for one in group.registered_commands]:
        for name, hint in typing.get_type_hints(one.callback, include_extras=True).items():
            for option in getattr(hint, "__metadata__", ()):
                # within Annotated the first name stands in the default's place
                is_unnamed = isinstance(option, typer.models.OptionInfo) and option.default is ...
                assert not is_unnamed or (option.metavar or "").lower() != name, f"{one.name} --{name}"


def test_list_shows_every_kind(fedbench) -> None:
    shown = fedbench("list").out
    assert [line.partition(":")[0] for line in shown.splitlines()[:8]] == [
        *("methods", "datasets", "scenarios", "partitions", "backbones", "text-encoders", "metrics", "suites")
    ]
    methods = fedbench("list", "methods").out
    assert "MLSys 2020" in methods
    assert "loss_terms" in methods
    assert "IF 100" in fedbench("list", "scenarios").out


def test_list_shows_every_setting_with_its_default(fedbench) -> None:
    lines = [line.split() for line in fedbench("list", "settings").out.splitlines() if line[:1].strip()]
    shown = {name: rest[:2] for name, *rest in lines}
    assert shown["participation"] == ["scenario", "1.0"] and shown["local_epochs"] == ["training", "1"]
    sections = (RUN_KEYS, Scenario.model_fields, Training.model_fields)
    assert {*shown} >= {name for names in sections for name in names}


def test_describe_shows_equations_ranges_and_recipe_unmangled(fedbench) -> None:
    prox = fedbench("describe", "fedprox").out
    assert "(mu/2) ||w - w^t||^2" in prox
    assert "0.0001 to 1 (log)" in prox
    clip = fedbench("describe", "fedclip").out
    assert "L = ½ [CE(Z, targets) + CE(Zᵀ, targets)]" in clip
    assert "lr=5e-05" in clip


MINE = '''"""Mine: three equations, unindented as a newcomer writes them.

w_k ← w_t − η ∇F_k(w_t) + λ (w_t − w_{t−1})  (1)
w_{t+1} ← Σ_k p_k w_k,   p_k = n_k / Σ_j n_j  (2)
c_{t+1} ← c_t + (1/N) Σ_k (c_k⁺ − c_k) [mean] (3)
"""
from dataclasses import dataclass
from fedbench.core.method.hooks import hookimpl

@dataclass(frozen=True)
class Params: ...

class Mine:
    name, citation, Params, recipe = "mine", "Me, 2026", Params, {}
    def __init__(self, params): ...
    @hookimpl
    def loss_terms(self, step):
        """Nothing yet."""
'''


@pytest.mark.parametrize("columns", [None, 70])
def test_describe_keeps_the_lines_of_equations(
    fedbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int | None
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    if columns is not None:
        terminal = Console(file=sys.stdout, force_terminal=True, color_system=None, width=columns)
        monkeypatch.setattr("fedbench.cli.commands.describing.console", lambda: terminal)
    lines = fedbench("describe", "mine", "--plugin", "mine.py").out.splitlines()
    written = MINE.partition('"""')[2].partition('"""')[0].splitlines()
    assert [line.rstrip() for line in lines if line.rstrip() in written and line.strip()] == [w for w in written if w]


def test_describe_names_the_range_that_tuning_searches_where_it_is_narrower(fedbench) -> None:
    out = fedbench("describe", "clip2fl").out
    assert "1 to 1000 (log), tuned 2 to 50" in out
    assert "0.1 to 10 (log)  " in out


def test_describe_a_stack_says_who_answers_which_hook(fedbench) -> None:
    lines = fedbench("describe", "fedclip+fedprox").out.splitlines()
    answers = {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in lines if len(line.split()) > 1}
    assert answers["local_loss"] == "fedclip, fedavg"
    assert answers["loss_terms"] == "fedprox"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("imagefolder:OfficeHomeDataset_10072016", ["data set", "Office-Home, 65 classes", "Art, Clipart, Product"]),
        ("unsupervised", ["suite unsupervised", "180 runs", "scenario unsupervised", "hidden"]),
        ("capt", ["suite capt", "scale paper", "Hou et al.", "class_loss"]),
        ("clip:ViT-B-32-quickgelu@openai", ["backbone", "224 x 224", "download it from"]),
        ("resnet8?width=1", ["ResNet-8", "width"]),
    ],
)
def test_suites_scenarios_data_sets_and_backbones_have_cards(fedbench, name: str, says: list[str]) -> None:
    shown = fedbench("describe", name)
    assert shown.code == 0
    assert [text for text in says if text not in " ".join(shown.out.split())] == []
