"""What OpenAI-compatible servers answer, read into values. Pure: bytes in, values out."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from ..errors import ContentFilterError, MalformedError, ModelError, ServerError, TruncatedError, UnreachableError
from ..events import Failure
from ..requests import Completion, Usage
from ..stops import cut, ended, met, safe
from .refusals import Mask, excerpt, unmasked

Outcome = Completion | Failure
Refuse = Callable[[Any], ModelError]  # makes the error for an error object
LIMIT = 32 * 2**20  # decoded bytes of one answer, or of one event of a stream
STREAM_LIMIT = 16 * LIMIT  # decoded bytes of a stream, which are not kept
SNAPSHOTS = 8  # of one choice that are told of what was read at once
REASON = 65536  # bytes of a bad answer that are looked at for its excerpt
LENGTH = ("length", "max_tokens", "max_length", "model_length")
BAD_JSON = (msgspec.MsgspecError, ValueError, RecursionError)


class TooLargeError(MalformedError):
    """The answer is larger than any answer should be."""

    retryable = False


class Inflater:
    """Undoes ``Content-Encoding``, never giving more than ``limit`` bytes in all."""

    def __init__(self, encoding: str, limit: int = LIMIT) -> None:
        encoding = encoding.strip().lower()
        self._left, self._zipped = limit, encoding in ("gzip", "x-gzip")
        self._zlib: Any = zlib.decompressobj(31) if self._zipped else None
        if not self._zipped and encoding not in ("", "identity"):
            name = encoding if encoding in ("br", "deflate", "zstd", "compress") else "something"
            raise MalformedError(f"the answer is encoded as {name} that was not asked for", retryable=False)

    def feed(self, data: bytes) -> bytes:
        """What ``data`` stands for."""
        if not self._zipped:
            self._spend(len(data))
            return data
        try:
            return b"".join(self._members(data))
        except zlib.error:
            raise MalformedError("the answer is said to be compressed by gzip, but is not") from None

    def _members(self, data: bytes) -> Iterator[bytes]:
        while data:
            if self._zlib.eof:
                self._zlib = zlib.decompressobj(31)
            part = self._zlib.decompress(data, self._left + 1)
            self._spend(len(part))
            yield part
            data = self._zlib.unused_data or self._zlib.unconsumed_tail

    def _spend(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            raise TooLargeError("the answer is larger than the limit for one answer")

    def finish(self) -> None:
        """Raise if the end of the data is missing."""
        if self._zipped and not self._zlib.eof:
            raise UnreachableError("the compressed answer broke off")


class Framer:
    """Cuts a stream of server-sent events (WHATWG HTML 9.2), given as bytes, into their data."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit, self._size = limit, 0
        self._line: list[bytes] = []
        self._data: list[bytes] = []
        self._skip, self._first = False, True

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of every event that ``chunk`` completes."""
        if self._skip and chunk.startswith(b"\n"):
            chunk = chunk[1:]  # the other half of a CRLF that was split over two reads
        if not chunk:
            return []
        self._skip = chunk.endswith(b"\r")
        lines = chunk.splitlines()
        rest = [] if chunk.endswith((b"\n", b"\r")) else [lines.pop()]
        found = [data for line in self._whole(lines) if (data := self._hear(line)) is not None]
        self._keep(rest)
        return found

    def finish(self) -> list[bytes]:
        """The data of a last event whose closing blank line is missing."""
        return self.feed(b"\n\n") if self._line or self._data else []

    def _whole(self, lines: list[bytes]) -> Iterator[bytes]:
        if lines:
            yield b"".join([*self._line, lines[0]])
            self._line = []
        yield from lines[1:]

    def _keep(self, rest: list[bytes]) -> None:
        self._line += rest
        self._size = sum(map(len, self._data)) + sum(map(len, self._line)) if not rest else self._size + len(rest[0])
        if self._size > self._limit:
            raise TooLargeError("an event of the stream is larger than the limit for one answer")

    def _hear(self, line: bytes) -> bytes | None:
        if self._first:
            self._first, line = False, line.removeprefix(b"\xef\xbb\xbf")
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        data, self._data = self._data, []
        return b"\n".join(data) if data else None


def decoded(body: bytes, content_type: str = "", mask: Mask = unmasked) -> dict[str, Any]:
    """The JSON object in ``body``."""
    try:
        answer = msgspec.json.decode(body)
    except BAD_JSON:
        answer = None
    if isinstance(answer, dict):
        return answer
    source = f" ({excerpt(content_type)})" if content_type else ""
    said = excerpt(body[:REASON].decode("utf-8", "replace"), mask) or "it is empty"
    raise MalformedError(f"the answer is not the JSON object it should be{source}: {said}")


def answers(answer: dict[str, Any], asked: int, stops: Sequence[str], refuse: Refuse) -> list[Outcome]:
    """The outcomes of a whole answer, of at most as many choices as were asked for."""
    return settled(voices(answer, refuse)[:asked], usage_of(answer), stops)


def voices(answer: dict[str, Any], refuse: Refuse) -> list[Voice]:
    """The choices of a whole answer."""
    choices = answer.get("choices")
    if isinstance(choices, list) and choices:
        return [Voice().heard(choice, "message", refuse) for choice in choices]
    raise refuse(answer) if is_error(answer) else MalformedError("the answer holds no choices")


def is_error(answer: dict[str, Any]) -> bool:
    """Whether this is an error object."""
    return bool(answer.get("error")) or answer.get("object") == "error" or ("detail" in answer and "choices" not in answer)


def usage_of(answer: dict[str, Any]) -> Usage:
    """The tokens that an answer says it took."""
    told = answer.get("usage")
    if not isinstance(told, dict):
        return Usage()
    read, written = told.get("prompt_tokens"), told.get("completion_tokens")
    return Usage(read if isinstance(read, int) else 0, written if isinstance(written, int) else 0)


def shares(usage: Usage, n: int) -> list[Usage]:
    """The tokens of one request, shared out among its ``n`` answers so that their sum is what was paid.

    >>> shares(Usage(7, 5), 2)
    [Usage(prompt_tokens=7, completion_tokens=3), Usage(prompt_tokens=0, completion_tokens=2)]
    """
    each, more = divmod(usage.completion_tokens, n)
    return [Usage(usage.prompt_tokens if i == 0 else 0, each + (i < more)) for i in range(n)]


def settled(voices: Sequence[Voice], usage: Usage, stops: Sequence[str]) -> list[Outcome]:
    """What each voice has come to."""
    return [voice.outcome(share, stops) for voice, share in zip(voices, shares(usage, len(voices)), strict=True)]


class Voice:
    """One choice of an answer, as far as it was heard."""

    __slots__ = ("chances", "error", "finish", "refusal", "shown", "spoke", "text", "thought")

    def __init__(self) -> None:
        self.chances: list[tuple[str, float]] = []
        self.text, self.shown, self.finish = "", 0, ""
        self.spoke = self.thought = False
        self.refusal = ""
        self.error: ModelError | None = None

    def heard(self, choice: Any, part: str, refuse: Refuse) -> Voice:
        """Add what a choice holds: under ``part`` ("message" or "delta") in chats, as text in completions."""
        if not isinstance(choice, dict):
            raise MalformedError("a choice of the answer is not an object")
        said = choice.get(part)
        said = said if isinstance(said, dict) else {}
        self._hear_text(said["content"] if "content" in said else choice.get("text"))
        if not self.text:
            self._hear_silence(said)
        if choice.get("error"):
            self.error = refuse(choice)
        if choice.get("logprobs"):
            self.chances += chances_of(choice["logprobs"])
        self.finish = str(choice.get("finish_reason") or self.finish).lower()
        return self

    def _hear_silence(self, said: dict[str, Any]) -> None:
        self.thought |= any(said.get(name) for name in ("reasoning_content", "reasoning", "thinking"))
        self.refusal += said["refusal"] if isinstance(said.get("refusal"), str) else ""

    def _hear_text(self, content: Any) -> None:
        text = content if isinstance(content, str) else joined(content)
        if text is None:
            return
        self.spoke = True
        self.text += text
        if len(self.text) > LIMIT:
            raise TooLargeError("the answer is larger than the limit for one answer")

    def stopped(self, stops: Sequence[str]) -> bool:
        """Whether nothing that follows can change the answer."""
        return bool(self.finish) or (bool(stops) and ended(self.text, stops))

    def partial(self, stops: Sequence[str]) -> Completion | None:
        """The answer so far, if there is more of it to show than before."""
        text = safe(self.text, stops)
        if len(text) <= self.shown:
            return None
        self.shown = len(text)
        return Completion(text)

    def outcome(self, usage: Usage, stops: Sequence[str]) -> Outcome:
        """The answer, or why there is none."""
        if stops and met(self.text, stops) is not None:
            return self._completion(cut(self.text, stops), "stop", usage)
        error = self._fault()
        return Failure(error) if error else self._completion(self.text, "length" if self.finish in LENGTH else "stop", usage)

    def _completion(self, text: str, finish: str, usage: Usage) -> Completion:
        """The answer, with the log-probabilities of the tokens that begin in it."""
        if not self.chances:
            return Completion(text, finish, usage)
        begins = accumulate((len(token) for token, _ in self.chances), initial=0)
        told = tuple(chance for begin, (_, chance) in zip(begins, self.chances, strict=False) if begin < len(text))
        return Completion(text, finish, usage, logprobs=told)

    def _fault(self) -> ModelError | None:
        finish = self.finish
        if finish == "content_filter" or (self.refusal and not self.text):
            reason = excerpt(self.refusal) or "finish_reason is content_filter"
            return ContentFilterError(f"the server withheld the answer: {reason}")
        if self.error or finish == "error":
            return self.error or ServerError("the server failed in the middle of an answer")
        if finish in LENGTH and not self.text:
            thought = ", all spent on reasoning" if self.thought else ""
            return TruncatedError(f"the token limit was reached before there was an answer (finish_reason length{thought})")
        if not self.spoke:
            return MalformedError(
                f"the answer has no content (finish_reason {finish or 'missing'})", retryable=not finish.endswith("calls")
            )
        return None


def chances_of(told: Any) -> list[tuple[str, float]]:
    """Tokens and their log-probabilities, as chats or as completions write them.

    >>> chances_of({"content": [{"token": "a", "logprob": -0.5}]}), chances_of({"tokens": ["a"], "token_logprobs": [-0.5]})
    ([('a', -0.5)], [('a', -0.5)])
    """
    if not isinstance(told, dict):
        return []
    parts, tokens, chances = (listed(told.get(name)) for name in ("content", "tokens", "token_logprobs"))
    pairs = [(part.get("token"), part.get("logprob")) for part in parts if isinstance(part, dict)]
    pairs += zip(tokens, chances, strict=False)
    return [(str(token), float(chance)) for token, chance in pairs if isinstance(chance, (int, float))]


def listed(value: Any) -> list[Any]:
    """A list, or nothing."""
    return value if isinstance(value, list) else []


def joined(content: Any) -> str | None:
    """The text of a message's content, which may come in parts; None if there is none.

    >>> joined([{"type": "text", "text": "a"}, {"type": "reasoning", "text": "hm"}, {"type": "text", "text": "b"}])
    'ab'
    """
    if isinstance(content, list):
        texts = [part.get("text") for part in content if isinstance(part, dict) and part.get("type") in ("text", "output_text")]
        return "".join(text for text in texts if isinstance(text, str)) if texts else None
    return content if isinstance(content, str) else None


class Telling:
    """The choices of a streamed answer, told apart by index while they come."""

    def __init__(self, asked: int, stops: Sequence[str]) -> None:
        self._asked, self._stops = asked, stops
        self._voices: dict[int, Voice] = {}
        self._usage = Usage()
        self._fault: ModelError | None = None
        self.ended = False  # by the server's own word

    @property
    def complete(self) -> bool:
        """Whether every choice that was asked for has ended: all that may follow are counts."""
        return len(self._voices) == self._asked and all(map(self._stopped, self._voices.values()))

    @property
    def over(self) -> bool:
        """Whether to stop listening: the server has ended, or failed, or we end what it would go on with."""
        ended = self.ended or self._fault is not None
        return ended or (self.complete and not all(voice.finish for voice in self._voices.values()))

    @property
    def usage(self) -> Usage:
        """The tokens that it took, as far as the server has told."""
        return self._usage

    @property
    def fault(self) -> ModelError | None:
        """Why the choices that have not ended will not, once nothing more comes."""
        if self._fault or self.ended or (self._voices and all(map(self._stopped, self._voices.values()))):
            return self._fault
        return UnreachableError("the stream ended before the answer was complete")

    def _stopped(self, voice: Voice) -> bool:
        return voice.stopped(self._stops)

    def fail(self, error: ModelError) -> None:
        """Let ``error`` be what the choices that have not ended come to. The first one counts."""
        self._fault = self._fault or error

    def take(self, answer: dict[str, Any], refuse: Refuse) -> None:
        """Hear a whole answer from a server that does not stream."""
        self._voices, self._usage, self.ended = dict(enumerate(voices(answer, refuse)[: self._asked])), usage_of(answer), True

    def hear(self, datas: Sequence[bytes], refuse: Refuse) -> list[tuple[int, Completion]]:
        """The partial answers that events bring, each with the number of its choice; a few where very many come at once."""
        told: list[tuple[int, Completion]] = []
        step = max(1, len(datas) // SNAPSHOTS)
        for k in range(0, len(datas), step):
            told += self._hear_some(datas[k : k + step], refuse)
        return told

    def _hear_some(self, datas: Sequence[bytes], refuse: Refuse) -> Iterator[tuple[int, Completion]]:
        spoke: dict[int, Voice] = {}
        try:
            for data in datas:
                if not self.ended:
                    self._hear(data, spoke, refuse)
        except ModelError as error:
            self.fail(error)
        for index, voice in spoke.items():
            if shown := voice.partial(self._stops):
                yield index, shown

    def _hear(self, data: bytes, spoke: dict[int, Voice], refuse: Refuse) -> None:
        if data.strip() == b"[DONE]":
            self.ended = True
            return
        chunk = decoded(data)
        if is_error(chunk):
            raise refuse(chunk)
        if chunk.get("usage"):
            self._usage = usage_of(chunk)
        choices = chunk.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self._hear_choice(choice, spoke, refuse)

    def _hear_choice(self, choice: Any, spoke: dict[int, Voice], refuse: Refuse) -> None:
        index = choice.get("index", 0) if isinstance(choice, dict) else 0
        if not isinstance(index, int) or not 0 <= index < self._asked:
            return
        voice = self._voices.get(index) or self._voices.setdefault(index, Voice())
        if not voice.stopped(self._stops):
            spoke[index] = voice
            voice.heard(choice, "delta", refuse)

    def outcomes(self) -> dict[int, Outcome]:
        """What each choice has come to. Choices of which nothing was heard are left out if others were."""
        fault = self.fault or MalformedError("the answer holds no choices")
        if not self._voices:
            return {index: Failure(fault) for index in range(self._asked)}
        heard = dict(sorted(self._voices.items()))
        ends = zip(heard.items(), settled(list(heard.values()), self._usage, self._stops), strict=True)
        ended = self.ended and self._fault is None
        return {index: end if ended or voice.stopped(self._stops) else Failure(fault) for (index, voice), end in ends}
