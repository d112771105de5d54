"""Fewer collections of garbage while a big call runs: each looks at thousands of live objects, and finds nothing."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

BIG = 256  # rows from which on a call counts
ROOM = 20_000  # objects made between two collections meanwhile; Python's own figure is 700


class Thrift:
    """The calls that want few collections, and the setting to go back to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls, self._before = 0, 0

    def begin(self) -> None:
        """Collect seldom. A user's own setting is left alone if it is as generous, or off."""
        with self._lock:
            if not self._calls:
                self._before, *others = gc.get_threshold()
                if 0 < self._before < ROOM:
                    gc.set_threshold(ROOM, *others)
            self._calls += 1

    def end(self) -> None:
        """Collect as before once the last call has ended, unless somebody has changed the setting meanwhile."""
        with self._lock:
            self._calls -= 1
            now, *others = gc.get_threshold()
            if not self._calls and now == ROOM:
                gc.set_threshold(self._before, *others)


THRIFT = Thrift()


@contextmanager
def seldom(rows: int) -> Iterator[None]:
    """Collect garbage seldom for the length of a call of many ``rows``."""
    if rows < BIG:
        yield
        return
    THRIFT.begin()
    try:
        yield
    finally:
        THRIFT.end()
