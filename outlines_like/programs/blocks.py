"""Roles and captures: data that nodes are stamped with when they are added to a program."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar, Token
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple, Self

from ..errors import ProgramError

NUMBERS = count()


class Turn(NamedTuple):
    """One speaker's turn. The number tells it from other turns of the same role."""

    role: str
    number: int


class Capturing(NamedTuple):
    """A capture of all that is said in a block."""

    name: str
    list_append: bool
    number: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """Whose turn a node belongs to, and which captures of blocks it is part of."""

    turn: Turn | None = None
    captures: tuple[Capturing, ...] = ()

    @property
    def role(self) -> str | None:
        """Who speaks."""
        return self.turn.role if self.turn else None

    def speaking(self, role: str) -> Stamp:
        """The same in a new turn of ``role``."""
        return replace(self, turn=Turn(role, next(NUMBERS)))

    def capturing(self, name: str, list_append: bool) -> Stamp:
        """The same inside one more capture."""
        return replace(self, captures=(*self.captures, Capturing(name, list_append, next(NUMBERS))))


class Ledger:
    """What was made and what was added while a block was open."""

    __slots__ = ("added", "made")

    def __init__(self) -> None:
        self.made = self.added = 0


BLOCK: ContextVar[Stamp] = ContextVar("BLOCK", default=Stamp())  # noqa: B039  a stamp never changes
LEDGER: ContextVar[Ledger | None] = ContextVar("LEDGER", default=None)


def note_made() -> None:
    """Tell the open block that an expression was made."""
    if (ledger := LEDGER.get()) is not None:
        ledger.made += 1


def note_added() -> None:
    """Tell the open block that something was added to a program."""
    if (ledger := LEDGER.get()) is not None:
        ledger.added += 1


class Block:
    """A ``with`` block: what is added to a program inside it is stamped. It may be entered again and nested."""

    def __init__(self, title: str, stamped: Callable[[Stamp], Stamp]) -> None:
        self._title, self._stamped = title, stamped
        self._entered: list[tuple[Token[Stamp], Token[Ledger | None]]] = []

    def __enter__(self) -> Self:
        self._entered.append((BLOCK.set(self._stamped(BLOCK.get())), LEDGER.set(Ledger())))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        ledger = LEDGER.get()
        stamped, ledgered = self._entered.pop()
        with suppress(ValueError):  # closed in another context than it was opened in: nothing of it is left there
            LEDGER.reset(ledgered)
            BLOCK.reset(stamped)
        if ledger is not None and ledger.added:
            note_added()
        if kind is None and ledger is not None and ledger.made and not ledger.added:
            raise ProgramError(
                f"nothing was added to a program inside `with {self._title}:`, so what was made there has no part in it; "
                f"add it inside the block (`lm += ...`), or give it as an argument"
            )
