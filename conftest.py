"""What all tests share: a store of their own, and the fixtures of the rooms."""

import importlib.util

import pytest

pytest_plugins = [name for name in ("tests.local_fixtures", "tests.remote_fixtures") if importlib.util.find_spec(name)]


@pytest.fixture(autouse=True)
def store_folder(tmp_path, monkeypatch):
    """Every test keeps its answers in a folder of its own."""
    monkeypatch.setenv("OUTLINES_LIKE_CACHE", str(tmp_path / "answers"))
    return tmp_path / "answers"
