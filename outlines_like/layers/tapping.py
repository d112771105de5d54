"""Look on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from ..events import Burst, Bursts, Elementwise, Layer


def tapped(watch: Callable[[Burst], object]) -> Layer:
    """Show every burst of events to ``watch`` and pass it on unchanged."""

    def layer(run: Elementwise) -> Elementwise:
        async def tapped_run(rows: Sequence[Any]) -> Bursts:
            async with aclosing(run(rows)) as bursts:
                async for burst in bursts:
                    watch(burst)
                    yield burst

        return tapped_run

    return layer
