"""Which call, and which row of it, work is done for: what names the rows of lifted functions and the draws made inside."""

from __future__ import annotations

import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any, NamedTuple

from .arrays import Call, plain
from .requests import Terms, digest
from .signatures import form_of

Fn = Callable[..., Any]


class Row(NamedTuple):
    """One row of a lifted function: what it is called with, and where in which call it stands."""

    args: tuple[Any, ...]
    kwargs: Any
    number: int
    occasion: Occasion

    @property
    def terms(self) -> Terms:
        """The terms of the whole call."""
        return self.occasion.terms

    @property
    def key(self) -> str:
        """The row's name in a store: function, arguments, number of the draw."""
        return f"{self.occasion.function}-{self.occasion.strict_name(self.number)}"

    @property
    def scope(self) -> str:
        """What tells the draws made for this row from those made for other rows."""
        return self.occasion.name(self.number)

    @property
    def origin(self) -> tuple[str, int]:
        """What names the draws of calls that go on from the answer: all samples of this call, and which of them it is."""
        return self.occasion.origin(self.number)


class Occasion:
    """One call of a lifted function. Names are made only if somebody asks: most functions call no model."""

    def __init__(self, fn: Fn, calls: Sequence[Call], samples: int | None, terms: Terms) -> None:
        self.fn, self.calls, self.terms = fn, calls, terms
        self.samples = 1 if samples is None else samples

    def rows(self) -> list[Row]:
        """All rows, the samples of a call side by side."""
        if self.samples == 1:
            return [Row(args, kwargs, i, self) for i, (args, kwargs) in enumerate(self.calls)]
        return [Row(*call, i * self.samples + k, self) for i, call in enumerate(self.calls) for k in range(self.samples)]

    @cached_property
    def function(self) -> str:
        """The function's name in a store."""
        return digest(plain(identity(self.fn)))

    @cached_property
    def digests(self) -> list[str | None]:
        """A digest of each call's arguments, None where they have no stable text."""
        form = form_of(self.fn)
        return [arguments(form, call) for call in self.calls]

    @cached_property
    def occurrences(self) -> list[int]:
        """The how-manieth equal call of the array each is."""
        seen: Counter[str] = Counter()
        numbers = []
        for name in self.digests:
            numbers.append(seen[name] if name else 0)
            seen.update([name] if name else [])
        return numbers

    def name(self, number: int) -> str:
        """A row's name among all calls: by its arguments, or by its place where those have no stable text."""
        return digest([*self._place(number)])

    def origin(self, number: int) -> tuple[str, int]:
        """The same for all samples of a call, and which of them a row is."""
        *call, sample = self._place(number)
        return digest(call), sample

    def _place(self, number: int) -> tuple[Any, ...]:
        i, sample = divmod(number, self.samples)
        return self.terms.scope, self.digests[i] or i, self.occurrences[i], sample + self.terms.sample

    def strict_name(self, number: int) -> str:
        """A row's name for a store: by its arguments only."""
        i = number // self.samples
        if self.digests[i] is None:
            raise TypeError(
                f"the arguments of row {i} have no stable text, so they can't name an answer in a store: "
                f"{', '.join(type(value).__name__ for value in self.calls[i].args)}; pass text, numbers, lists or dicts"
            )
        return self.name(number)


CURRENT: ContextVar[Row | None] = ContextVar("CURRENT", default=None)


def scope() -> str:
    """The scope of the row that this code runs for; empty outside lifted functions."""
    row = CURRENT.get()
    return row.scope if row is not None else ""


def arguments(form: inspect.Signature, call: Call) -> str | None:
    """A digest of a call's arguments, defaults included, if they have a stable text."""
    try:
        bound = form.bind(*call.args, **call.kwargs)
        bound.apply_defaults()
        return digest(plain(bound.arguments))
    except (TypeError, ValueError):
        return None


def identity(fn: Fn) -> list[Any]:
    """What tells a function from others, in every process: its name, and for closures and lambdas what they hold."""
    if isinstance(fn, functools.partial):
        return [identity(fn.func), fn.args, fn.keywords]
    if isinstance(fn, types.MethodType):
        raise TypeError(f"{fn!r} belongs to an object, so its answers can't be stored; wrap it in a plain function")
    if isinstance(fn, (type, types.MethodDescriptorType)) or isinstance(getattr(fn, "__self__", None), types.ModuleType):
        return [getattr(fn, "__module__", ""), fn.__qualname__]  # a class, or a function that Python or an extension brings
    code = getattr(fn, "__code__", None)
    if not isinstance(code, types.CodeType):
        raise TypeError(f"{fn!r} has no stable name, so its answers can't be stored; wrap it in a plain function")
    name = [fn.__module__, fn.__qualname__]
    if "<" not in fn.__qualname__:
        return name
    held = [cell.cell_contents for cell in getattr(fn, "__closure__", None) or ()]
    return [*name, text_of(code), held, getattr(fn, "__defaults__", None), getattr(fn, "__kwdefaults__", None)]


def text_of(code: types.CodeType) -> list[Any]:
    """A function's code as plain values."""
    constants = [text_of(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return [code.co_code.hex(), constants, code.co_names]
