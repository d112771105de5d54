"""What a program has said so far, and what was captured: values that only grow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import MappingProxyType
from typing import Any, NamedTuple

from ..requests import Completion, Message
from .blocks import Capturing, Stamp, Turn


class Piece(NamedTuple):
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


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """All that was said up to a node: the state before it, and one part more."""

    before: State | None = None
    part: Piece | None = None
    captures: Mapping[str, Captured] = field(default_factory=dict)
    held: tuple[Held, ...] = ()
    open: Open | None = None
    spent: Spent = NOTHING

    def said(self, part: Piece) -> State:
        """The state after one more part."""
        if not self.held and not part.stamp.captures:
            return State(self, part, self.captures, (), None, self.spent)
        captures = self.captures
        for held in self.held:
            if held.capturing not in part.stamp.captures:
                captures = captured(captures, held.capturing.name, Captured(held.text, held.text), held.capturing.list_append)
        texts = dict(self.held)
        held_now = tuple(Held(block, texts.get(block, "") + part.text) for block in part.stamp.captures)
        return State(self, part, captures, held_now, None, self.spent)

    def saying(self, part: Piece) -> State:
        """The state in the middle of a generated part."""
        grown = self.said(part)
        named = Open(part.name, part.text) if part.name else None
        return State(self, part, grown.captures, grown.held, named, self.spent)

    def answered(self, part: Piece, capture: Captured, completion: Completion, *, list_append: bool) -> State:
        """The state after a generated part."""
        grown = self.said(part)
        captures = captured(grown.captures, part.name, capture, list_append) if part.name else grown.captures
        return State(self, part, captures, grown.held, None, self.spent.plus(completion))

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

    def parts(self) -> list[Piece]:
        """Everything said, in order."""
        found = []
        state: State | None = self
        while state is not None:
            if state.part is not None:
                found.append(state.part)
            state = state.before
        return found[::-1]

    @property
    def text(self) -> str:
        """Everything said, turn under turn."""
        return "\n".join("".join(part.text for part in turn) for _, turn in self.turns())

    def turns(self) -> Iterator[tuple[Turn | None, list[Piece]]]:
        """The parts of each turn. Turns in which nothing was said are left out."""
        spoken = (part for part in self.parts() if part.text or part.content)
        for turn, parts in groupby(spoken, lambda part: part.stamp.turn):
            yield turn, list(parts)

    def messages(self) -> tuple[Message, ...]:
        """The turns as chat servers read them."""
        return tuple(Message(turn.role if turn else "user", content(parts)) for turn, parts in self.turns())

    def speaker(self) -> Turn | None:
        """Whose turn was the last in which anything was said."""
        state: State | None = self
        while state is not None and (state.part is None or not (state.part.text or state.part.content)):
            state = state.before
        return state.part.stamp.turn if state is not None and state.part is not None else None


def captured(captures: Mapping[str, Captured], name: str, new: Captured, list_append: bool) -> Mapping[str, Captured]:
    """``captures`` with one more."""
    if list_append:
        old = captures.get(name, Captured([], []))
        if not isinstance(old.value, list) or not isinstance(old.text, list):
            old = Captured([old.value], [old.text])
        new = Captured([*old.value, new.value], [*old.text, new.text], new.completion)
    return {**captures, name: new}


def content(parts: list[Piece]) -> Any:
    """A turn's content: text, or a list of pieces where there are images."""
    if not any(part.content for part in parts):
        return "".join(part.text for part in parts)
    pieces: list[Any] = []
    for is_image, group in groupby(parts, lambda part: part.content is not None):
        if is_image:
            pieces += [part.content for part in group]
        else:
            pieces.append({"type": "text", "text": "".join(part.text for part in group)})
    return pieces


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
