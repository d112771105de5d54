"""What all tests share: a store of their own, and the fixtures of the rooms."""

import gc
import importlib.util
import os
import signal
import sys

import pytest

from outlines_like import bridge

pytest_plugins = [name for name in ("tests.local_fixtures", "tests.remote_fixtures") if importlib.util.find_spec(name)]

sys.modules["uvloop"] = None  # here everything runs on asyncio's own loop; the tests' scripts run on uvloop
for name in ("COLUMNS", "FORCE_COLOR", "TTY_COMPATIBLE"):  # what is shown does not hang on whose terminal it is
    os.environ.pop(name, None)
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started us with Ctrl-C ignored


@pytest.fixture(autouse=True)
def store_folder(tmp_path, monkeypatch):
    """Every test keeps its answers in a folder of its own."""
    folder = tmp_path / "answers"
    monkeypatch.setenv("OUTLINES_LIKE_CACHE", str(folder))
    yield folder
    if store := bridge.disown(("store", str(folder))):
        bridge.wait(store.aclose)


def pytest_collection_finish():
    """What the imports have made stays: no collection of garbage needs to look at it again."""
    gc.collect()
    gc.freeze()
