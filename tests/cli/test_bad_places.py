"""Folders, addresses, devices and streams that cannot be used: one sentence, and nothing is left behind."""

from __future__ import annotations

import io
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import fedbench.runs.prepare
from fedbench.core.errors import FedbenchError
from fedbench.core.files import usable_folder
from fedbench.core.method.base import NoParams
from fedbench.datasets import load_dataset
from fedbench.datasets.classnames import read_words
from fedbench.models import image_size_of, load_backbone
from fedbench.models.text.vectors import text_vectors
from fedbench.scenarios.partitions.existing import FromTable
from fedbench.scenarios.partitions.hierarchy import Pachinko, PachinkoParams
from fedbench.tracking import databases as masking
from fedbench.tracking import store
from fedbench.tracking.databases import check_server, checked_uri, masked, shown
from fedbench.tracking.schema import store_uri
from fedbench.tracking.store import open_store
from fedbench.tuning.storage import open_storage, storage_url
from fedbench.workflow import execution
from fedbench.workflow.console import OutputLost, complain, guard_output, say

SECRETS = ("hush-token", "hush-pass")
DATA = ("--scenario", "iid", "--set", "dataset=embedded?train=200&test=40", "clients=2", "--cache-dir", "cache")
pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.mark.parametrize("folder", ["~nobodyx/y", "x" * 300, "a/" + "é" * 200])
def test_a_folder_that_cannot_be_is_refused(folder: str) -> None:
    with pytest.raises(FedbenchError, match="^--output "):
        usable_folder(folder, "--output")
    with pytest.raises(FedbenchError, match="^--store "):
        store_uri(folder)
    with pytest.raises(FedbenchError, match="^--storage "):
        storage_url(f"{folder}/studies.db", "sqlite:///x/mlflow.db")


@pytest.mark.parametrize("path", ["~nobodyx/y", "x" * 300])
def test_data_and_weights_at_a_path_that_cannot_be_are_refused(path: str) -> None:
    here = Path()
    for form in ("imagefolder:{}", "hf:{}", "csv:{}", "listfile:{}", "leaf:{}"):
        with pytest.raises(FedbenchError, match="cannot be looked up: "):
            load_dataset(form.format(path), data_dir=here, cache_dir=here / "cache")
    of_weights = ("clip:ViT-B-32@{}.pt", "clip:local-dir:{}", "timm:resnet18@{}.pth", "resnet18?weights={}.pth")
    for form in of_weights:
        with pytest.raises(FedbenchError, match="cannot be looked up: "):
            load_backbone(form.format(path), data_dir=here, seed=0)
    assert image_size_of(f"clip:local-dir:{path}") is None
    with pytest.raises(FedbenchError, match="cannot be looked up: "):
        text_vectors(f"glove:{path}", ("cat",), ("{}",), 0)
    for partition, location in ((FromTable(NoParams()), path), (Pachinko(PachinkoParams(coarse=path)), "")):
        with pytest.raises(FedbenchError, match="cannot be looked up: "):
            partition.digest(location)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"])
def test_a_database_in_memory_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FedbenchError, match="--store '.*' is a database in memory"):
        store_uri(url)
    with pytest.raises(FedbenchError, match="--storage '.*' is a database in memory"):
        storage_url(url, "sqlite:///x/mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
    with pytest.raises(FedbenchError, match="MLFLOW_TRACKING_URI '.*' is a database in memory"):
        store_uri(None)


def test_options_of_a_sqlite_database_are_refused() -> None:
    with pytest.raises(FedbenchError, match=r"--store 'sqlite:///runs.db\?timeout=9': .* takes no options here"):
        store_uri("sqlite:///runs.db?timeout=9")


def test_devices_that_hold_no_values_or_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("meta", "meta:0", "xla"):
        with pytest.raises(FedbenchError, match=f"device '{name}' is none that runs train on; use cpu, cuda"):
            fedbench.runs.prepare._device(name)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert fedbench.runs.prepare._device("cuda:0").index == 0
    with pytest.raises(FedbenchError, match="device 'cuda:1' is not available: torch sees 1 device"):
        fedbench.runs.prepare._device("cuda:1")


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a":' * 100_000, '{"a": "\\ud800"}', '["\\udfff", "dog"]', '{"\\ud800": "cat"}'],
)
def test_class_names_nested_without_end_or_of_half_characters_are_refused(text: str) -> None:
    with pytest.raises(FedbenchError, match=r"class names in 'classnames.json' .*it must hold") as caught:
        read_words("classnames.json", text.encode(), ["a", "b"])
    str(caught.value).encode()


def test_an_engine_that_is_not_there_leaves_no_store(fedbench, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise FedbenchError("Ray is not installed; pip install 'fedbench-harness[ray]'.")

    monkeypatch.setattr("fedbench.runs.engines.ray.RayCluster", missing)
    ended = fedbench("run", "--method", "clip-zs", "--engine", "ray", *DATA)
    assert ended.code == 2 and "Ray is not installed" in ended.said
    assert not Path("fedbench-store").exists()


def test_an_engine_is_closed_where_its_store_cannot_be_opened(fedbench, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    monkeypatch.setattr(execution, "engine_of", lambda *_: SimpleNamespace(close=lambda: closed.append(True)))
    monkeypatch.setattr(execution, "Tracking", lambda *_, **__: (_ for _ in ()).throw(FedbenchError("no store")))
    assert fedbench("run", "--method", "clip-zs", *DATA).code == 2 and closed == [True]


def test_a_deleted_working_directory_is_told(fedbench, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    ended = fedbench("list", "suites")
    assert ended.code == 2 and "the working directory can't be read" in ended.said


# --- what is written to


def test_characters_that_stdout_cannot_write_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), "ascii"))
    guard_output()
    say("Δ fedavg · 1.0 ± 0.1")
    assert raw.getvalue() == b"? fedavg ? 1.0 ? 0.1\n"


def test_a_full_stdout_is_told_and_a_full_stderr_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):
        full = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - the stream that is set holds and closes it
        monkeypatch.setattr(sys, name, io.TextIOWrapper(full))
    guard_output()
    complain("lost")
    with pytest.raises(OutputLost, match="No space left"):
        say("text")
    monkeypatch.undo()


COMMAND = "from fedbench.cli.app import command; import sys; sys.argv = ['fedbench', {}]; command()"


@pytest.mark.parametrize(
    ("shell", "told"),
    [
        (">/dev/full", "No space left on device"),
        (">&-", "stdout is closed"),
        ("| true", "Broken pipe"),
    ],
)
def test_a_command_whose_output_is_lost_ends_with_a_code_of_its_own(shell: str, told: str) -> None:
    code = COMMAND.format("'describe', 'fedavg'") if shell == "| true" else COMMAND.format("'--version'")
    script = f'set -o pipefail; "$0" -c "$1" {shell}'
    done = subprocess.run(["bash", "-c", script, sys.executable, code], capture_output=True, text=True)
    assert done.returncode == 74, done.stderr
    assert done.stderr.count("error:") == 1 and told in done.stderr and "Traceback" not in done.stderr
    assert "stored" not in done.stderr  # nothing is, by these commands


# --- what is secret


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("url: /?token=abc&x=1 (Caused", "url: /?token=***&x=1 (Caused"),
        ("postgresql://me:pa%40ss@host/db", "postgresql://me:***@host/db"),
        ("x?sslpassword=a&api_key=b&sig=c", "x?sslpassword=***&api_key=***&sig=***"),
        ("http://host:5000/path?page=2", "http://host:5000/path?page=2"),
        ("git+https://ghp_16C7e42F@github.com/a/b.git@main", "git+https://***@github.com/a/b.git@main"),
        ("HTTPS://ghp_16C7e42F:x-oauth-basic@host:443/", "HTTPS://***@host:443/"),
        ("https://me@corp.com:s3cretpw@host/x", "https://***@host/x"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("https://host/a/b@main, me@host", "https://host/a/b@main, me@host"),
    ],
)
def test_secrets_of_addresses_are_masked(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_a_secret_of_any_characters_is_masked_once_its_address_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", set())
    checked_uri("http://me:it's%20hush@h:9?token=ab)cd'e", "--store")
    assert masked("to http://me:it's%20hush@h: it's hush, ab)cd'e") == "to http://***@h: ***, ***"


def test_a_token_with_padding_is_masked_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masking, "_known", set())
    checked_uri("http://host:9?token=YWJjZGVm==", "--store")
    assert masked("sent YWJjZGVm==") == "sent ***"


def test_a_token_alone_before_the_host_is_masked_and_the_name_of_a_user_is_no_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(masking, "_known", set())
    token = "0123456789abcdef"
    for uri in (f"https://{token}@host/", "https://mlflow@host/", "postgresql://a-rather-long-user-name@host/db"):
        checked_uri(uri, "--store")
    assert shown(f"https://{token}@host/runs") == "https://***@host/runs"
    text = "mlflow has no runs of a-rather-long-user-name"
    assert masked(f"{text}; Authorization: {token}") == f"{text}; Authorization: ***"


def test_nothing_that_a_client_library_says_of_a_store_out_of_reach_has_a_secret(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    uri = f"http://me:{SECRETS[1]}@127.0.0.1:9/?token={SECRETS[0]}"
    with pytest.raises(FedbenchError) as caught:
        check_server(uri)
    assert not any(secret in str(caught.value) for secret in SECRETS)
    # as of one that dies behind the check
    monkeypatch.setattr(store, "check_server", lambda uri: None)
    with pytest.raises(FedbenchError) as caught:
        open_store(uri, create=True)
    out, err = capfd.readouterr()
    for secret in SECRETS:
        assert secret not in f"{out}{err}{caplog.text}{caught.value}"
    assert "urllib3" in caplog.text and "token=***" in caplog.text
    with pytest.raises(FedbenchError) as caught:
        open_storage(f"postgresql://me:{SECRETS[1]}@127.0.0.1:9/x?sslpassword={SECRETS[0]}", create=True)
    assert not any(secret in str(caught.value) for secret in SECRETS)
    with pytest.raises(FedbenchError, match=r"token=\*\*\*"):
        storage_url(None, uri)


def test_a_server_that_listens_and_says_nothing_is_told_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(FedbenchError, match="within 4 s"):
            check_server(f"http://127.0.0.1:{silent.getsockname()[1]}")
    assert time.monotonic() - began < 10


def test_warnings_and_tracebacks_of_any_library_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    address = "http://host/?token=hush-token"
    try:
        raise OSError(address)
    except OSError:
        logging.getLogger("somebody").exception("no answer from %s", address)
    shown = warnings.formatwarning(f"retrying {address}", UserWarning, "a.py", 1)
    assert "hush-token" not in caplog.text + shown
    assert caplog.text.count("token=***") == 2 and "token=***" in shown
