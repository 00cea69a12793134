"""`fedbench new method`: a package whose own tests pass as written."""

import subprocess
import sys
from pathlib import Path


def test_its_package_installs_and_its_tests_pass_as_written(fedbench, tmp_path, monkeypatch):
    code, out, _ = fedbench("new", "method", "fed-mine")
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


def test_its_readme_runs_the_method_without_installing_it(fedbench, tmp_path, monkeypatch):
    fedbench("new", "method", "fed-mine")
    monkeypatch.chdir("fed-mine")
    lines = [line for line in Path("README.md").read_text("utf-8").splitlines() if "--plugin" in line]
    assert lines[0] == "$ fedbench check fed-mine --plugin fed_mine.py" and len(lines) == 2
    code, out, err = fedbench(*lines[1].split()[2:], "--dry-run")
    assert code == 0, err
    assert "fed-mine" in out
