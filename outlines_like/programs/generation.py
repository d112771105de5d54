"""One gen: what its model is asked, and how the answer becomes a state."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from .. import stops
from ..errors import MalformedError, ProgramError
from ..requests import Completion, Message
from .nodes import Gen
from .outputs import Reading
from .states import Captured, Piece, State

if TYPE_CHECKING:
    from .lm import LM

UNFINISHED = (
    "this assistant turn has begun already, and {} can't go on in the middle of a turn: give gen(...) a block of its own, "
    "`with assistant(): ...`, and put given words into the user's turn; or use a model that goes on in a turn (prefill=True)"
)


def prompt(lm: LM) -> str | tuple[Message, ...]:
    """What the model reads: raw text, or the turns so far."""
    if not lm.stamp.turn:
        return lm.before.text
    messages = lm.before.messages()
    if lm.before.speaker() == lm.stamp.turn:
        if not lm.source.model.prefill:
            raise ProgramError(UNFINISHED.format(lm.source.model))
        return messages
    if lm.source.model.prefill and messages and messages[-1].role == lm.stamp.role:
        return (*messages, Message("assistant", ""))  # else the turn before would go on
    return messages


def cut_here(node: Gen) -> list[str]:
    """The stop strings that are looked for here, as the one that is met is wanted."""
    return list(node.params.get("stop", ())) if node.stop_text else []


def partial_piece(lm: LM, completion: Completion) -> Piece | None:
    """What may be shown of an answer under way; nothing where it may yet be cut or refused."""
    node = lm.node
    assert isinstance(node, Gen)
    if not node.form.shown or node.stop_regex:
        return None
    return Piece(stops.safe(completion.text, cut_here(node)), lm.stamp, True, node.name)


def answer(lm: LM, completion: Completion) -> State:
    """The state after an answer."""
    node = lm.node
    assert isinstance(node, Gen)
    text, stop = ended(node, completion.text)
    reading = read(node, text, completion)
    piece = Piece(reading.text, lm.stamp, True, node.name)
    capture = Captured(reading.value, reading.text, completion)
    state = lm.before.answered(piece, capture, completion, list_append=node.list_append)
    return state.assigned(node.stop_text, Captured(stop, stop or "")) if node.stop_text else state


def read(node: Gen, text: str, completion: Completion) -> Reading:
    """What an answer says in its form."""
    try:
        return node.form.read(text)
    except MalformedError as error:
        if completion.finish_reason != "length":
            raise
        raise MalformedError(f"{error}; it was cut by the limit of tokens: give max_tokens= more") from error


def ended(node: Gen, text: str) -> tuple[str, str | None]:
    """The text up to where it is to stop, and what it stopped at."""
    found = re.search(node.stop_regex, text) if node.stop_regex else None
    ends = [(found.start(), found.group())] if found else []
    ends += [(at, stop) for stop in cut_here(node) if (at := text.find(stop)) >= 0]
    at, stop = min(ends, default=(len(text), None))
    return text[:at], stop
