"""Time that passes only when nothing else is left to do: minutes of waiting cost nothing, and no clock decides a test."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        look, self._selector.select = self._selector.select, self._jump
        self._look = look

    def time(self) -> float:
        return self.now

    def _jump(self, timeout: float | None = None) -> Any:
        events = self._look(0)
        if not events and timeout is None:
            raise RuntimeError("everything waits, and nothing will ever happen")
        self.now += 0 if events else timeout or 0
        return events


def virtually(work: Coroutine[Any, Any, Any]) -> Any:
    """What ``work`` gives, on a loop with a clock of its own."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
