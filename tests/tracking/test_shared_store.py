"""Several processes on one store, one cache and one suite: nobody's work is repeated, nobody's is damaged."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

from fedbench.runs.engines.claims import Claims, work_folder
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import parse_suite
from fedbench.tracking.schema import INVOCATION, KIND
from fedbench.tracking.store import filed, open_store
from fedbench.tuning.storage import open_storage
from fedbench.tuning.studies import counted, studies_named

COMMAND = [sys.executable, "-c", "from fedbench.cli.app import command; command()"]
SUITE = """
name: shared
dataset: "embedded?train=240&test=40"
scenario: {preset: iid, clients: 4, participation: 0.5}
training: {rounds: 40}
seeds: [0, 1]
rows: [{method: fedavg}, {method: promptfl}, {method: fedprox}]
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "suite.yaml").write_text(SUITE)
    return tmp_path


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [*COMMAND, *arguments, "--cache-dir", "cache", "--checkpoint-every", "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def stored(uri: str) -> tuple[list[object], list[object]]:
    """The runs, and the parents of commands."""
    client = open_store(uri, create=False)
    assert isinstance(client, MlflowClient)
    found = [run for _, run in filed(client, "shared")]
    parents = [run for run in found if run.data.tags.get(KIND) == INVOCATION]
    return [run for run in found if run not in parents], parents


def check_two_at_once(folder: Path, uri: str, *arguments: str) -> None:
    """Two commands for the same suite, begun together: each run is carried out once, by one of them."""
    both = [start(folder, "run", "--suite", "suite.yaml", "--jobs", "1", *arguments) for _ in range(2)]
    ended = [(*process.communicate(timeout=300), process.returncode) for process in both]
    assert [code for _, _, code in ended] == [0, 0], ended
    runs, parents = stored(uri)
    assert Counter(run.info.status for run in runs) == {"FINISHED": 6}
    assert len({run.data.tags["fedbench.run_id"] for run in runs}) == 6
    assert {run.info.status for run in parents} == {"FINISHED"} and 1 <= len(parents) <= 2
    for out, _, _ in ended:  # both end with the whole table
        assert " promptfl " in out and " fedprox " in out
    finished = [out.count("done  ") for out, _, _ in ended]
    assert sum(finished) == 6 and min(finished) > 0, finished


@pytest.mark.slow
def test_two_commands_at_once_share_the_work(folder):
    check_two_at_once(folder, f"sqlite:///{folder}/fedbench-store/mlflow.db")


@pytest.mark.slow
def test_what_a_killed_command_left_is_marked_and_gone_on_with(folder):
    uri = f"sqlite:///{folder}/fedbench-store/mlflow.db"
    arguments = ("run", "--suite", "suite.yaml", "--method", "promptfl", "--jobs", "2", "--set", "rounds=1000")
    first = start(folder, *arguments)
    for line in first.stdout:
        # runs are stored once they have taken five seconds
        if line.startswith("round") and int(line.partition("/1000 ")[0].split()[-1]) >= 600:
            break
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    runs, parents = stored(uri)
    assert [run.info.status for run in [*runs, *parents]] == ["RUNNING"] * 3
    out, err = start(folder, *arguments).communicate(timeout=300)
    assert out.count(": goes on from its checkpoint after round ") == 2, out + err
    runs, parents = stored(uri)
    assert Counter(run.info.status for run in runs) == {"FINISHED": 2, "KILLED": 2}
    assert Counter(run.info.status for run in parents) == {"FINISHED": 1, "KILLED": 1}
    client = open_store(uri, create=False)
    for run in runs:
        if run.info.status == "FINISHED":
            assert int(run.data.tags["fedbench.resumed_round"]) >= 20
            history = client.get_metric_history(run.info.run_id, "global_accuracy")
            assert [metric.step for metric in history] == list(range(1001))
    work = work_folder(uri, "shared", folder / "cache")
    assert list((work / "checkpoints").iterdir()) == []


def test_a_claim_is_taken_once_and_freed_with_its_process(tmp_path):
    (spec, other) = expand(parse_suite(SUITE, "shared"), Overrides(methods=("fedavg",)))
    finished: set[str] = set()
    one, two = (Claims(tmp_path, lambda spec: spec.run_id in finished) for _ in range(2))
    assert one.shared_by == two.shared_by
    assert one.take(spec) == "ours" and one.take(spec) == "ours"
    assert two.take(spec) == "elsewhere" and two.take(other) == "ours"
    one.release(spec.run_id)
    assert two.take(spec) == "ours"
    finished.add(spec.run_id)
    two.close()
    assert one.take(spec) == "finished" and one.take(other) == "ours"
    script = (
        "import sys, time; from pathlib import Path; from fedbench.runs.engines.claims import Claims\n"
        f"claims = Claims(Path({str(tmp_path)!r}), bool); print(claims.hold('third'), flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "True\n" and not one.hold("third")
    holder.kill()
    holder.wait()
    assert one.hold("third")


def test_an_identity_that_a_full_disk_left_empty_is_given_anew(tmp_path):
    (tmp_path / "id").touch()
    one, two = Claims(tmp_path, bool), Claims(tmp_path, bool)
    assert one.shared_by == two.shared_by != ""


@pytest.mark.parametrize("suite", ["longtail", "../../etc", "a b", "..", "é/ü"])
def test_the_folder_of_unfinished_runs_lies_beside_the_store_or_in_the_cache(tmp_path, suite):
    beside = work_folder(f"sqlite:///{tmp_path}/store/mlflow.db", suite, tmp_path / "cache")
    remote = work_folder("http://host:5000", suite, tmp_path / "cache")
    assert beside.parent == tmp_path / "store" / "unfinished" and beside.name not in ("", ".", "..")
    assert remote.parents[2] == tmp_path / "cache" / "stores"
    assert remote != work_folder("http://other:5000", suite, tmp_path / "cache")
    assert beside != work_folder(f"sqlite:///{tmp_path}/store/mlflow.db", suite + "-", tmp_path / "cache")


def _programs() -> Path | None:
    """The folder of PostgreSQL's programs."""
    on_path = shutil.which("initdb")
    found = [Path(on_path).resolve().parent] if on_path else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return next((folder for folder in reversed(found) if (folder / "initdb").exists()), None)


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The URI of a database on loopback, on a server of its own that is gone afterwards."""
    pytest.importorskip("psycopg2", reason="needs psycopg2: pip install psycopg2-binary")
    programs = _programs()
    if programs is None:
        pytest.skip("no PostgreSQL on this machine (Debian: apt-get install postgresql)")
    # the server refuses to run as root
    user = {"user": "postgres", "group": "postgres"} if os.getuid() == 0 else {}
    folder = Path(tempfile.mkdtemp())
    if user:
        shutil.chown(folder, **user)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = str(folder / "data")
    subprocess.run(
        [programs / "initdb", "-D", data, "-U", "fedbench", "-A", "trust", "--no-sync"],
        check=True, stdout=subprocess.DEVNULL, cwd=folder, **user,
    )  # fmt: skip
    options = ["-D", data, "-h", "127.0.0.1", "-p", str(port), "-k", str(folder), "-F"]
    server = subprocess.Popen([programs / "postgres", *options], stderr=subprocess.DEVNULL, cwd=folder, **user)
    try:
        for _ in range(100):
            if subprocess.run([programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]).returncode == 0:
                break
            time.sleep(0.2)
        for name in ("runs", "studies"):
            made = [programs / "createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "fedbench", name]
            subprocess.run(made, check=True, **user)
        yield f"postgresql://fedbench@127.0.0.1:{port}/runs"
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(20)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.slow
def test_two_commands_share_a_postgresql_database_and_its_studies(folder, postgres):
    check_two_at_once(folder, postgres, "--store", postgres)
    tune = ("tune", "--suite", "suite.yaml", "--method", "fedprox", "--trials", "6", "--set", "rounds=3")
    refused = subprocess.run(
        [*COMMAND, *tune, "--store", postgres, "--storage", postgres], cwd=folder, capture_output=True, text=True
    )
    assert refused.returncode == 2 and "give studies one of their own" in refused.stderr
    tune += ("--jobs", "1", "--store", postgres, "--storage", postgres.replace("/runs", "/studies"))
    both = [subprocess.Popen([*COMMAND, *tune, "--cache-dir", "cache"], cwd=folder, text=True, stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT) for _ in range(2)]  # fmt: skip
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    (study,) = studies_named(open_storage(postgres.replace("/runs", "/studies"), create=False))
    assert len(counted(study)) == 6 and len({str(trial.params) for trial in counted(study)}) == 6
    assert (
        "fedprox"
        in subprocess.run(
            [*COMMAND, "leaderboard", "--suite", "shared", "--store", postgres],
            cwd=folder,
            text=True,
            capture_output=True,
        ).stdout
    )


@pytest.mark.slow
def test_two_commands_share_a_tracking_server_on_postgresql(folder, postgres):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    serve += ["--backend-store-uri", postgres, "--artifacts-destination", str(folder / "artifacts")]
    server = subprocess.Popen(serve, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0)
    uri = f"http://127.0.0.1:{port}"
    try:
        for _ in range(240):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.5)
        suite = folder / "suite.yaml"
        suite.write_text(suite.read_text().replace("seeds: [0, 1]", "seeds: [4, 5]"))
        check_two_at_once_on_server(folder, uri)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def check_two_at_once_on_server(folder: Path, uri: str) -> None:
    """As on a file, in a store that has other runs of the suite already."""
    before = {run.info.run_id for run in stored(uri)[0]}
    both = [start(folder, "run", "--suite", "suite.yaml", "--jobs", "1", "--store", uri) for _ in range(2)]
    ended = [(*process.communicate(timeout=400), process.returncode) for process in both]
    assert [code for _, _, code in ended] == [0, 0], ended
    runs = [run for run in stored(uri)[0] if run.info.run_id not in before]
    assert Counter(run.info.status for run in runs) == {"FINISHED": 6}
    assert len({run.data.tags["fedbench.run_id"] for run in runs}) == 6
