"""SECURITY.md: every promise names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = re.compile(r"^\| ([SCRLPX]\d+) \| (.+?) \| (.+?) \|$", re.MULTILINE)
COUNTS = {"S": 13, "C": 8, "R": 6, "L": 5, "P": 6, "X": 8}


def rows() -> dict[str, str]:
    """What stands in the table, by the name of the row."""
    return {name: tests for name, _, tests in ROW.findall((ROOT / "SECURITY.md").read_text(encoding="utf-8"))}


def test_every_promise_names_tests_that_exist() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").glob("test_*.py"))
    assert sorted(rows()) == sorted(f"{letter}{k}" for letter, n in COUNTS.items() for k in range(1, n + 1))
    for name, cell in rows().items():
        named = re.findall(r"`(test_\w+)`", cell)
        assert named, name
        assert [test for test in named if f"def {test}(" not in tests] == [], name
