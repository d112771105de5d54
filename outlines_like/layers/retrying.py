"""Run failed rows again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from typing import Any

from ..checks import count
from ..errors import ModelError
from ..events import Burst, Bursts, Elementwise, Event, Failure, Layer, subset


def may_pass(error: Exception) -> bool:
    """Whether the same request may do better later."""
    return error.retryable if isinstance(error, ModelError) else isinstance(error, (ConnectionError, TimeoutError))


def backoff(attempt: int, errors: Collection[Exception]) -> float:
    """Seconds before the next try: what a server asked for, or full jitter under a ceiling that doubles.

    Source: M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.
    """
    asked = [error.retry_after for error in errors if isinstance(error, ModelError) and error.retry_after is not None]
    return max(asked) if asked else random.uniform(0, min(20.0, 0.5 * 2**attempt))


def retried(
    attempts: int = 5,
    *,
    on: type[Exception] | tuple[type[Exception], ...] | Callable[[Exception], bool] = may_pass,
    wait: Callable[[int, Collection[Exception]], float] = backoff,
) -> Layer:
    """Give rows whose failure may pass another go, ``attempts`` in all, unless they already spoke.

    ``on`` says which failures may pass: a type of errors, several, or a function of the error. By default they are those of
    a server or a connection that may do better next time. ``wait`` gives the seconds before a next try.
    """

    count("attempts", attempts)
    passes = (lambda error: isinstance(error, on)) if isinstance(on, (type, tuple)) else on

    def layer(run: Elementwise) -> Elementwise:
        async def retried_run(rows: Sequence[Any]) -> Bursts:
            todo: Sequence[int] = range(len(rows))
            spoken: set[int] = set()
            for attempt in range(1, attempts + 1):
                again: dict[int, Exception] = {}
                async with aclosing(subset(run, rows, todo) if attempt > 1 else run(rows)) as bursts:
                    async for burst in bursts:
                        if kept := burst if attempt == attempts else sift(burst, spoken, again, passes):
                            yield kept
                if not again:
                    return
                todo = sorted(again)
                await asyncio.sleep(wait(attempt, again.values()))

        return retried_run

    return layer


def sift(burst: Burst, spoken: set[int], again: dict[int, Exception], on: Callable[[Exception], bool]) -> Burst:
    """The events to pass on. Rows to run again go to ``again``, rows that were seen to begin to ``spoken``."""
    kept: list[Event] = []
    for event in burst:
        if isinstance(event.value, Failure) and event.row not in spoken and on(event.value.error):
            again[event.row] = event.value.error
        else:
            kept.append(event)
            if not event.done:
                spoken.add(event.row)
    return kept
