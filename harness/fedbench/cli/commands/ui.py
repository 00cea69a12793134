"""``fedbench ui``: MLflow's own web interface on the store."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Annotated

import typer

from fedbench.cli.console import say
from fedbench.cli.options import Store
from fedbench.core.errors import FedbenchError

_HOST = "127.0.0.1"
"""This machine alone."""
_PATIENCE = 10.0
"""Seconds the server has to end by itself."""


def ui(
    store: Store = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on this machine.")] = 5000,
) -> None:
    """Browse all runs in MLflow's web interface.

    Curves, parameters and artifacts of everything in the store. Ctrl-C ends it.
    """
    from fedbench.tracking.databases import shown
    from fedbench.tracking.schema import store_uri
    from fedbench.tracking.store import latest_page, ui_command

    uri = store_uri(store)
    # whatever MLFLOW_HOST says: nobody logs in to the interface, and it can delete runs
    command = [*ui_command(uri), "--host", _HOST, "--port", str(port)]
    address = f"http://{_HOST}:{port}"
    say(f"{shown(uri)} at {address}, Ctrl-C ends it")
    latest = latest_page(uri)
    if latest is not None:
        suite, page = latest
        say(f"the runs of the suite {suite}: {address}{page}")
    # in a process group of its own, Ctrl-C doesn't reach the server half-way through its imports
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, signal.default_int_handler)
    try:
        code = server.wait()
    except KeyboardInterrupt:
        _end(server)
        return
    if code:
        raise FedbenchError(f"the MLflow UI ended with exit code {code}; is port {port} taken? Try --port {port + 1}.")


def _end(server: subprocess.Popen[bytes]) -> None:
    """End the server with all its workers."""
    os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
