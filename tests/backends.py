"""Bare backends whose events come in an order of the test's choosing, and a guard against hanging."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter

from outlines_like import Completion, Event, Failure, Request
from outlines_like.requests import Terms

GUARD = 10  # seconds that nothing here may take


def within(work, seconds=GUARD):
    """What ``work()`` gives or raises, in a thread of its own; a hang is an error."""
    outcome = {}

    def run():
        try:
            outcome["value"] = work()
        except BaseException as error:
            outcome["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert outcome, f"still running after {seconds} s"
    if "error" in outcome:
        raise outcome["error"]
    return outcome["value"]


def requests_of(texts, *, live=True, **params):
    """One request a text; equal texts are told apart as occurrences."""
    seen = Counter()
    rows = []
    for text in texts:
        rows.append(Request("here", "echo", text, params, terms=Terms(live=live)).draw(seen[text], 0))
        seen[text] += 1
    return rows


def reply(request):
    """What the shuffled backend answers: several words that name the request."""
    return f"{request.text} says {request.occurrence} {request.sample}"


class Shuffled:
    """Answers word by word, rows and bursts mixed as ``seed`` has it. Counts what is opened and closed.

    ``faults`` has for a text the errors of its first tries, one after the other.
    """

    def __init__(self, seed, faults=None):
        self.random = random.Random(seed)
        self.faults = {text: list(errors) for text, errors in (faults or {}).items()}
        self.opened = self.closed = 0
        self.log = []

    async def __call__(self, rows):
        self.opened += 1
        self.log.append(list(rows))
        try:
            events = self.shuffled(rows)
            while events:
                for _ in range(self.random.randrange(3)):
                    await asyncio.sleep(0)
                size = self.random.randint(1, len(events))
                burst, events = events[:size], events[size:]
                yield burst
        finally:
            self.closed += 1

    def shuffled(self, rows):
        waiting = [self.events(i, row) for i, row in enumerate(rows)]
        events = []
        while waiting:
            line = self.random.choice(waiting)
            events.append(line.pop(0))
            waiting = [line for line in waiting if line]
        return events

    def events(self, i, row):
        if self.faults.get(row.text):
            return [Event(i, Failure(self.faults[row.text].pop(0)))]
        words = reply(row).split(" ")
        parts = [Event(i, Completion(" ".join(words[:k])), False) for k in range(1, len(words))] if row.terms.live else []
        return [*parts, Event(i, Completion(reply(row), "stop"))]


class Drawn:
    """Calls that end in an order drawn by ``seed``: whenever all stand still, one of them is let go."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.waiting = []
        self.most = 0

    async def turn(self):
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        self.waiting.append(mine)
        self.most = max(self.most, len(self.waiting))
        loop.call_soon(loop.call_soon, loop.call_soon, self.release)
        await mine

    def release(self):
        if self.waiting:
            free = self.waiting.pop(self.random.randrange(len(self.waiting)))
            if not free.done():
                free.set_result(None)


def endless(log=None, closed=None):
    """A backend that says "one", then "one two", then nothing until it is closed; then it sets ``closed``."""

    async def run(rows):
        if log is not None:
            log.append(list(rows))
        try:
            yield [Event(i, Completion("one"), False) for i in range(len(rows))]
            yield [Event(i, Completion("one two"), False) for i in range(len(rows))]
            await asyncio.Event().wait()
        finally:
            if closed is not None:
                closed.set()

    return run
