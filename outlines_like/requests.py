"""What is asked of a model and what it answers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import force_setattr

VERSION = 1  # of the key's schema: raise it when equal keys would no longer mean equal answers


class Message(msgspec.Struct, frozen=True, gc=False):
    """One turn of a conversation. ``extra`` holds the fields that only some servers know."""

    role: str
    content: Any = None
    extra: dict[str, Any] = {}

    @classmethod
    def of(cls, turn: Message | Mapping[str, Any]) -> Message:
        """A message from a dict with ``role`` and ``content``, as chat servers write it."""
        fields = turn.wire() if isinstance(turn, Message) else turn
        check_message(fields)
        rest = {name: native(value) for name, value in fields.items() if name not in ("role", "content")}
        return cls(str(fields["role"]), native(fields.get("content")), rest)

    def wire(self) -> dict[str, Any]:
        """The dict that chat servers read."""
        return {"role": self.role, "content": self.content, **self.extra}


def check_message(fields: Mapping[str, Any]) -> None:
    """A message says something, or calls a tool; a misspelt field must not pass for silence."""
    content = fields.get("content")
    if content is None and not {"tool_calls", "function_call"} & set(fields):
        raise TypeError(
            f"a message has no content; its fields are {', '.join(map(repr, fields))}, and the text goes into 'content'"
        )
    if content is not None and not isinstance(content, (str, list, tuple)):
        raise TypeError(f"a message's content is {type(content).__name__} {content!r:.60}; it takes text, or a list of parts")


def native(value: Any) -> Any:
    """The value with text, numbers and containers of other types (NumPy's, say) made Python's own."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): native(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [native(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


class Terms(msgspec.Struct, frozen=True, gc=False):
    """On what terms a call is made: none of them changes what is asked.

    ``store`` is the folder of stored answers (None: the default one), ``mode`` how it is used ("use", "refresh" or
    "disabled"), ``live`` whether the caller watches partial answers. ``scope`` names the row of an outer lifted
    function on whose behalf the call is made, so that every such row gets draws of its own.
    """

    store: str | None = None
    mode: str = "use"
    live: bool = False
    scope: str = ""


class Request(msgspec.Struct, frozen=True, gc=False):
    """One model call. Equal requests are the same call.

    ``endpoint`` says who answers (kind and address), ``prompt`` is raw text or a conversation, ``params`` what the
    user set and nothing else. ``occurrence`` and ``sample`` number the draws: the how-manieth equal prompt of its
    call, and the how-manieth sample of that. ``stem`` and ``key`` are made from the rest: a digest of everything that
    decides the answer but for the number of the draw, and the request's name in the store. At temperature 0, set
    explicitly, every draw is the same one.
    """

    endpoint: str
    model: str
    prompt: str | tuple[Message, ...]
    params: dict[str, Any] = {}
    occurrence: int = 0
    sample: int = 0
    terms: Terms = Terms()
    stem: str = ""
    key: str = ""

    def __post_init__(self) -> None:
        force_setattr(self, "stem", digest([VERSION, self.endpoint, self.model, self.prompt, self.params]))
        self._name()

    def _name(self) -> None:
        force_setattr(self, "key", self.stem if self.greedy else f"{self.family}-{self.sample}")

    def draw(self, occurrence: int, sample: int) -> Request:
        """The same request as another draw. Its digest is not computed again."""
        other = copy(self)
        force_setattr(other, "occurrence", occurrence)
        force_setattr(other, "sample", sample)
        other._name()
        return other

    @property
    def family(self) -> str:
        """What requests that differ in the sample number alone have in common."""
        return f"{self.stem}-{self.terms.scope}-{self.occurrence}"

    @property
    def greedy(self) -> bool:
        """Whether the user asked for the likeliest answer."""
        return self.params.get("temperature") == 0

    @property
    def text(self) -> str:
        """The prompt's last words, for fakes and logs."""
        return self.prompt if isinstance(self.prompt, str) else str(self.prompt[-1].content)


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens read and written for one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Completion(msgspec.Struct, frozen=True, gc=False):
    """A model's answer, whole or so far.

    ``finish_reason`` is None while it is under way, "stop" when the model ended or met a stop string, "length" when
    the token limit cut it. ``cached`` says that it came from the store. ``scores`` are the log-probabilities of the
    options that were to be scored, ``logprobs`` those of the answer's tokens, if they were asked for.
    """

    text: str
    finish_reason: str | None = None
    usage: Usage = Usage()
    cached: bool = False
    scores: tuple[float, ...] = ()
    logprobs: tuple[float, ...] | None = None

    @property
    def log_prob(self) -> float | None:
        """The log-probability of the answer; None if it was not asked for."""
        return None if self.logprobs is None else sum(self.logprobs)


def digest(value: Any) -> str:
    """Canonical JSON, hashed (RFC 7693): equal values have equal digests in every process.

    >>> digest({"b": 1, "a": 2}) == digest({"a": 2, "b": 1})
    True
    """
    return blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).hexdigest()
