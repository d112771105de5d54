"""A deterministic model for tests, docs and dry runs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..arrays import plain
from ..checks import count
from ..errors import MalformedError
from ..events import Burst, Bursts, Event, Failure
from ..layers import Limit, batched, cached, deduped, retried
from ..occasions import identity, text_of
from ..programs import outputs
from ..requests import Completion, Request, Usage, digest
from ..stops import cut
from .base import Model, family
from .parameters import COMMON, FORMS, Check, number, preset

PARAMETERS: Mapping[str, Check] = {**COMMON, **FORMS}
READ: Mapping[str, Callable[[Any], outputs.Form]] = {
    "choices": outputs.choice,
    "regex": outputs.pattern,
    "json_schema": outputs.schema,
}
Answer = Callable[[Request], str]
Fail = Callable[[Request], Exception | None]


def shout(request: Request) -> str:
    """The prompt in capitals."""
    return request.text.upper()


def named(answer: Answer) -> str:
    """What tells one fake's answers from another's: the function's code, and what it holds as far as that has a text."""
    try:
        return digest(plain(identity(answer)))
    except TypeError:
        code = answer.__code__ if hasattr(answer, "__code__") else type(answer).__call__.__code__
        return digest(plain([type(answer).__qualname__, text_of(code)]))


def check(answer: object, fail: object, delay: float, retries: int) -> None:
    """What a fake may be made of."""
    for name, given in (("answer", answer), ("fail", fail)):
        if not callable(given):
            raise TypeError(f"{name}={given!r:.60}; it takes a function of a request, like lambda request: request.text")
    number(0)("delay", delay)
    count("retries", retries, 0)


def fake(
    answer: Answer = shout,
    *,
    name: str = "fake",
    chat: bool = False,
    prefill: bool = False,
    fail: Fail = lambda request: None,
    log: list[list[Request]] | None = None,
    delay: float = 0.0,
    concurrency: int = 64,
    retries: int = 4,
    **defaults: Any,
) -> Model:
    """A model that answers each request with ``answer(request)``: by default the prompt, ``request.text``, in capitals.

    ``log`` gets a list of requests for every call that reaches it; ``fail`` may give the error of a request, which is
    tried again as a server would be, without a wait; ``delay`` is the seconds that a call takes. With ``chat`` it reads
    conversations, with ``prefill`` it goes on in the middle of a turn. A watched answer comes word by word; ``stop`` and
    ``max_tokens`` (words) are kept, and an answer that is not in the form asked for (``choices``, ``regex``, ``json_schema``)
    is a :class:`MalformedError`.

    >>> import outlines_like as ol
    >>> ol.models.fake()(["hi", "there"]).tolist()
    ['HI', 'THERE']
    """
    check(answer, fail, delay, retries)

    async def run(requests: Sequence[Request]) -> Bursts:
        if log is not None:
            log.append(list(requests))
        if delay:
            await asyncio.sleep(delay)
        answers = [answer_to(request, answer, fail) for request in requests]
        if requests[0].terms.live:
            for burst in growing(answers):
                yield burst
                await asyncio.sleep(0)
        yield [Event(i, answer) for i, answer in enumerate(answers)]

    again, limit = retried(retries + 1, wait=lambda attempt, errors: 0.0), Limit(concurrency)
    batches = batched(by=family, concurrency=concurrency, within=lambda: limit)
    layers = [again, batches, deduped("models"), cached()]
    kind = f"fake:{named(answer)}:{'chat' if chat else 'text'}"
    return Model(
        name,
        run,
        endpoint=kind,
        defaults=preset(fake, defaults, PARAMETERS),
        layers=layers,
        parameters=PARAMETERS,
        chat=chat,
        prefill=prefill,
    )


def growing(answers: Sequence[Completion | Failure]) -> Iterator[Burst]:
    """The words of watched answers, one answer after the other."""
    for i, answer in enumerate(answers):
        words = answer.text.split(" ") if isinstance(answer, Completion) else []
        yield from ([Event(i, Completion(" ".join(words[:k])), False)] for k in range(1, len(words)))


def answer_to(request: Request, answer: Answer, fail: Fail) -> Completion | Failure:
    """The answer, or the failure that was asked for."""
    error = fail(request)
    return Failure(error) if error is not None else ended(answer(request), request)


def ended(text: str, request: Request) -> Completion | Failure:
    """The text as stop strings, form and limit leave it."""
    try:
        text = formed(cut(text, request.params.get("stop", ())), request.params)
    except MalformedError as error:
        return Failure(MalformedError(str(error), retryable=False))  # it would say the same again
    words, limit = text.split(" "), request.params.get("max_tokens", math.inf)
    if len(words) <= limit:
        return Completion(text, "stop", Usage(request.text.count(" ") + 1, len(words)))
    return Completion(" ".join(words[:limit]), "length", Usage(request.text.count(" ") + 1, limit))


def formed(text: str, params: Mapping[str, Any]) -> str:
    """The text in the form that it is held to, if it is in that."""
    for name in READ.keys() & params.keys():
        text = READ[name](params[name]).read(text).text
    return text
