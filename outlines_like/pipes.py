"""Functions one after the other: each row goes its own way, no row waits for another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from .arrays import Call
from .calling import Options
from .events import Burst, Bursts, Event, Failure, Layer, stack
from .layers import batched
from .lifting import Lifted, lift
from .requests import Terms
from .signatures import Signature
from .streams import Crew, Mailbox, newest
from .targets import Given, Plan, answered


@dataclass(frozen=True)
class PipeTarget:
    """The stages that a row passes through, and ``layers`` round the whole."""

    stages: tuple[Lifted[Any], ...]
    layers: tuple[Layer, ...] = ()
    signature: Signature | None = None

    @property
    def concurrency(self) -> int | None:
        """How many rows the narrowest stage takes."""
        return min((stage.target.concurrency for stage in self.stages if stage.target.concurrency), default=None)

    def prepare(self, calls: Sequence[Call], samples: int | None, terms: Terms) -> list[Any]:
        """The rows of the first stage."""
        return self.stages[0].target.prepare(calls, samples, terms)

    def run(self, rows: Sequence[Any], /) -> Bursts:
        """Let the rows flow."""
        return stack(self._flow, *self.layers)(rows)

    def _flow(self, rows: Sequence[Any]) -> Bursts:
        bursts = self.stages[0].target.run(rows)
        for stage in self.stages[1:]:
            bursts = Passage(stage, rows).run(bursts)
        return bursts

    def preview(self, rows: Sequence[Any]) -> Plan:
        """What the first stage would do: what comes after depends on its answers."""
        return self.stages[0].target.preview(rows)

    def layered(self, *layers: Layer) -> PipeTarget:
        """The same with layers round it."""
        return replace(self, layers=(*self.layers, *layers))

    def bounded(self, concurrency: int) -> PipeTarget:
        """The same, with ``concurrency`` rows on their way."""
        return self.layered(batched(1, concurrency=concurrency))

    def bound(self, owner: object) -> PipeTarget:
        """The same, its first stage a method of ``owner``."""
        return replace(self, stages=(self.stages[0].__get__(owner), *self.stages[1:]))


class Passage:
    """From the answers of one stage to those of the next, for the rows of one call."""

    def __init__(self, stage: Lifted[Any], rows: Sequence[Any]) -> None:
        self.stage, self.rows, self.mailbox = stage, rows, Mailbox()
        self.waiting: deque[Event] = deque()
        self.workers = 0

    async def run(self, bursts: Bursts) -> Bursts:
        """Pass on what ``bursts`` bring."""
        self.crew = Crew(self.mailbox, [self.read(bursts)])
        try:
            while (burst := await self.mailbox.take()) is not None:
                yield burst
        finally:
            await self.crew.stop()
            await bursts.aclose()

    async def read(self, bursts: Bursts) -> None:
        """Send answers on their way. Values so far go on where the stage takes them."""
        async with aclosing(bursts):
            async for burst in bursts:
                if self.stage.options.partial:
                    await self.show([event for event in newest(burst) if not event.done])
                done = [event for event in burst if event.done]
                self.mailbox.post([event for event in done if isinstance(event.value, Failure)])
                self.waiting += [event for event in done if not isinstance(event.value, Failure)]
                while self.waiting and self.workers < (self.stage.target.concurrency or len(self.rows)):
                    self.workers += 1
                    self.crew.add(self.work(self.share()))

    def share(self) -> Burst:
        """What one worker does at once: a row of a function that is bounded here, all where the model has a limit."""
        return [self.waiting.popleft() for _ in range(1 if self.stage.target.concurrency else len(self.waiting))]

    async def work(self, share: Burst) -> None:
        """Run rows while there are any."""
        while share:
            async with aclosing(self.answers(share)) as bursts:
                async for burst in bursts:
                    self.mailbox.post(burst)
            share = self.share() if self.waiting else []
        self.workers -= 1

    async def show(self, partial: Burst) -> None:
        """Post what the stage makes of values so far; it may fail on what is not whole."""
        if partial:
            async with aclosing(self.answers(partial)) as bursts:
                async for burst in bursts:
                    self.mailbox.post([Event(i, v, False) for i, v, done in burst if done and not isinstance(v, Failure)])

    async def answers(self, events: Burst) -> Bursts:
        """The stage's answers to what the one before said."""
        calls = list(self.prepared(events))
        async with aclosing(answered(self.stage.target.run)([row for _, row in calls])) as bursts:
            async for burst in bursts:
                yield [Event(calls[i][0], value, done) for i, value, done in burst]

    def prepared(self, events: Burst) -> Iterator[tuple[int, Any]]:
        """Calls of the stage. Each belongs to the row that it is made for, so equal ones are draws of their own."""
        for i, value, _ in events:
            row = self.rows[i]
            scope, sample = row.origin
            terms = msgspec.structs.replace(row.terms, scope=scope, sample=sample)
            try:
                yield i, self.stage.target.prepare([Call((value,), {})], None, terms)[0]
            except Exception as error:
                yield i, Given(Failure(error))


def pipe(*stages: Callable[..., Any], **options: Any) -> Lifted[Any]:
    """Functions and models one after the other, over arrays: each gets what the one before gave.

    A row that is ready goes on at once, however far the others are. What a stage gives so far goes on to stages lifted
    with ``partial=True``. ``options`` are those of :class:`vectorize <Vectorize>`.

    >>> import outlines_like as ol
    >>> ask = ol.pipe(lambda name: f"hello {name}", ol.models.fake(), lambda text: text.split())
    >>> ask("you")
    ['HELLO', 'YOU']
    """
    if not stages:
        raise TypeError("pipe takes at least one function")
    lifted = [lift(stage) for stage in stages]
    first = lifted[0]
    target = PipeTarget(tuple(lifted), signature=first.options.signature)
    return lift(Lifted(target, first.fn, Options(excluded=first.options.excluded), first.__signature__), **options)
