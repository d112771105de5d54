"""What a program has said so far, and what was captured: values that only grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from ..requests import Completion, Message
from .blocks import Capturing, Stamp, Turn


class Piece(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A piece of a program's text: given, generated, or an image."""

    text: str
    stamp: Stamp = Stamp()
    generated: bool = False
    name: str | None = None
    content: Mapping[str, Any] | None = None


class Captured(NamedTuple):
    """A capture: its value, its text, and the model's answer where it is one. Lists have a list of each."""

    value: Any
    text: Any
    completion: Any = None


class Open(NamedTuple):
    """A capture under way: its name, and its text so far."""

    name: str
    text: str


class Spent(NamedTuple):
    """What the answers of a program took: tokens read and written, those of them that came from the store, requests sent."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    requests: int = 0

    def plus(self, completion: Completion) -> Spent:
        """The same and one more answer."""
        read, written = completion.usage.prompt_tokens, completion.usage.completion_tokens
        stored = read + written if completion.cached else 0
        return Spent(
            self.prompt_tokens + read,
            self.completion_tokens + written,
            self.cached_tokens + stored,
            self.requests + (not completion.cached),
        )


NOTHING = Spent()


class Held(NamedTuple):
    """A capture of a block that may still go on."""

    capturing: Capturing
    text: str


class State(msgspec.Struct, frozen=True, eq=False):
    """All that was said up to a node: the state before it, and one piece more."""

    before: State | None = None
    piece: Piece | None = None
    captures: Mapping[str, Captured] = MappingProxyType({})
    held: tuple[Held, ...] = ()
    open: Open | None = None
    spent: Spent = NOTHING

    def said(self, piece: Piece) -> State:
        """The state after one more piece."""
        if not self.held and not piece.stamp.captures:
            return State(self, piece, self.captures, (), None, self.spent)
        captures = self.captures
        for held in self.held:
            if held.capturing not in piece.stamp.captures:
                captures = captured(captures, held.capturing.name, Captured(held.text, held.text), held.capturing.list_append)
        texts = dict(self.held)
        held_now = tuple(Held(block, texts.get(block, "") + piece.text) for block in piece.stamp.captures)
        return State(self, piece, captures, held_now, None, self.spent)

    def saying(self, piece: Piece) -> State:
        """The state in the middle of a generated piece."""
        grown = self.said(piece)
        named = Open(piece.name, piece.text) if piece.name else None
        return State(self, piece, grown.captures, grown.held, named, self.spent)

    def answered(self, piece: Piece, capture: Captured, completion: Completion, *, list_append: bool) -> State:
        """The state after a generated piece."""
        grown = self.said(piece)
        captures = captured(grown.captures, piece.name, capture, list_append) if piece.name else grown.captures
        return State(self, piece, captures, grown.held, None, self.spent.plus(completion))

    def assigned(self, name: str, capture: Captured) -> State:
        """The state with a capture set."""
        return replace(self, captures=captured(self.captures, name, capture, False))

    def removed(self, name: str) -> State:
        """The state without a capture."""
        return replace(self, captures={key: value for key, value in self.captures.items() if key != name})

    def closed(self) -> Mapping[str, Captured]:
        """All captures, those of open blocks as they stand."""
        captures = self.captures
        for block, text in self.held:
            captures = captured(captures, block.name, Captured(text, text), block.list_append)
        return captures

    def pieces(self) -> list[Piece]:
        """Everything said, in order."""
        found = []
        state: State | None = self
        while state is not None:
            if state.piece is not None:
                found.append(state.piece)
            state = state.before
        return found[::-1]

    @property
    def text(self) -> str:
        """Everything said, turn under turn."""
        return "\n".join(["".join([piece.text for piece in turn]) for _, turn in self.turns()])

    def turns(self) -> list[tuple[Turn | None, list[Piece]]]:
        """The pieces of each turn. Turns in which nothing was said are left out."""
        found: list[tuple[Turn | None, list[Piece]]] = []
        for piece in self.pieces():
            if piece.text or piece.content:
                if not found or found[-1][0] != piece.stamp.turn:
                    found.append((piece.stamp.turn, []))
                found[-1][1].append(piece)
        return found

    def messages(self) -> tuple[Message, ...]:
        """The turns as chat servers read them."""
        return tuple(Message(turn.role if turn else "user", content(pieces)) for turn, pieces in self.turns())

    def speaker(self) -> Turn | None:
        """Whose turn was the last in which anything was said."""
        state: State | None = self
        while state is not None and (state.piece is None or not (state.piece.text or state.piece.content)):
            state = state.before
        return state.piece.stamp.turn if state is not None and state.piece is not None else None


def captured(captures: Mapping[str, Captured], name: str, new: Captured, list_append: bool) -> Mapping[str, Captured]:
    """``captures`` with one more."""
    if list_append:
        old = captures.get(name, Captured([], []))
        if not isinstance(old.value, list) or not isinstance(old.text, list):
            old = Captured([old.value], [old.text])
        new = Captured([*old.value, new.value], [*old.text, new.text], new.completion)
    return {**captures, name: new}


def content(pieces: list[Piece]) -> Any:
    """A turn's content: text, or a list where there are images."""
    if not any(piece.content for piece in pieces):
        return "".join(piece.text for piece in pieces)
    listed: list[Any] = []
    for is_image, group in groupby(pieces, lambda piece: piece.content is not None):
        if is_image:
            listed += [piece.content for piece in group]
        else:
            listed.append({"type": "text", "text": "".join(piece.text for piece in group)})
    return listed


@dataclass(frozen=True, slots=True)
class Part:
    """A program as it stands at one moment of its run; it never changes.

    ``text`` is all text so far and ``delta`` what has come since the snapshot before; ``captures`` has the values of finished
    captures, ``open`` name and text so far of the one under way; ``usage`` what was spent; the last snapshot is ``done``.
    """

    text: str
    delta: str
    captures: Mapping[str, Any]
    open: Open | None
    usage: Spent
    done: bool

    def __str__(self) -> str:
        return self.text


def part_of(state: State, before: str, done: bool) -> Part:
    """A state as readers see it, after they have seen the text ``before``."""
    text = state.text
    captures = state.closed() if done else state.captures
    values = MappingProxyType({name: captured.value for name, captured in captures.items()})
    running = None if done else state.open or next((Open(block.name, said) for block, said in reversed(state.held)), None)
    return Part(text, text[len(before) :], values, running, state.spent, done)
