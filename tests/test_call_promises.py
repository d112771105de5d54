"""What a call over the wire promises (rows C1 to C8), each in small and, marked long, at full size."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest

import outlines_like as ol
from outlines_like import bridge
from outlines_like.errors import ModelError, RowErrors
from outlines_like.models import openai, pacing, remote, wire

from .replay import Arrival, Replay, Step, choices, events, piece, respond, streamed
from .test_remote import fifty

long = pytest.mark.long


@pytest.fixture(autouse=True)
def plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pacing, "TRIP", 10**9)  # a server is asked as ever, however often it fails


def sizes(small: Any, full: Any) -> list[Any]:
    """A small version of a test, and the full one."""
    return [pytest.param(small, id="small"), pytest.param(full, marks=long, id="full")]


def told(**figures: Any) -> None:
    """Print what a long test has measured: `make test-long` shows it."""
    print(
        ", ".join(
            f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}" for name, value in figures.items()
        )
    )


def word_of(arrival: Arrival) -> str:
    """The prompt of a request."""
    return str(arrival.json["messages"][0]["content"])


# C1: deadlines.

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
SLOW = {"delay": 0.05}
HOSTILE = [
    Step(end="hang"),
    Step(b"H", end="hang"),
    Step(b"HTTP/1.1 200 OK\r\n", end="hang"),
    Step(HEAD * 500, every=9, **SLOW),
    Step(HEAD + b"Content-Length: 999\r\n\r\n", end="hang"),
    Step(HEAD + b"Content-Length: 99999\r\n\r\n" + b" " * 99999, every=7, **SLOW),
    Step(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 9999, every=6, **SLOW),
    Step(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"0" * 9999, every=5, **SLOW),
    Step(HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n", end="hang"),
    Step(b"HTTP/1.1 100 Continue\r\n\r\n" * 500, every=25, **SLOW),
    Step(b"HTTP/1.1 100 Continue\r\n\r\n", end="hang"),
    Step(b"HTTP/1.1 102 Processing\r\n\r\n" * 500, every=27, **SLOW),
    Step(SSE + b"\r\n" + b": still here\n\n" * 9999, every=14, **SLOW),
    Step(SSE + b"\r\n" + b"data: " + b"x" * 9999, every=7, **SLOW),
    Step(SSE + b"\r\n" + events(*(piece("a") for _ in range(999))), every=70, **SLOW),
    Step(SSE + b"\r\n" + events(piece("a")), end="hang"),
    Step(SSE + b"\r\n" + b"\n" * 9999, every=3, **SLOW),
    Step(SSE + b"\r\n" + b"event: ping\n\n" * 999, every=13, **SLOW),
    Step(HEAD + b"Content-Encoding: gzip\r\nContent-Length: 999\r\n\r\n" + gzip.compress(b"{}")[:12], end="hang"),
    Step(b"HTTP/1.1 500 Oops\r\nContent-Length: 99\r\n\r\n", end="hang"),
    Step(b"HTTP/1.1 429 Wait\r\nRetry-After: 60\r\nContent-Length: 2\r\n\r\n{}"),
    Step(b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 2\r\n\r\n{}"),
    Step(b"HTTP/1.1 302 Found\r\nLocation: /", end="hang"),
    Step(end="abort", wait=0.3),
]


@pytest.mark.parametrize(
    ("times", "deadline"), [pytest.param(1, 0.5, id="small"), pytest.param(20, 2.0, marks=long, id="full")]
)
def test_a_deadline_is_a_deadline_whatever_the_server_does(replay: Replay, times: int, deadline: float) -> None:
    """C1: retries included, plain and streamed, in a fifth of the calls with the library's own timeout as well."""
    took: list[float] = []

    async def plain(model: Any, prompt: str) -> None:
        await model.acall(prompt)

    async def watched(model: Any, prompt: str) -> None:
        async for _ in model.stream(prompt):
            pass

    async def one(k: int, step: Step, ask: Callable[..., Any], number: int) -> None:
        url = replay.play(f"hostile{k}-{ask.__name__}-{number}", step)
        model = openai("m", base_url=url, timeout=deadline / 2 if number % 5 == 0 else 600.0)
        begun = time.perf_counter()
        with pytest.raises((TimeoutError, ModelError)):
            async with asyncio.timeout(deadline):
                await ask(model, "hi")
        took.append(time.perf_counter() - begun)

    async def in_rounds() -> None:
        for number in range(times):  # 48 calls at once: more would measure how long it takes to make them
            await asyncio.gather(*(one(k, step, ask, number) for k, step in enumerate(HOSTILE) for ask in (plain, watched)))

    asyncio.run(in_rounds())
    told(calls=len(took), deadline=deadline, latest=max(took))
    assert len(took) == 48 * times
    assert deadline < 1 or max(took) <= deadline + 0.25


@pytest.mark.parametrize("calls", sizes(100, 10_000))
def test_the_wait_for_a_turn_counts_against_nobody(replay: Replay, calls: int) -> None:
    """C1: with a timeout far below the time that the queue takes."""
    url = replay.play("queue", lambda arrival: respond(choices(word_of(arrival)), wait=0.02))
    model = openai("m", base_url=url, concurrency=8 if calls < 1000 else 64, timeout=2.0, retries=0)
    prompts = [f"{i}" for i in range(calls)]
    assert model(prompts).tolist() == prompts


# C2: memory.

BOMBER = """
import asyncio, gzip, sys, zlib
ZEROS = gzip.compress(b" " * 2**26, 9)
def head(*lines):
    return "\\r\\n".join(["HTTP/1.1 200 OK", *lines, "", ""]).encode()
ENDLESS = {
    "plain": (head("Content-Type: application/json", "Content-Length: 1000000000"), b" " * 65536),
    "gzip": (head("Content-Encoding: gzip", "Connection: close"), ZEROS),
    "members": (head("Content-Encoding: gzip", "Connection: close"), gzip.compress(b" " * 70000, 9) * 200),
    "br": (head("Content-Encoding: br", "Connection: close"), b"\\x0b" * 65536),
    "zstd": (head("Content-Encoding: zstd", "Connection: close"), b"\\x28" * 65536),
    "deflate": (head("Content-Encoding: deflate", "Connection: close"), zlib.compress(b" " * 2**24)),
    "line": (head("Content-Type: text/event-stream", "Connection: close"), b"data: " + b"x" * 65536),
    "lines": (head("Content-Type: text/event-stream", "Connection: close"), b"data: xxxxxxxxxx\\n" * 4000),
    "headers": (b"HTTP/1.1 200 OK\\r\\n", b"X-Long: " + b"x" * 60000 + b"\\r\\n"),
    "events": (head("Content-Type: text/event-stream", "Connection: close"),
               b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 60000 + b'"}}]}\\n\\n'),
}
async def serve(reader, writer):
    try:
        asked = (await reader.readuntil(b"\\r\\n\\r\\n")).decode()
        start, more = ENDLESS[asked.split("/")[1]]
        writer.write(start)
        sent = 0
        while sent < 10**9:
            writer.write(more)
            sent += len(more)
            await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
asyncio.run(main())
"""
FORMATS = ["plain", "gzip", "members", "br", "zstd", "deflate", "line", "lines", "headers", "events"]


@contextmanager
def bomber() -> Iterator[str]:
    """A process that answers without end, by the first part of the path."""
    with subprocess.Popen([sys.executable, "-c", BOMBER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.stdin.close()


@contextmanager
def peak() -> Iterator[list[float]]:
    """The most memory, in MB, that this process took beyond what it had."""
    process, stop, most = psutil.Process(), threading.Event(), [0.0]
    before = process.memory_info().rss

    def look() -> None:
        while not stop.wait(0.005):
            most[0] = max(most[0], (process.memory_info().rss - before) / 2**20)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield most
    finally:
        stop.set()
        watcher.join()


@pytest.mark.parametrize("times", sizes(1, 100))
def test_no_answer_takes_more_memory_than_the_limit(times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """C2: ten kinds of endless answers, 64 at a time, at a limit of 1 MiB."""
    for function in (wire.Inflater.__init__, wire.Framer.__init__, remote.Remote._body):
        monkeypatch.setattr(function, "__defaults__", (2**20,))
    monkeypatch.setattr(wire, "LIMIT", 2**20)
    monkeypatch.setattr(wire, "STREAM_LIMIT", 2**24)
    gate = asyncio.Semaphore(64)

    async def asked(url: str, kind: str, live: bool) -> Any:
        model = ol.vectorize(openai("m", base_url=f"{url}/{kind}/v1", retries=0, timeout=120.0), on_error="return")
        async with gate:
            if not live:
                return await model.acall("hi", seed=next(seeds))
            (answer,) = [value async for _, value, done in model.stream("hi") if done]
            return answer

    seeds = itertools.count()

    async def all_of(url: str) -> list[Any]:
        jobs = [asked(url, kind, bool(k % 2) or kind in ("line", "lines", "events")) for kind in FORMATS for k in range(times)]
        return await asyncio.gather(*jobs)

    with ol.cache.disabled(), bomber() as url, peak() as most:
        errors = asyncio.run(all_of(url))
    told(calls=len(errors), peak_mb=most[0])
    assert [isinstance(error, ModelError) for error in errors] == [True] * 10 * times
    assert times == 1 or most[0] < 128 + 64 * 2


# C3: every fault is one of ours.


def mangled(data: bytes, draw: random.Random) -> bytes:
    """Bytes with a few of them changed, doubled, lost or cut off."""
    told = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5, 20])):
        k = draw.randrange(len(told) or 1)
        match draw.randrange(5):
            case 0 if told:
                told[k] ^= 1 << draw.randrange(8)
            case 1:
                told[k:k] = bytes(draw.choices(b'\r\n\0\xff{}[]":,0a ', k=draw.randrange(1, 9)))
            case 2:
                del told[k : k + draw.randrange(1, 30)]
            case 3:
                told[k:k] = told[k : k + draw.randrange(1, 200)]
            case 4 if draw.random() < 0.2:
                del told[k:]
    return bytes(told)


@pytest.mark.parametrize("times", sizes(100, 10_000))
def test_every_mangled_answer_is_an_answer_or_an_error_of_ours(replay: Replay, times: int) -> None:
    """C3."""
    draw = random.Random(11)
    zipped = gzip.compress(b'{"choices":[{"message":{"content":"pong"},"finish_reason":"stop"}]}')
    whole = [
        respond(choices("pong")).data,
        respond(choices("a", "b")).data,
        streamed(events(piece("a"), piece("b", finish="stop"), "[DONE]")).data,
        respond(zipped, "200 OK", "Content-Encoding: gzip").data,
        respond({"error": {"message": "no", "type": "server_error"}}, "500 Oops", "Retry-After: 0", "x-request-id: r").data,
        respond("[" * 5000, "200 OK").data,
    ]
    mangle = {f"{i}": Step(mangled(draw.choice(whole), draw), end="close") for i in range(times)}
    url = replay.play("mangled", lambda arrival: mangle[word_of(arrival)])
    model = openai("m", base_url=url, retries=0, timeout=5.0, idle_timeout=2.0, concurrency=32)
    found = list(ol.vectorize(model, on_error="return")(list(mangle)[::2]))
    for _, value, done in ol.vectorize(model, on_error="return").stream(list(mangle)[1::2]):
        found += [value] if done else []
    kinds = {type(value).__mro__[-4 if isinstance(value, ModelError) else 0].__name__ for value in found}
    told(answers=sum(isinstance(value, str) for value in found), errors=sum(isinstance(value, ModelError) for value in found))
    assert len(found) == times
    assert [value for value in found if not isinstance(value, (str, ModelError))] == [], kinds


# C4: a cut answer is no answer.


@pytest.mark.parametrize("end", ["close", "reset"])
@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("step", sizes(53, 1))
def test_a_stream_cut_at_any_byte_is_no_answer_before_its_end_was_said(
    replay: Replay, end: str, chunked: bool, step: int
) -> None:
    """C4."""
    whole = streamed(fifty(), chunked=chunked).data
    said = len(whole) - whole[::-1].index(b'"stop"'[::-1])  # from here on all of the text, and its end, is there
    url = replay.play("cut", lambda arrival: Step(whole[: int(word_of(arrival))], end=end))
    model = ol.vectorize(openai("m", base_url=url, retries=0, concurrency=16), on_error="return")
    cuts = list(range(0, len(whole), step))
    with ol.cache.disabled():
        told_of = {cuts[index[0]]: value for index, value, done in model.stream([f"{k}" for k in cuts]) if done}
    taken = [k for k, value in told_of.items() if isinstance(value, str)]
    told(cuts=len(cuts), accepted_before_the_end=sum(k <= said for k in taken))
    assert all(k > said for k in taken)
    assert {told_of[k] for k in taken} <= {"".join(f"w{i} " for i in range(10))}


# C5: a row fails alone.

FAULTS: Sequence[Step] = (
    respond({"error": "no"}, "400 Bad"),
    respond({"error": "slow down"}, "429 Wait"),
    respond({}, "500 Oops"),
    respond("<html>", "502 Bad", "Content-Type: text/html"),
    respond({"error": {"message": "later", "code": 503}}),
    respond({"choices": []}),
    respond(choices("", finish="content_filter")),
    respond({"choices": None}),
    Step(end="abort"),
    Step(respond(choices("x")).data[:-5], end="reset"),
    Step(respond(choices("x")).data[:30], end="close"),
    Step(b"nonsense\r\n\r\n", end="close"),
)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("n", sizes(60, 10_000))
def test_rows_fail_alone_each_at_its_index(replay: Replay, n: int, share: float) -> None:
    """C5: in arrays of several shapes."""
    draw = random.Random(5)
    bad = {f"p{i}": draw.choice(FAULTS) for i in range(n) if draw.random() < share or i == 7}
    url = replay.play("alone", lambda arrival: bad.get(word_of(arrival)) or respond(choices(word_of(arrival).upper())))
    model = ol.vectorize(openai("m", base_url=url, retries=0, concurrency=32), on_error="return")
    prompts = np.array([f"p{i}" for i in range(n)], dtype=object)
    for shape in ((n,), (n // 20, 5, 4), (3, 0)):
        given = prompts[: int(np.prod(shape))].reshape(shape)
        answers = model(given)
        assert answers.shape == shape
        for prompt, answer in zip(given.flat, answers.flat, strict=True):
            assert isinstance(answer, ModelError) if prompt in bad else answer == prompt.upper()
    told(rows=n, failures=len(bad))
    assert isinstance(model("p7"), ModelError)


# C6: what is done is kept.


async def interrupted(model: Any, prompts: list[str], log: list[Arrival], after: int, window: float) -> set[str]:
    """Cancel a call when ``after`` rows were asked; what had been answered ``window`` seconds before."""
    work = asyncio.ensure_future(model.acall(prompts))
    while len(log) < after:
        await asyncio.sleep(0.001)
    now = time.monotonic()
    work.cancel()
    return {word_of(arrival) for arrival in log if 0 < arrival.sent_at < now - window}


@pytest.mark.parametrize(
    ("interrupts", "calls", "concurrency", "window"),
    [pytest.param(2, 60, 2, 0.2, id="small"), pytest.param(300, 1000, 64, 0.05, marks=long, id="full")],
)
def test_what_was_answered_before_an_interrupt_is_kept(
    replay: Replay, tmp_path: Any, interrupts: int, calls: int, concurrency: int, window: float
) -> None:
    """C6: whatever the server had sent 50 ms before is in the store."""
    draw, kept, lost = random.Random(6), 0, 0
    for number in range(interrupts):
        url = replay.play(f"kept{number}", lambda arrival: respond(choices(word_of(arrival).upper()), wait=0.01))
        model, log = openai("m", base_url=url, concurrency=concurrency), replay.log(f"kept{number}")
        prompts = [f"{number}-{i}" for i in range(calls)]
        with ol.cache.at(tmp_path / f"{number}"):
            safe = asyncio.run(interrupted(model, prompts, log, draw.randrange(calls // 2, calls), window))
            before = len(log)
            assert model(prompts).tolist() == [prompt.upper() for prompt in prompts]
            again = {word_of(arrival) for arrival in log[before:]}
        kept, lost = kept + len(safe), lost + len(safe & again)
        bridge.wait(bridge.disown(("store", str(tmp_path / f"{number}"))).aclose)  # type: ignore[union-attr]
    told(interrupts=interrupts, answered_before=kept, lost=lost)
    assert lost == 0


def test_the_error_of_an_array_holds_what_succeeded(replay: Replay) -> None:
    """C6."""
    url = replay.play("partial", respond(choices("pong")), rules={"bad": [respond({}, "400 No")]})
    with pytest.raises(RowErrors) as caught:
        openai("m", base_url=url)(["ok", "bad", "fine"])
    assert caught.value.partial[[0, 2]].tolist() == ["pong", "pong"]
    assert list(caught.value.errors) == [(1,)]


# C7: dead connections.


@contextmanager
def closing(draw: random.Random) -> Iterator[tuple[str, list[int]]]:
    """A server that closes its connections at about the moment when the next request comes."""
    counts = [0, 0]  # requests heard; connections closed on one

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (
                    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), draw.uniform(0.0, 0.004) if counts[0] else 5)
                ).decode()
                size = next(int(line.split(":")[1]) for line in head.lower().split("\r\n") if line.startswith("content-length"))
                await reader.readexactly(size)
                counts[0] += 1
                writer.write(respond(choices("pong")).data)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            counts[1] += 1
        finally:
            writer.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(serve, "127.0.0.1", 0), loop).result(10)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1", counts
    finally:
        loop.call_soon_threadsafe(server.close)
        asyncio.run_coroutine_threadsafe(ended(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def ended() -> None:
    """Wait for all other tasks of this loop."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("posts", sizes(50, 10_000))
def test_a_connection_that_dies_when_it_is_used_again_costs_no_error(posts: int) -> None:
    """C7."""
    draw = random.Random(1)

    async def ask(model: Any) -> None:
        for i in range(posts):
            assert await model.acall(f"{i}") == "pong"
            await asyncio.sleep(draw.uniform(0.0, 0.004))

    with ol.cache.disabled(), closing(draw) as (url, counts):
        asyncio.run(ask(openai("m", base_url=url)))
        told(posts=posts, heard=counts[0], connections_closed=counts[1])
        assert posts <= counts[0] <= posts + counts[1]


# C8: equal calls.


@pytest.mark.parametrize(
    ("threads", "calls", "prompts"), [pytest.param(4, 40, 10, id="small"), pytest.param(8, 1000, 100, marks=long, id="full")]
)
def test_equal_calls_of_many_threads_go_out_once(replay: Replay, threads: int, calls: int, prompts: int) -> None:
    """C8."""
    url = replay.play("equal", lambda arrival: respond(choices(word_of(arrival).upper()), wait=0.02))
    model, wrong = openai("m", base_url=url), list[str]()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(calls):
            prompt = f"p{draw.randrange(prompts)}"
            wrong.extend([prompt] * (model(prompt) != prompt.upper()))

    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []
    assert len(replay.log("equal")) == prompts
