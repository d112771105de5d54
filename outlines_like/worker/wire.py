"""What a parent and its worker say to each other: msgpack in frames, each led by its length.

Nothing but plain data crosses, so no answer, however odd, can break the other side.
"""

from __future__ import annotations

import struct
from typing import Any, Self

import msgspec

from .. import errors
from ..errors import ModelError
from ..requests import Completion, Message

LENGTH = struct.Struct("!Q")
ORDER = struct.Struct("!cQ")  # to a nursery: what to do, and for which worker
HATCH, REAP = b"h", b"r"
REAPED = struct.Struct("!Qq")  # from a nursery: which worker ended, and how; worker 0 says that it is ready itself
PULSE = 1.0  # seconds after which a busy worker gives a sign of life


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The parent's first word: what to load, and how."""

    path: str
    device: str
    dtype: str
    raw: bool
    workers: int
    pickled: bool = False
    timeout: float = 300


class Ask(msgspec.Struct, frozen=True):
    """One row: ``key`` names its random stream, ``live`` asks for its text while it grows, ``ongoing`` says more may follow.

    ``call`` says whose it is.
    """

    id: int
    prompt: str | tuple[Message, ...]
    params: dict[str, Any]
    key: str
    live: bool
    call: int = 0
    ongoing: bool = False


class Rows(msgspec.Struct, frozen=True, tag=True):
    """Rows to answer; each is an encoded ``Ask``."""

    rows: list[msgspec.Raw]


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Rows that nobody waits for any more."""

    ids: list[int]


class Loading(msgspec.Struct, frozen=True, tag=True):
    """The model is being loaded, and how far that is."""

    stage: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why the model can't be loaded: one of our errors, and what to do about it."""

    kind: str
    message: str
    hint: str = ""

    @classmethod
    def by(cls, error: ModelError) -> Self:
        """What ``error`` says, as it travels."""
        return cls(type(error).__name__, str(error.args[0]), error.hint)

    def error(self) -> ModelError:
        """What arrived, as an error."""
        found: ModelError = getattr(errors, self.kind)(self.message, hint=self.hint)
        return found


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded, in the process of that number."""

    pid: int = 0


class Answer(msgspec.Struct, frozen=True):
    """A row's text so far; a completion with a finish reason is its last."""

    id: int
    completion: Completion


class Fault(msgspec.Struct, frozen=True):
    """A row that can't be answered. ``kind`` is the name of one of our errors."""

    id: int
    kind: str
    message: str


class News(msgspec.Struct, frozen=True, tag=True):
    """What one step of the engine brought, and how many tokens of prompts the worker has read in all."""

    answers: list[Answer] = []
    faults: list[Fault] = []
    prefilled: int = 0


Order = Setup | Rows | Cancel
Report = Loading | Refused | Ready | News
order_of = msgspec.msgpack.Decoder(Order).decode
report_of = msgspec.msgpack.Decoder(Report).decode
folder_of = msgspec.msgpack.Decoder(str | Refused).decode
ask_of = msgspec.msgpack.Decoder(Ask).decode
pack = msgspec.msgpack.Encoder().encode


def frame(message: Order | Report) -> bytes:
    """A message as it travels."""
    body = pack(message)
    return LENGTH.pack(len(body)) + body
