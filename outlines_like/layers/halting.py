"""Stop where going on is hopeless."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from ..errors import ModelError
from ..events import Burst, Bursts, Elementwise, Event, Failure


def hopeless(error: Exception) -> bool:
    """Whether no other request of the same call could fare better."""
    return isinstance(error, ModelError) and error.hopeless


def unsent(error: Exception) -> Exception:
    """The same error for a row that was spared."""
    if not isinstance(error, ModelError) or error.args[0].startswith("not sent"):
        return error
    words = f"not sent, as another request failed: {error.args[0]}"
    told = type(error)(words, status=error.status, request_id=error.request_id, retryable=False, hint=error.hint)
    told.__cause__ = error
    return told


def halting(on: Callable[[Exception], bool], burst: Burst) -> Exception | None:
    """The first error of a burst that ends the whole call."""
    failures = (event.value for event in burst if type(event.value) is Failure)
    return next((failure.error for failure in failures if on(failure.error)), None)


def halted(run: Elementwise) -> Elementwise:
    """End a call at the first failure that no other row of it would be spared, such as a key that is refused."""

    async def halted_run(rows: Sequence[Any]) -> Bursts:
        left, error = set(range(len(rows))), None
        async with aclosing(run(rows)) as bursts:
            async for burst in bursts:
                left.difference_update([row for row, _, done in burst if done])
                yield burst
                if error := halting(hopeless, burst):
                    break
        if error and left:
            failure = Failure(unsent(error))
            yield [Event(row, failure) for row in sorted(left)]

    return halted_run
