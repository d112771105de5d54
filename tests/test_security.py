"""SECURITY.md: every promise names tests that exist; and those that have no better place."""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import outlines_like as ol

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([SCRLPX]\d+) \| (.+?) \| (.+?) \|$", re.MULTILINE)
COUNTS = {"S": 13, "C": 8, "R": 6, "L": 5, "P": 6, "X": 8}


def rows() -> dict[str, str]:
    """What stands in the table, by the name of the row."""
    return {name: tests for name, _, tests in ROW.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8"))}


def test_every_promise_names_tests_that_exist() -> None:
    assert sorted(rows()) == sorted(f"{letter}{k}" for letter, n in COUNTS.items() for k in range(1, n + 1))
    for name, tests in rows().items():
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert named or tests == "none yet", name
        for file, test in named:
            assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{name}: {file}::{test}"


def test_dependencies_are_few_and_have_floors() -> None:
    """X7: at most six at run time, each not older than its last security fix."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = config["options"]["install_requires"].split()
    assert len(needed) <= 6
    assert all(">=" in one for one in needed), needed


PLACES = ["file:///etc/passwd", "/etc/passwd", "http://169.254.169.254/latest/meta-data", "//host/share", "data:text/html,x"]
PLACES += [
    "~/.ssh/id_rsa",
    "gopher://127.0.0.1:9/",
    "jar:http://x!/y",
    "\\\\host\\share",
    "http://localhost:1/",
    "../../secret",
]


TELLING = ("open", "socket.connect", "socket.getaddrinfo", "urllib.Request", "subprocess.Popen")


@pytest.fixture(scope="module")
def ear() -> Iterator[list[str]]:
    """What this process opens or calls, once something stands in it. The hook can't be taken out again, so there is one."""
    heard: list[str] = []

    def hook(event: str, args: Any) -> None:
        if heard and event in TELLING:
            heard.append(f"{event} {args[:2]}")

    sys.addaudithook(hook)
    yield heard
    heard.clear()


@pytest.mark.parametrize("place", PLACES)
def test_no_text_is_taken_for_a_place_to_read_from(place: str, ear: list[str]) -> None:
    """X6: not as a prompt, nor in a message, nor as an image: a file has to be a Path."""
    with ol.cache.disabled():
        model, chat = ol.models.fake(), ol.models.fake(lambda request: "seen", chat=True)
        assert model(place) == place.upper()  # what is imported late is imported
        ear.append("from here on")
        model([place, "b"])
        chat([[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": place}}]}]])
        with suppress(TypeError, ValueError):  # refused
            str(chat + ol.user("What is this? ", ol.image(place)) + ol.assistant(ol.gen("x")))
        heard = ear[1:]
        ear.clear()
    assert [one for one in heard if place.strip("/.~\\") in one or one.startswith(("socket", "urllib", "subprocess"))] == []
