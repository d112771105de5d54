"""Servers on loopback for tests: one that replays recorded answers, and a real one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from .replay import Replay

READY = 120.0  # seconds for a real server to start


@pytest.fixture(scope="session")
def replay() -> Iterator[Replay]:
    """The replay server."""
    server = Replay()
    yield server
    server.close()


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A real server on this machine, ``transformers serve`` with SmolLM2: its base_url and the name of its model."""
    from outlines_like.models.boxes import smollm2

    model, port = str(smollm2()), free_port()
    log = tmp_path_factory.mktemp("serve") / "log.txt"
    program = Path(sys.executable).with_name("transformers")
    command = [program, "serve", model, "--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment) as server:
        try:
            wait_until_ready(server, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}/v1", model
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    """Ask after a server's health until it is well."""
    until = time.monotonic() + READY
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"the server did not start: {log.read_text('utf-8', 'replace')[-2000:]}")
