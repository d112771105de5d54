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
