"""Keep what a backend throws inside the rows that it concerns."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from ..events import Bursts, Elementwise, Event, Failure


def guarded(run: Elementwise) -> Elementwise:
    """An exception of the backend becomes the failure of the rows that it had not finished."""

    async def guarded_run(rows: Sequence[Any]) -> Bursts:
        ended: set[int] = set()
        try:
            async with aclosing(run(rows)) as bursts:
                async for burst in bursts:
                    for row, _, done in burst:
                        if done:
                            ended.add(row)
                    yield burst
        except Exception as error:
            yield [Event(row, Failure(error)) for row in range(len(rows)) if row not in ended]

    return guarded_run
