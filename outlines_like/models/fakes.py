"""A deterministic model for tests, docs and dry runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..events import Burst, Bursts, Event, Failure
from ..layers import batched, cached, deduped, limited, retried
from ..occasions import identity
from ..requests import Completion, Request, Usage, digest
from ..stops import cut
from .base import Model


def shout(request: Request) -> str:
    """The prompt in capitals."""
    return request.text.upper()


def fake(
    answer: Callable[[Request], str] = shout,
    *,
    name: str = "fake",
    chat: bool = False,
    fail: Callable[[Request], Exception | None] = lambda request: None,
    log: list[list[Request]] | None = None,
    delay: float = 0.0,
    concurrency: int = 64,
    retries: int = 4,
    **defaults: Any,
) -> Model:
    """A model that answers each request with ``answer(request)``, by default the prompt in capitals.

    ``log`` gets a list of requests for every call that reaches it; ``fail`` may give the error of a request; ``delay`` is the
    seconds that a call takes. A watched answer comes word by word; ``stop`` and ``max_tokens`` (words) are kept.

    >>> import outlines_like as ol
    >>> ol.models.fake()(["hi", "there"]).tolist()
    ['HI', 'THERE']
    """

    async def run(requests: Sequence[Request]) -> Bursts:
        if log is not None:
            log.append(list(requests))
        await asyncio.sleep(delay)
        for burst in bursts(requests, answer, fail):
            yield burst
            if not burst[-1].done:
                await asyncio.sleep(0)

    layers = [retried(retries + 1), limited(concurrency), batched(by=lambda r: r.family, concurrency=concurrency), deduped(), cached()]
    kind = f"fake:{digest(identity(answer))}:{'chat' if chat else 'text'}"
    return Model(name, run, endpoint=kind, defaults=defaults, layers=layers)


def bursts(requests: Sequence[Request], answer: Callable[[Request], str], fail: Callable[[Request], Exception | None]) -> Iterator[Burst]:
    """All answers at once, or one after the other and word by word where they are watched."""
    whole: Burst = []
    for i, request in enumerate(requests):
        if error := fail(request):
            whole.append(Event(i, Failure(error)))
            continue
        completion = ended(answer(request), request)
        if request.terms.live:
            words = completion.text.split(" ")
            yield from ([Event(i, Completion(" ".join(words[:k])), False)] for k in range(1, len(words)))
        whole.append(Event(i, completion))
    yield whole


def ended(text: str, request: Request) -> Completion:
    """The text as stop strings and limit leave it."""
    text = cut(text, request.params.get("stop", []))
    words, limit = text.split(" "), request.params.get("max_tokens")
    kept = words[:limit]
    usage = Usage(len(request.text.split(" ")), len(kept))
    return Completion(" ".join(kept), "length" if len(kept) < len(words) else "stop", usage)
