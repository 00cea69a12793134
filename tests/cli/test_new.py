"""`fedbench new method`: a package whose own tests pass as written."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedbench.cli.app import main


def new(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["fedbench", "new", "method", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    captured = capsys.readouterr()
    return ended.value.code, captured.out, captured.err


def test_its_package_installs_and_its_tests_pass_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, _ = new(monkeypatch, capsys, "fed-mine")
    assert code == 0
    assert 'next: cd fed-mine && pip install -e ".[test]" && pytest' in out
    package, site = tmp_path / "fed-mine", tmp_path / "site"
    assert sorted(str(f.relative_to(package)) for f in package.rglob("*") if f.is_file()) == [
        ".github/workflows/tests.yml",
        "README.md",
        "fed_mine.py",
        "pyproject.toml",
        "tests/test_fed_mine_contract.py",
        "tests/test_fed_mine_equations.py",
    ]
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(package)], check=True)
    monkeypatch.setenv("PYTHONPATH", str(site), prepend=":")
    # resuming, in a process of its own, is tried by the contract's tests
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not check_resume"]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "15 passed" in done.stdout
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--line-length=120", "--select=E,F,UP,B", "."]
    assert subprocess.run(ruff, cwd=package, check=False).returncode == 0


def test_its_readme_runs_the_method_without_installing_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    new(monkeypatch, capsys, "fed-mine")
    monkeypatch.chdir("fed-mine")
    lines = [line for line in Path("README.md").read_text("utf-8").splitlines() if "--plugin" in line]
    assert lines[0] == "$ fedbench check fed-mine --plugin fed_mine.py" and len(lines) == 2
    monkeypatch.setattr(sys, "argv", [*lines[1].split()[1:], "--dry-run"])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    assert "fed-mine" in said.out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["fedprox"], "'fedprox' is a method already"),
        (["a+b"], "cannot be a method's name"),
        (["3d"], "let it begin with a letter"),
        (["class"], "'class' is a word of the language"),
        (["torch"], "a module called 'torch', and Python has one here already"),
        (["Fedbench"], "a module called 'fedbench', and Python has one"),
        (["fedbench-methods"], "a module called 'fedbench_methods', and Python has one"),
        (["mine", "--folder", "full"], "is there already and not an empty folder"),
    ],
)
def test_what_can_be_no_new_method_is_refused_and_nothing_written(tmp_path, monkeypatch, capsys, words, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    code, _, err = new(monkeypatch, capsys, *words)
    assert code == 2
    assert text in " ".join(err.split())
    assert [f.name for f in tmp_path.rglob("*")] == ["full", "file"]
