"""What can be added to a program, as values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Any
from uuid import uuid4

import msgspec

from ..arrays import plain
from ..errors import ProgramError
from .blocks import Stamp, note_made
from .outputs import FREE, Form

Placed = Iterator[tuple["Node", Stamp]]


class Expression(msgspec.Struct, frozen=True, eq=False):
    """Something to add to a program: with ``lm + x``, to text or to other expressions, or inside an f-string."""

    def __post_init__(self) -> None:
        note_made()

    def __add__(self, other: Any) -> Sum:
        return Sum((self, expression(other)))

    def __radd__(self, other: Any) -> Sum:
        return Sum((expression(other), self))

    def __str__(self) -> str:
        return MARKS.mark(self)

    def __format__(self, spec: str) -> str:
        return format(MARKS.mark(self), spec)

    def placed(self, stamp: Stamp) -> Placed:
        """The nodes of this expression, each with its stamp."""
        raise NotImplementedError


class Node(Expression, frozen=True, eq=False):
    """An expression that is one step of a program."""

    def placed(self, stamp: Stamp) -> Placed:
        """Itself."""
        yield self, stamp

    @property
    def identity(self) -> list[Any]:
        """What it does, as plain values that are the same in every process."""
        raise NotImplementedError


class Text(Node, frozen=True, eq=False, gc=False):
    """Given words."""

    text: str

    @property
    def identity(self) -> list[Any]:
        """Its words."""
        return ["text", self.text]


class Gen(Node, frozen=True, eq=False, gc=False):
    """Words of the model's."""

    name: str | None = None
    params: Mapping[str, Any] = {}
    form: Form = FREE
    list_append: bool = False
    stop_regex: str | None = None
    stop_text: str | None = None

    @property
    def identity(self) -> list[Any]:
        """What is asked for, under whatever name."""
        return ["gen", plain(self.params), self.form.sent(), self.stop_regex]


class Picture(Node, frozen=True, eq=False):
    """An image, as chat servers read it."""

    content: Mapping[str, Any]

    @property
    def identity(self) -> list[Any]:
        """All of it."""
        return ["image", self.content]


class Assign(Node, frozen=True, eq=False):
    """A capture that the program sets by itself, or removes."""

    name: str
    value: Any = None
    remove: bool = False

    @property
    def identity(self) -> list[Any]:
        """Its name."""
        return ["assign", self.name, self.remove]


class Apply(Node, frozen=True, eq=False):
    """A program with its arguments: ``fn(lm, *args, **kwargs)`` gives the rest."""

    fn: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}

    @property
    def title(self) -> str:
        """The function's name."""
        return str(getattr(self.fn, "__qualname__", None) or type(self.fn).__qualname__)

    @property
    def identity(self) -> list[Any]:
        """The function's name, and its arguments as far as they have a stable text."""
        name = [getattr(self.fn, "__module__", ""), self.title]
        named = {key: stable(value) for key, value in self.kwargs.items()}
        return ["program", name, [stable(value) for value in self.args], named]


def stable(value: Any) -> Any:
    """A value as JSON; of one without a stable text, its kind."""
    try:
        return plain(value)
    except (TypeError, ValueError):
        return ["some", type(value).__qualname__]


class Sum(Expression, frozen=True, eq=False):
    """One expression after the other."""

    parts: tuple[Expression, ...]

    def placed(self, stamp: Stamp) -> Placed:
        """The nodes of all parts, in order. Long sums are not walked by recursion."""
        todo: list[Expression] = list(reversed(self.parts))
        while todo:
            part = todo.pop()
            if isinstance(part, Sum):
                todo += reversed(part.parts)
            else:
                yield from part.placed(stamp)


class Stamped(Expression, frozen=True, eq=False):
    """An expression in a turn or a capture of its own."""

    inner: Expression
    stamped: Callable[[Stamp], Stamp]

    def placed(self, stamp: Stamp) -> Placed:
        """The nodes of the expression, stamped."""
        yield from self.inner.placed(self.stamped(stamp))


class Marks:
    """Expressions that went through an f-string, by the mark that stands for them in its text.

    The marks of one process can't be guessed, so no text from elsewhere holds one. The oldest are forgotten.
    """

    def __init__(self, most: int = 1 << 16) -> None:
        self._token, self._numbers, self._most = uuid4().hex, count(), most
        self._held: dict[str, Expression] = {}
        self._pattern = re.compile(rf"<<{self._token}:([0-9]+)>>")

    def mark(self, made: Expression) -> str:
        """The text that stands for an expression."""
        number = str(next(self._numbers))
        self._held[number] = made
        if len(self._held) > self._most:
            self._held.pop(next(iter(self._held)), None)
        return f"<<{self._token}:{number}>>"

    def read(self, text: str) -> Expression:
        """A text, and the expressions that its marks stand for."""
        if self._token not in text:
            return Text(str(text))
        pieces = self._pattern.split(text)
        return Sum(tuple(self._found(piece) if i % 2 else Text(piece) for i, piece in enumerate(pieces) if piece))

    def _found(self, number: str) -> Expression:
        if number not in self._held:
            raise ProgramError("an f-string with an expression in it was kept for too long; make it where it is added")
        return self._held[number]


MARKS = Marks()


def expression(value: Any) -> Expression:
    """What is added to a program, as an expression."""
    if isinstance(value, str):
        return MARKS.read(value)
    if isinstance(value, Expression):
        return value
    if callable(value):
        name = getattr(value, "__name__", type(value).__name__)
        raise TypeError(f"{name} was added to a program without being called; write `lm + {name}(...)`")
    raise TypeError(
        f"{type(value).__name__} {value!r:.60} was added to a program; add text, gen(...) or another expression, or the call "
        "of a program (does a building block lack its return?)"
    )
