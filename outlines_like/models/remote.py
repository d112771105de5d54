"""Models behind an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec
import yarl

from .. import bridge
from ..checks import count, seconds
from ..errors import AuthenticationError, ModelError, NotFoundError, TimedOutError
from ..events import Burst, Bursts, Event, Failure, Layer, subset
from ..layers import batched, cached, deduped, halted, retried
from ..requests import Request, Usage
from ..streams import interleave
from . import quirks, refusals, wire
from .accounts import PATHS, Account, Azure, beside
from .base import Model, Way
from .connections import FAULTS, WIRE, Prepared, Response, Watch, Wire, drain, fault, session, unheard
from .counting import Counts
from .masking import bare
from .orders import Orders
from .pacing import Pace, Speed, Turn, speed
from .parameters import COMMON, Check, flag, number, plain, preset, schema, text
from .quirks import Dialect

LINGER = 1.0  # seconds to wait for the counts after all choices of a stream have ended
JSON = "application/json"
HEADERS = {"Content-Type": JSON, "Accept-Encoding": "gzip", "User-Agent": "outlines_like"}
PLAIN = Dialect()
REASON = 65536  # bytes of a refusal that are read

PARAMETERS: Mapping[str, Check] = {
    **COMMON,
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "min_p": number(0, 1),
    "repetition_penalty": number(0),
    "logit_bias": plain,
    "response_format": plain,
    "json_schema": schema,
    "logprobs": flag,
    "reasoning_effort": text,
    "user": text,
    "extra_body": plain,
}


class Settings(NamedTuple):
    """How patient a remote model is, in seconds, and how much it asks at once."""

    speed: Speed
    timeout: float
    idle_timeout: float
    trust_env: bool
    prefill: bool = False


class Deadlines:
    """Ends what takes longer than ``seconds``: with one timer for all, as a timer each costs 5 us a request."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[asyncio.Task[Any], float] = {}  # in order, as all have the same time
        self._late: dict[asyncio.Task[Any], int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._due[task] = due = loop.time() + self._seconds
        self._timer = self._timer or loop.call_at(due, self._strike, loop)

    def _strike(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        for task, due in list(self._due.items()):
            if due > loop.time():
                self._timer = loop.call_at(due, self._strike, loop)
                return
            del self._due[task]
            self._late[task] = task.cancelling()
            task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        task = asyncio.current_task()
        assert task is not None
        if task not in self._late:
            del self._due[task]
        elif task.uncancel() <= self._late.pop(task) and kind is asyncio.CancelledError:
            raise TimeoutError  # unless someone else cancelled too


class Link:
    """The connections to one server as one customer, and what was learnt about it. The library's loop owns it."""

    def __init__(self, account: Account, trust_env: bool) -> None:
        shown = {name: value.reveal() for name, value in account.headers.items()}
        self._session = session({**HEADERS, **shown}, trust_env)
        self.url = yarl.URL(account.url.reveal())
        self._keyless = account.keyless
        self._question: Prepared | None = None
        self.dialects: dict[str, Dialect] = {}
        self._deadlines: dict[float, Deadlines] = {}

    def dialect(self, model: str) -> Dialect:
        """How requests for ``model`` are written."""
        return self.dialects.get(model, PLAIN)

    def learn(self, model: str, dialect: Dialect) -> None:
        """Add to what is known."""
        self.dialects[model] = self.dialect(model).joined(dialect)

    def beside(self, path: str) -> yarl.URL:
        """The address of ``path``, which may have a query, on the level of the endpoints' own paths."""
        there = yarl.URL(path)
        return self.url.with_path(beside(self.url.path) + there.path).with_query({**self.url.query, **there.query})

    def deadlines(self, seconds: float) -> Deadlines:
        """Bounds the time of each request."""
        if seconds not in self._deadlines:
            self._deadlines[seconds] = Deadlines(seconds)
        return self._deadlines[seconds]

    async def ask(self, body: bytes) -> Response:
        """Put a question to the endpoint."""
        self._question = self._question or await self._prepared("POST", self.url)
        return await self._question.send(body)

    async def exchange(self, method: str, path: str, body: bytes, kind: str) -> Response:
        """Send a request to what stands :meth:`beside` the endpoint."""
        return await (await self._prepared(method, self.beside(path), **{"Content-Type": kind})).send(body)

    async def _prepared(self, method: str, url: yarl.URL, **headers: str) -> Prepared:
        if self._keyless:
            raise AuthenticationError("no API key is set")
        return await Prepared.of(self._session, method, url, **headers)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._session.close()


class Remote:
    """An OpenAI-compatible endpoint as a backend."""

    def __init__(self, account: Account, endpoint: str, settings: Settings) -> None:
        self.account, self.endpoint, self.settings = account, endpoint, settings
        self.counts = Counts()

    async def run(self, requests: Sequence[Request]) -> Bursts:
        """Answer ``requests``; those that differ in the sample number alone travel together."""
        link = self._link()
        if len(requests) == 1 and not requests[0].terms.live:
            yield await self._whole(link, requests)  # the common case takes the short way
            return
        batches = self._plan(requests)
        async with aclosing(interleave(partial(self._batch, link, requests), batches, self.settings.speed.most)) as bursts:
            async for burst in bursts:
                yield burst

    async def exchange(
        self,
        method: str,
        path: str,
        hear: Callable[[bytes], object],
        *,
        body: bytes = b"",
        kind: str = JSON,
        limit: int = wire.LIMIT,
    ) -> None:
        """Ask ``path``, which stands beside the endpoint, and let ``hear`` have the bytes of the answer as they come."""
        link = self._link()
        async with self.pace("").turn(0.0, self.counts):
            try:
                with link.deadlines(self.settings.timeout):
                    response = await link.exchange(method, path, body, kind)
                    if response.status != 200:
                        raise (await self._refusal(response))[1]
                    try:
                        await self._read(response, hear, limit)
                    finally:
                        response.close()
            except ModelError:
                raise
            except FAULTS as error:
                raise fault(error, self.account.place, self.settings.timeout) from None

    def dialect(self, model: str) -> Dialect:
        """How requests for ``model`` are written."""
        return self._link().dialect(model)

    def learn(self, model: str, dialect: Dialect) -> None:
        """Add to what is known of that."""
        self._link().learn(model, dialect)

    def company(self, request: Request) -> str:
        """What requests have in common that one HTTP request can answer."""
        return quirks.company(request, self._link().dialect(request.model))

    def _plan(self, requests: Sequence[Request]) -> list[list[int]]:
        """The rows of each HTTP request."""
        together: dict[str, list[int]] = {}
        for row, request in enumerate(requests):
            together.setdefault(self.company(request), []).append(row)
        return list(together.values())

    def _link(self) -> Link:
        trust_env = self.settings.trust_env
        return bridge.owned(("link", self.account.name, trust_env), lambda: Link(self.account, trust_env))

    def pace(self, model: str) -> Pace:
        """How fast ``model`` is asked, over all that ask it as this customer."""
        pace = bridge.owned(("pace", self.account.customer, model), lambda: Pace(self.settings.speed))
        pace.settle(self.settings.speed)
        return pace

    def _turn(self, asked: Sequence[Request]) -> Turn:
        """Leave to send a request."""
        pace = self.pace(asked[0].model)
        return pace.turn(quirks.weight(asked[0], len(asked)) if pace.weighs else 0.0, self.counts)

    def rest(self, model: str, attempt: int, errors: Collection[Exception]) -> float:
        """Seconds before a request for ``model`` is tried again."""
        self.counts.retried += 1
        return self.pace(model).rest(attempt, errors)

    async def _batch(self, link: Link, requests: Sequence[Request], rows: list[int]) -> Bursts:
        """The answers of one HTTP request, then those that the server left out of it."""
        left, asked = set(rows), [requests[row] for row in rows]
        tell = self._watched if any(request.terms.live for request in asked) else self._told_whole
        async with aclosing(tell(link, asked)) as bursts:
            async for burst in bursts:
                left.difference_update(rows[event.row] for event in burst if event.done)
                yield [Event(rows[row], value, done) for row, value, done in burst]
        if left:
            link.learn(asked[0].model, Dialect(choices=max(1, len(rows) - len(left))))
            async with aclosing(subset(self.run, requests, sorted(left))) as bursts:
                async for burst in bursts:
                    yield burst

    async def _told_whole(self, link: Link, asked: Sequence[Request]) -> Bursts:
        yield await self._whole(link, asked)

    async def _whole(self, link: Link, asked: Sequence[Request]) -> Burst:
        """All choices of an answer, which comes in one piece."""
        try:
            async with self._turn(asked):
                outcomes = await self._timely(link, asked)
        except ModelError as error:
            outcomes = [Failure(error)] * len(asked)
        return [Event(row, bare(outcome)) for row, outcome in enumerate(outcomes)]

    async def _timely(self, link: Link, asked: Sequence[Request]) -> list[wire.Outcome]:
        """The answers, in time. Any fault is an error of ours."""
        try:
            with link.deadlines(self.settings.timeout):
                return await self._answers(link, asked)
        except ModelError:
            raise
        except FAULTS as error:
            raise fault(error, self.account.place, self.settings.timeout) from None

    async def _answers(self, link: Link, asked: Sequence[Request]) -> list[wire.Outcome]:
        response = await self._accepted(link, asked, live=False)
        try:
            answer = wire.decoded(await self._body(response), response.headers.get("Content-Type", ""), self.account.mask)
        finally:
            response.close()
        self._weigh(asked, wire.usage_of(answer))
        return wire.answers(answer, len(asked), asked[0].params.get("stop", ()), partial(self._inner, response.headers))

    def _weigh(self, asked: Sequence[Request], usage: Usage) -> None:
        """Count the tokens that an answer took, and book them where they matter, in place of those expected."""
        self.counts.spend(usage)
        pace = self.pace(asked[0].model)
        if pace.weighs and usage.prompt_tokens:
            pace.weigh(usage.prompt_tokens + usage.completion_tokens - quirks.weight(asked[0], len(asked)))

    async def _accepted(self, link: Link, asked: Sequence[Request], *, live: bool) -> Response:
        """A response with status 200. What a refusal teaches about the server is kept, and tried at once."""
        model = asked[0].model
        while True:
            dialect = link.dialect(model)
            sent = quirks.body(asked[0], len(asked), dialect, endpoint=self.endpoint, live=live, prefill=self.settings.prefill)
            response = await self._post(link, sent)
            self._hear(model, response.headers)
            if response.status == 200:
                return response
            said, error = await self._refusal(response)
            known = quirks.learnt(dialect, said, sent) if response.status in (400, 422) else dialect
            if known == dialect:
                raise error
            link.learn(model, known)

    async def _post(self, link: Link, sent: Mapping[str, Any]) -> Response:
        body = msgspec.json.encode(sent)
        while True:
            WIRE.set(wire := Wire())
            try:
                return await link.ask(body)
            except FAULTS as error:
                if wire.opened or not unheard(error):
                    raise  # else the server had closed a connection that we kept, and every try uses up one of those

    def _hear(self, model: str, headers: Mapping[str, str]) -> None:
        """Take the server's word on what is left of its limits."""
        if told := refusals.allowances(headers, time.time()):
            self.pace(model).hear(told)

    async def _refusal(self, response: Response) -> tuple[refusals.Said, ModelError]:
        """What a server that did not answer says instead."""
        try:
            said = refusals.said(await self._body(response, REASON))
        except (ModelError, *FAULTS):
            said = refusals.Said()  # the status says enough
        finally:
            response.close()
        self.counts.refuse(error := self._refused(response, said))
        return said, error

    def _refused(self, response: Response, said: refusals.Said) -> ModelError:
        """The error for an answer that is none."""
        if 300 <= response.status < 400:
            return self._elsewhere(response)
        error = refusals.refusal(response.status, response.headers, said, mask=self.account.mask, now=time.time())
        if isinstance(error, NotFoundError):
            error.hint = self._lost(response.path)
        return error

    def _lost(self, path: str) -> str:
        """What to do where ``path`` was not found."""
        if path.endswith(PATHS[self.endpoint]):
            return f"Asked {self.account.place} for this model; check the model's name, and base_url= (most end in /v1)."
        return f"Asked for {path}; via='batch' needs a server with a Batch API."

    def _elsewhere(self, response: Response) -> ModelError:
        target = refusals.excerpt(response.headers.get("Location", "?").partition("?")[0], self.account.mask)
        return NotFoundError(f"{self.account.place} redirects to {target}; redirects are not followed", status=response.status)

    def _inner(self, headers: Mapping[str, str], answer: Any) -> ModelError:
        """The error that an answer with status 200 holds."""
        return refusals.inner_refusal(answer, headers, mask=self.account.mask, now=time.time())

    async def _body(self, response: Response, limit: int = wire.LIMIT) -> bytes:
        """All of a body, decoded, up to ``limit`` bytes."""
        length = response.length
        if length is not None and length <= limit and "Content-Encoding" not in response.headers:
            return await response.content.read()  # what its headers say already bounds it
        parts: list[bytes] = []
        await self._read(response, parts.append, limit)
        return b"".join(parts)

    async def _read(self, response: Response, hear: Callable[[bytes], object], limit: int) -> None:
        inflater = wire.Inflater(response.headers.get("Content-Encoding", ""), limit)
        async for part in response.content.iter_any():
            hear(inflater.feed(part))
        inflater.finish()

    async def _watched(self, link: Link, asked: Sequence[Request]) -> Bursts:
        """Ask, and tell all choices while they come."""
        telling = wire.Telling(len(asked), asked[0].params.get("stop", ()))
        try:
            async with self._turn(asked), aclosing(self._heard(link, asked, telling)) as bursts:
                async for burst in bursts:
                    yield burst
        except ModelError as error:
            telling.fail(error)
        self._weigh(asked, telling.usage)
        yield [Event(row, bare(outcome)) for row, outcome in telling.outcomes().items()]

    async def _heard(self, link: Link, asked: Sequence[Request], telling: wire.Telling) -> Bursts:
        """The partial answers of a stream. Any fault is an error of ours."""
        try:
            async with aclosing(self._told(link, asked, telling)) as bursts:
                async for burst in bursts:
                    yield burst
        except ModelError:
            raise
        except FAULTS as error:
            raise fault(error, self.account.place, self.settings.timeout) from None
        if broken := telling.fault:
            raise broken

    async def _told(self, link: Link, asked: Sequence[Request], telling: wire.Telling) -> Bursts:
        """The partial answers of a stream."""
        until = asyncio.get_running_loop().time() + self.settings.timeout
        async with asyncio.timeout_at(until):
            response = await self._accepted(link, asked, live=True)
        silent = TimedOutError(f"{self.account.place} fell silent in the middle of an answer, or took too long for it")
        watch = Watch(response, until, silent)
        try:
            if "json" in response.headers.get("Content-Type", ""):
                telling.take(wire.decoded(await self._body(response)), partial(self._inner, response.headers))
                return
            async with aclosing(self._pieces(response, telling, watch)) as bursts:
                async for burst in bursts:
                    yield burst
            if telling.ended:
                await drain(response)
        finally:
            watch.stop()
            response.close()

    async def _pieces(self, response: Response, telling: wire.Telling, watch: Watch) -> Bursts:
        """What is read, told apart. It ends when nothing that matters can follow."""
        inflater, framer = wire.Inflater(response.headers.get("Content-Encoding", ""), wire.STREAM_LIMIT), wire.Framer()
        refuse = partial(self._inner, response.headers)
        async for part in response.content.iter_any():
            watch.stop()
            if burst := [Event(*told, False) for told in telling.hear(framer.feed(inflater.feed(part)), refuse)]:
                yield burst
            if telling.over:
                return
            watch.start(LINGER if telling.complete else self.settings.idle_timeout)
        watch.stop()
        inflater.finish()
        if burst := [Event(*told, False) for told in telling.hear(framer.finish(), refuse)]:
            yield burst


def openai(
    model: str,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    api_version: str | None = None,
    endpoint: Literal["chat", "completions"] = "chat",
    concurrency: int | tuple[int, int] = (64, 256),
    rpm: float | None = None,
    tpm: float | None = None,
    timeout: float = 600.0,
    idle_timeout: float = 60.0,
    retries: int = 4,
    prefill: bool = False,
    headers: Mapping[str, str] | None = None,
    trust_env: bool = False,
    **defaults: Any,
) -> Model:
    """A model behind an OpenAI-compatible server.

    ``base_url`` and ``api_key`` are taken from OPENAI_BASE_URL and OPENAI_API_KEY if not given; a server on this machine
    needs no key. With ``api_version`` it is Azure's: ``base_url`` is the resource's address, ``model`` the deployment, and
    AZURE_OPENAI_ENDPOINT and AZURE_OPENAI_API_KEY are asked first. A chat endpoint takes text (one user message) or a
    conversation, ``endpoint="completions"`` raw text.

    ``concurrency`` bounds the requests under way over all models with this address, key and name: the number at the start and
    the most that it may grow to while the server bears it, or one number for both. ``rpm`` and ``tpm`` bound requests and
    tokens a minute. ``timeout`` is the time for one request, not counting the wait for its turn; ``idle_timeout`` the longest
    silence in the middle of a stream; both in seconds. A request that fails for a reason that may pass is sent up to
    ``retries`` more times. ``headers`` go with every request; proxies and ``~/.netrc`` are used only if ``trust_env``. Any
    further keyword is a sampling parameter that holds for all calls; ``extra_body`` holds fields that only this server knows.
    ``prefill`` says that the server, as vLLM's does, goes on where a conversation ends in the middle of the assistant's turn.
    """
    if endpoint not in PATHS:
        raise ValueError(f"endpoint={endpoint!r}; it is {' or '.join(map(repr, PATHS))}")
    timeout, idle_timeout = seconds("timeout", timeout), seconds("idle_timeout", idle_timeout)
    count("retries", retries, 0)
    bounds = speed(concurrency, rpm, tpm)
    azure = None if api_version is None else Azure(api_version, model)
    account = Account(base_url, api_key, endpoint, headers or {}, azure)
    remote = Remote(account, endpoint, Settings(bounds, timeout, idle_timeout, trust_env, prefill))
    by_batch = Way(Orders(remote, retries).run, (deduped("batches"), cached()))  # online calls do not wait for a batch
    return Model(
        model,
        remote.run,
        endpoint=f"{endpoint} {account.place}" + (" prefill" if prefill else ""),
        defaults=preset(openai, defaults, PARAMETERS),
        layers=layers_of(remote, model, retries),
        parameters=PARAMETERS,
        company=remote.company,
        chat=endpoint == "chat",
        prefill=prefill,
        counts=remote.counts,
        ways={"batch": by_batch},
    )


def layers_of(remote: Remote, model: str, retries: int) -> list[Layer]:
    """What stands round a remote model: a call that waits for its next try keeps its place."""
    again = retried(retries + 1, wait=partial(remote.rest, model))
    batches = batched(by=remote.company, concurrency=remote.settings.speed.most, within=lambda: remote.pace(model).calls)
    return [again, batches, halted, deduped("models"), cached()]
