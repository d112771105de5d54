"""``program``: functions of an lm as steps of programs, and as something to vectorize."""

from __future__ import annotations

import asyncio
import functools
import types
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec

from ..arrays import Call
from ..bridge import hosted
from ..checks import count
from ..events import Bursts, Event, Failure, Layer, stack
from ..requests import Terms
from ..signatures import Signature
from ..targets import Given, Plan, missing
from .batches import CONCURRENCY
from .evaluation import each_settled, each_shown
from .nodes import Apply
from .runs import Visit

Fn = Callable[..., Any]
P = ParamSpec("P")


class Row(NamedTuple):
    """A program of an array, and on what terms it runs."""

    lm: Any
    terms: Terms

    @property
    def origin(self) -> tuple[str, int]:
        """What names the draws of calls that go on from the answer."""
        return self.lm.path, 0


async def runs(rows: Sequence[Row], visit: Visit, concurrency: int) -> Bursts:
    """Run the programs of an array. A row's values are the program as far as it has come."""
    lms = [row.lm for row in rows]
    async with aclosing((each_shown if visit.live else each_settled)(lms, visit, concurrency)) as bursts:
        async for burst in bursts:
            yield [event if isinstance(event.value, Failure) else standing(lms[event.row], event) for event in burst]


def standing(lm: Any, event: Event) -> Event:
    """An event of a program, its value the program so far."""
    return event._replace(value=lm if event.done else lm.at(event.value))


class Program(Generic[P]):
    """A function of an lm that can be added to one. See :func:`program`."""

    signature: Signature | None = None

    def __init__(self, fn: Fn, concurrency: int = CONCURRENCY, layers: tuple[Layer, ...] = ()) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.concurrency, self.layers = fn, concurrency, layers

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Apply:
        """The call, to be added: ``lm + f(...)``."""
        return Apply(self.fn, args, kwargs)

    def __get__(self, owner: object, kind: type | None = None) -> Program[...]:
        return self if owner is None else self.bound(owner)

    def __repr__(self) -> str:
        return f"program({getattr(self.fn, '__qualname__', self.fn)})"

    # What ``vectorize`` asks of a target

    def prepare(self, calls: Sequence[Call], samples: int | None, terms: Terms) -> list[Any]:
        """A program for each call and sample, made in order."""
        return [self._row(call, terms) for call in calls for _ in range(1 if samples is None else samples)]

    def _row(self, call: Call, terms: Terms) -> Any:
        lm, *args = call.args or [call.kwargs.get("lm")]
        rest = {name: value for name, value in call.kwargs.items() if call.args or name != "lm"}
        return Given(None) if missing(lm) or (args and missing(args[0])) else Row(lm + Apply(self.fn, tuple(args), rest), terms)

    def run(self, rows: Sequence[Any], /) -> Bursts:
        """Run the programs; async ones in the loop that asks."""
        visit = Visit(live=rows[0].terms.live, host=asyncio.get_running_loop())
        return stack(hosted(lambda rows: runs(rows, visit, self.concurrency)), *self.layers)(rows)

    def preview(self, rows: Sequence[Any]) -> Plan:
        """One run a row."""
        return Plan(len(rows), 0, len(rows), len(rows))

    def layered(self, *layers: Layer) -> Program[P]:
        """The same with layers round it."""
        return Program(self.fn, self.concurrency, (*self.layers, *layers))

    def bounded(self, concurrency: int) -> Program[P]:
        """The same, at most ``concurrency`` of them under way."""
        return Program(self.fn, count("concurrency", concurrency), self.layers)

    def bound(self, owner: object) -> Program[...]:
        """The same as a method."""
        return Program(types.MethodType(self.fn, owner), self.concurrency, self.layers)


def program(fn: Callable[Concatenate[Any, P], Any]) -> Program[P]:
    """Let ``fn(lm, ...)`` be added to programs: ``lm + fn(...)`` goes on from what ``fn`` returns for what was said before.

    It may be async, a method, recursive, and made of other programs. It runs when the result is read: a plain function in a
    thread of its own, so it may block; an async one in the loop of whoever awaits it, where it awaits what it reads.

    >>> import outlines_like as ol
    >>> @ol.program
    ... def greet(lm, name):
    ...     lm += f"Hello, {name}! "
    ...     return lm + ol.gen("reply")
    >>> lm = ol.models.fake(lambda asked: "Hi!") + greet("Ada")
    >>> str(lm)
    'Hello, Ada! Hi!'
    """
    if not callable(fn):
        raise TypeError(f"program takes a function of an lm, not {fn!r:.60}")
    return Program(fn)
