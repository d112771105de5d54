"""Many requests to real sockets: gentle with the server, right through faults, gone when left, silent about keys."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import logging
import pickle
import random
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

import outlines_like as ol
from outlines_like import bridge
from outlines_like.errors import AuthenticationError, ModelError, QuotaError, TimedOutError, UnreachableError
from outlines_like.models import Model, openai, pacing

from .backends import within
from .replay import DATA, Arrival, Replay, Step, choices, events, piece, respond, streamed

long = pytest.mark.long
KEY = "sk-test-CANARY+/=456"
PONG = respond(choices("pong"))
STRICT = [sys.executable, "-X", "dev", "-W", "error"]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits between tries."""
    for name in ("FIRST", "REST", "LONGEST"):
        monkeypatch.setattr(pacing, name, 0.02)


def model_at(url: str, **settings: Any) -> Model:
    return openai("m", base_url=url, **settings)


def word_of(arrival: Arrival) -> str:
    word: str = arrival.json["messages"][0]["content"]
    return word


def sized(small: int, full: int) -> Any:
    """A test at its small size, and at the full one in `make test-long`."""
    return pytest.mark.parametrize("size", [small, pytest.param(full, marks=long)])


def run(code: str, *arguments: object, seconds: float = 120) -> str:
    """What a script prints that says nothing else."""
    command = [*STRICT, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


# Faults


def storm(dice: random.Random) -> Callable[[Arrival], Step]:
    """A server that fails in every way, in 30 of 100 requests."""
    good = respond(choices("x")).data
    faults = [
        respond({"error": "slow down"}, "429 Wait", "retry-after-ms: 5"),
        respond({"error": "slow down"}, "429 Wait"),
        respond({}, "500 Oops"),
        respond("<html>", "503 Busy", "Content-Type: text/html"),
        respond({"error": {"message": "later", "code": 502}}),
        Step(good, end="abort"),
        Step(good[:-5], end="reset"),
        Step(good[:30], end="close"),
        Step(b"", end="hang"),
    ]

    def answer(arrival: Arrival) -> Step:
        return dice.choice(faults) if dice.random() < 0.3 else respond(choices(word_of(arrival).upper()))

    return answer


@sized(200, 10_000)
def test_in_a_storm_every_row_gets_its_own_answer(replay: Replay, hasty: None, size: int) -> None:
    """C5, R4: all are right, in their own cells, for at most 1.6 requests a row."""
    url = replay.play("storm", storm(random.Random(7)))
    model = model_at(url, concurrency=64, retries=12, timeout=0.4)
    assert model([f"p{i}" for i in range(size)]).tolist() == [f"P{i}" for i in range(size)]
    assert len(replay.log("storm")) <= 1.6 * size


@pytest.mark.parametrize(
    "fault",
    [
        respond({}, "500 Oops"),
        respond({}, "429 Wait"),
        respond("x", "200 OK", "Content-Type: text/plain"),
        respond({"error": {"message": "m", "code": 503}}),
        Step(PONG.data, end="abort"),
        Step(PONG.data[:-3], end="close"),
        Step(b"", end="hang"),
    ],
    ids=["500", "429", "text", "inner", "abort", "cut", "stall"],
)
def test_no_fault_is_sent_more_often_than_the_tries_allow(
    replay: Replay, hasty: None, fault: Step, request: pytest.FixtureRequest
) -> None:
    """R4 and R5: one layer tries again; also what timed out, which may have been paid for."""
    case = f"tries-{request.node.callspec.id}"
    model = model_at(replay.play(case, fault), retries=2, timeout=0.2)
    with pytest.raises(ModelError):
        model("hi")
    assert len(replay.log(case)) == 3


@pytest.mark.parametrize("how", ["function", "pipe", "programs"])
def test_a_refused_key_is_shown_few_times_by_calls_that_know_nothing_of_each_other(
    replay: Replay, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A lifted function asks row by row, and so do a pipe and programs: after 20 refusals in a row the rest is not sent."""
    monkeypatch.setattr(pacing, "REST", 60.0)
    refused = respond({"error": {"message": "bad key"}}, "401 Unauthorized", "Retry-After: 3600")
    model = model_at(replay.play(f"refused-{how}", refused), concurrency=16)
    rows = [f"p{i}" for i in range(400)]
    ways: dict[str, Callable[[], Any]] = {
        "function": lambda: ol.vectorize(lambda row: model(row), concurrency=16, on_error="return")(rows),
        "pipe": lambda: ol.pipe(str, model, concurrency=16, on_error="return")(rows),
        "programs": lambda: model.run_batched([ol.user(row) + ol.assistant(ol.gen()) for row in rows], on_error="return"),
    }
    got = ways[how]()
    assert {type(error) for error in got} == {AuthenticationError}
    assert len(replay.log(f"refused-{how}")) <= 20 + 3 * 16
    assert "not sent, as" in str(got[-1])


FATES = [
    ("refused", respond({"error": "slow down"}, "429 Wait")),
    ("refused", respond({}, "500 Oops")),
    ("refused", respond("<html>", "503 Busy", "Content-Type: text/html")),
    ("refused", respond({"error": {"message": "later", "code": 502}})),
    ("broken", Step(b"", end="abort")),
    ("broken", Step(PONG.data[:-5], end="reset")),
    ("broken", Step(PONG.data[:30], end="close")),
    ("broken", respond("x", "200 OK", "Content-Type: text/plain")),
    ("timed_out", Step(b"", end="hang")),
]


@sized(18, 1000)
@pytest.mark.parametrize("watched", [False, True], ids=["eager", "watched"])
def test_the_report_says_what_the_server_saw(replay: Replay, hasty: None, size: int, watched: bool) -> None:
    """R5: a fault for each row, and then an answer; also what timed out, and may have been paid for, is in the report."""
    seen: Counter[str] = Counter()
    fates: dict[str, Iterator[tuple[str, Step]]] = {}
    taught = iter([("refused", respond({"error": "use 'max_completion_tokens' instead of 'max_tokens'"}, "400 No"))])

    def answer(arrival: Arrival) -> Step:
        fate = fates.setdefault(word_of(arrival), iter([FATES[len(fates) % len(FATES)]]))
        kind, step = next(taught, None) or next(fate, ("answered", PONG))
        seen[kind] += 1
        return replace(step, data=step.data.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))

    url = replay.play(f"report-{size}-{watched}", answer)
    model = model_at(url, concurrency=64, timeout=0.6 if size < 1000 else 2.0, max_tokens=9)
    rows = [f"p{i}" for i in range(size)]
    assert (model.stream(rows) | ol.collect if watched else model(rows)).tolist() == ["pong"] * size
    counts = model.counts
    print(f"rows {size:,}, {counts}")
    assert {kind: getattr(counts, kind) for kind in ("answered", "refused", "broken", "timed_out")} == dict(seen)
    assert counts.sent == len(replay.log(f"report-{size}-{watched}"))
    assert counts.retried == size
    assert (counts.prompted, counts.written) == (3 * size, 2 * size)
    model(rows)
    assert counts.sent == len(replay.log(f"report-{size}-{watched}"))  # all from the store


def test_what_was_left_or_never_sent_is_told_apart(replay: Replay) -> None:
    model = model_at(replay.play("left", Step(b"", end="hang")))

    async def leave() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await model.acall("hi")

    asyncio.run(leave())
    assert (model.counts.left, model.counts.sent) == (1, 1)
    keyless = openai("m")
    with pytest.raises(AuthenticationError):
        keyless("hi")
    assert keyless.counts.sent == 0
    assert keyless.prefilled_tokens == 0


def test_a_kept_connection_that_is_dead_is_replaced_at_once(replay: Replay) -> None:
    """C7: not a try of its own, so that it works without any; a new connection that breaks is an error."""
    model = model_at(replay.play("dead", PONG, Step(end="abort"), PONG, Step(end="close"), PONG), retries=0)
    assert [model(word) for word in "abc"] == ["pong"] * 3
    assert [word_of(arrival) for arrival in replay.log("dead")] == list("abbcc")
    fresh = model_at(replay.play("dead-fresh", Step(end="abort")), retries=0, headers={"X-Fresh": "1"})
    with pytest.raises(UnreachableError):
        fresh("a")
    assert len(replay.log("dead-fresh")) == 1


@sized(200, 10_000)
def test_a_server_that_closes_idle_connections_costs_no_error(replay: Replay, size: int) -> None:
    """C7: at the racing moment; what is sent twice is what broke."""
    model = model_at(replay.play("racing", respond(choices("pong"), end="close")), retries=0, concurrency=16)
    assert model([str(i) for i in range(size)]).tolist() == ["pong"] * size
    assert len({word_of(arrival) for arrival in replay.log("racing")}) == size


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (AuthenticationError, respond({"error": {"message": "bad key"}}, "401 Unauthorized", wait=0.01)),
        (QuotaError, respond({"error": {"message": "x", "code": "insufficient_quota"}}, "429 Too Many Requests", wait=0.01)),
    ],
    ids=["key", "quota"],
)
def test_what_is_hopeless_stops_the_whole_map(replay: Replay, kind: type[ModelError], answer: Step) -> None:
    model = model_at(replay.play("hopeless", answer), concurrency=8)
    got = ol.vectorize(model, on_error="return")([f"{i}" for i in range(2000)])
    assert {type(error) for error in got} == {kind}
    assert len(replay.log("hopeless")) <= 16
    assert "not sent, as another request failed" in str(got[1999])
    replay.cases["hopeless"].steps = [PONG]
    assert model("again") == "pong"  # the next call is tried afresh


def test_a_retry_after_holds_for_the_other_requests_too(replay: Replay) -> None:
    """A gate for this host, key and model; another model is not held up."""
    slow = [respond({}, "429 Wait", "retry-after-ms: 400"), PONG]
    url = replay.play("gate", respond(choices("pong"), wait=0.002), rules={"row 20": slow})
    model = model_at(url, concurrency=4)
    assert model([f"row {i}." for i in range(60)]).tolist() == ["pong"] * 60
    log = replay.log("gate")
    refused = next(arrival.time for arrival in log if "row 20." in word_of(arrival))
    assert max(after.time - before.time for before, after in pairwise(log)) >= 0.39
    assert not any(refused + 0.05 < arrival.time < refused + 0.39 for arrival in log)


def test_limits_told_by_headers_are_kept_to(replay: Replay) -> None:
    """Of 10 requests a second 4 are left: what is more waits, and is not refused."""
    left = [4]

    def answer(arrival: Arrival) -> Step:
        left[0] = max(0, left[0] - 1)
        told = {"limit": 10, "remaining": left[0], "reset": f"{(10 - left[0]) * 20}ms"}
        return respond(choices("pong"), "200 OK", *(f"x-ratelimit-{name}-requests: {value}" for name, value in told.items()))

    model = model_at(replay.play("told", answer), concurrency=1)
    assert model([str(i) for i in range(12)]).tolist() == ["pong"] * 12
    gaps = [after.time - before.time for before, after in pairwise(replay.log("told"))]
    assert min(gaps[6:]) >= 0.015


def test_a_rate_is_kept_over_models_and_threads(replay: Replay) -> None:
    url = replay.play("rate", PONG)
    models = [model_at(url, rpm=1200) for _ in range(2)]  # 120 at once, then one in 55 ms
    with ol.cache.disabled():
        threads = [threading.Thread(target=model, args=([f"{k} {i}" for i in range(70)],)) for k, model in enumerate(models)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    times = [arrival.time for arrival in replay.log("rate")]
    assert len(times) == 140
    assert times[-1] - times[0] >= 10 * 60 / 1081  # the first may be late


@sized(300, 5000)
def test_few_file_handles_are_enough(replay: Replay, size: int) -> None:
    """With `ulimit -n 128`, and several servers at once, which together want more."""
    urls = [replay.play(f"files{k}", respond(choices("pong"), wait=0.01)) for k in range(2)]
    code = f"""
import resource, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
import outlines_like as ol
from outlines_like.models import pacing
pacing.FIRST = pacing.REST = 0.05
models = [ol.models.openai("m", base_url=url, retries=20) for url in {urls}]
out = {{}}
def ask(k):
    with ol.cache.disabled():
        out[k] = models[k]([str(i) for i in range({size // 2})]).tolist()
threads = [threading.Thread(target=ask, args=(k,)) for k in range(2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sum(values.count("pong") for values in out.values()))
"""
    assert run(code) == f"{size}\n"


SLOW_SERVER = """
import sys
from tests.replay import Arrival, Replay, Step, choices, respond
times = [float(line) for line in sys.stdin.readline().split()]
def answer(arrival):
    return respond(choices("pong"), wait=times[int(arrival.json["messages"][0]["content"])])
print(Replay().play("lognormal", answer), flush=True)
sys.stdin.read()
"""


@pytest.mark.long
def test_a_lognormal_run_is_within_a_twentieth_of_the_ideal_schedule() -> None:
    """1,000 requests at 400 ms, 256 in flight, over real sockets, to a server in a process of its own."""
    from .test_pacing import schedule

    dice = random.Random(3)
    times = [0.4 * dice.lognormvariate(-0.125, 0.5) for _ in range(1000)]
    command = [sys.executable, "-c", SLOW_SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=DATA.parents[2]) as server:
        assert server.stdin
        assert server.stdout
        server.stdin.write(" ".join(map(str, times)) + "\n")
        server.stdin.flush()
        model = model_at(server.stdout.readline().strip(), concurrency=256)
        assert model([str(i) for i in range(256)], seed=1).tolist() == ["pong"] * 256  # connections are open
        took = min(timed(model, [str(i) for i in range(1000)]) for _ in range(3))
    assert took <= 1.05 * schedule(times, 256)  # on a machine that has nothing else to do


def timed(model: Model, prompts: list[str]) -> float:
    """The seconds of a call, the store off."""
    begun = time.monotonic()
    with ol.cache.disabled():
        assert model(prompts).tolist() == ["pong"] * len(prompts)
    return time.monotonic() - begun


# What a call will cost


def test_a_plan_counts_calls_as_they_will_be_made(replay: Replay) -> None:
    model = model_at(replay.replay("A18", "A18-plan"))
    assert model.plan("hi", samples=3).calls == 1
    assert model.plan("hi", samples=3, seed=1).calls == 3
    model("hi", samples=3)
    assert len(replay.log("A18-plan")) == 3
    assert model.plan("ho", samples=3) == ol.Plan(rows=3, cached=0, unique=3, calls=3)
    assert model.plan(["hi", "ho"], samples=4) == ol.Plan(rows=8, cached=3, unique=8, calls=5)


# Azure


def test_azure_is_asked_by_deployment_version_and_its_own_header(replay: Replay) -> None:
    model = model_at(replay.play("azure-api", PONG).removesuffix("/v1"), api_key=KEY, api_version="2024-10-21")
    assert model("hi") == "pong"
    arrival = replay.log("azure-api")[0]
    assert arrival.path == "/azure-api/openai/deployments/m/chat/completions?api-version=2024-10-21"
    assert arrival.headers["api-key"] == KEY
    assert "authorization" not in arrival.headers


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("/az1/openai", "/az1/openai/deployments/m/chat/completions?api-version=v1"),
        ("/az1/openai/deployments/other", "/az1/openai/deployments/other/chat/completions?api-version=v1"),
        (
            "/az1/openai/deployments/other/chat/completions?api-version=old&x=1",
            "/az1/openai/deployments/other/chat/completions?x=1&api-version=v1",
        ),
    ],
)
def test_an_address_of_azure_may_be_given_in_part_or_whole(replay: Replay, given: str, path: str) -> None:
    replay.play("az1", PONG)
    model = model_at(f"http://127.0.0.1:{replay.port}{given}", api_version="v1", headers={"Authorization": "Bearer entra"})
    assert model("hi") == "pong"
    arrival = replay.log("az1")[0]
    assert (arrival.path, arrival.headers["authorization"]) == (path, "Bearer entra")
    assert "api-key" not in arrival.headers


def test_the_environment_names_azure(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_OPENAI_ENDPOINT", replay.play("azure-env", PONG).removesuffix("/v1") + "/")
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", KEY)
    assert openai("my-gpt", api_version="v1")("hi") == "pong"
    assert replay.log("azure-env")[0].path == "/azure-env/openai/deployments/my-gpt/chat/completions?api-version=v1"


# Leaving


def reading(model: Model, prompts: list[str], left: type[BaseException] | None) -> None:
    for _ in model.stream(prompts):
        if left:
            raise left
        break


async def cancelled(model: Model, prompts: list[str], begun: Callable[[], bool]) -> None:
    call = asyncio.ensure_future(model.acall(prompts))
    while not begun():
        await asyncio.sleep(0.001)
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call


async def timed_out(model: Model, prompts: list[str]) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await model.acall(prompts)


async def reading_async(model: Model, prompts: list[str]) -> None:
    async for _ in model.stream(prompts):
        break


@pytest.mark.parametrize("way", ["task.cancel", "asyncio.timeout", "break", "async break", "exception"])
def test_after_leaving_no_request_goes_out_and_those_in_flight_are_closed(replay: Replay, way: str) -> None:
    """L2: the rest is never sent, and the server sees its connections closed within a second."""
    url = replay.play("leave", Step(b"", end="hang"), rules={"row 0.": [respond(choices("pong"), wait=0.05)]})
    model, prompts = model_at(url, concurrency=16), [f"row {i}." for i in range(500)]
    if way == "task.cancel":
        asyncio.run(cancelled(model, prompts, lambda: len(replay.log("leave")) >= 16))
    elif way == "asyncio.timeout":
        asyncio.run(timed_out(model, prompts))
    elif way == "async break":
        asyncio.run(reading_async(model, prompts))
    else:
        with contextlib.suppress(LookupError):
            reading(model, prompts, LookupError if way == "exception" else None)
    assert all(arrival.gone.wait(1) for arrival in replay.log("leave") if word_of(arrival) != "row 0.")
    assert 0 < len(replay.log("leave")) <= 17  # 16 at a time, and one in place of the one that was answered


CTRL_C = """
import os, random, signal, sys, threading, time
import outlines_like as ol
model = ol.models.openai("m", base_url=sys.argv[1], concurrency=256)
dice, times = random.Random(5), []
def strike():
    global struck
    struck = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)
for k in range(int(sys.argv[2])):
    timer = threading.Timer(dice.uniform(0.25, 0.7), strike)
    try:
        timer.start()
        with ol.cache.disabled():
            model([f"{k} {i}" for i in range(1000)])
        print("was not interrupted")
    except KeyboardInterrupt:
        times.append(time.monotonic() - struck)
    timer.join()
print(len(times), sorted(times)[-1 - len(times) // 100])
"""


@sized(2, 300)
def test_ctrl_c_gives_control_back_and_nothing_is_sent_after(replay: Replay, size: int) -> None:
    """L1 and L2: interrupts at random moments with 256 requests in flight; not a word is said of them."""
    url = replay.play("ctrl-c", respond(choices("pong"), wait=0.2))
    count, slowest = run(CTRL_C, url, size, seconds=1500).split()
    assert int(count) == size
    assert size < 100 or float(slowest) < 0.5
    rounds = [int(word_of(arrival).split()[0]) for arrival in replay.log("ctrl-c")]
    assert rounds == sorted(rounds)  # nothing of a call that was interrupted went out during a later one
    assert len(rounds) < 1000 * size


def test_a_script_that_is_interrupted_says_little(replay: Replay) -> None:
    """L1: the traceback of the user's own KeyboardInterrupt, and nothing of ours."""
    url = replay.play("ctrl-c-exit", Step(b"", end="hang"))
    code = (
        CTRL_C.replace("except KeyboardInterrupt", "except LookupError").replace("1000", "200").replace("0.25, 0.7", "1, 1.2")
    )
    done = subprocess.run([*STRICT, "-c", code, url, "1"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert not any(word in done.stderr for word in ("Unclosed", "never", "Exception ignored", "Task"))
    assert len(done.stderr.splitlines()) <= 12


def open_things() -> tuple[int, int, int]:
    """Open files, threads, and tasks on the library's loop."""

    async def tasks() -> int:
        return len(asyncio.all_tasks())

    gc.collect()
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith("asyncio_")]  # pools of the loops
    return psutil.Process().num_fds(), len(threads), bridge.wait(tasks)


@sized(12, 1000)
def test_runs_leave_nothing_behind(replay: Replay, size: int) -> None:
    """L3: in turn, from 8 threads, and inside `asyncio.run`."""
    model = model_at(replay.play("leak", PONG), concurrency=4)

    def runs(kind: int, count: int) -> None:
        for k in range(count):
            prompts = [f"{kind} {k} {i}" for i in range(3)]
            out = asyncio.run(model.acall(prompts)) if kind % 2 else model(prompts)
            assert out.tolist() == ["pong"] * 3

    def round_of(count: int) -> None:
        threads = [threading.Thread(target=runs, args=(kind, count)) for kind in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    with ol.cache.disabled():
        round_of(3)
        before = open_things()
        rss = psutil.Process().memory_info().rss
        within(lambda: round_of(size // 8 + 1), 600)
        after = open_things()
    assert after[0] <= before[0] + 4  # kept connections come and go
    assert after[1] <= before[1]
    assert after[2] == before[2]
    assert size < 1000 or psutil.Process().memory_info().rss < 1.2 * rss  # the log of the server in this process grows too


@sized(3, 100)
def test_forked_children_have_connections_of_their_own(replay: Replay, size: int) -> None:
    """L4: forks while requests are in flight; every process gets its own answers."""
    url = replay.play("fork", lambda arrival: respond(choices(word_of(arrival).upper()), wait=0.02))
    code = f"""
import os, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import outlines_like as ol
model, out, over = ol.models.openai("m", base_url={url!r}, concurrency=8), [], []
ol.cache.disabled()
model("warm")
def ask():
    with ol.cache.disabled():
        while not over:
            out.append(model([f"parent {{i}}" for i in range(16)]).tolist() == [f"PARENT {{i}}" for i in range(16)])
thread = threading.Thread(target=ask)
thread.start()
good = 0
for k in range({size}):
    if not (pid := os.fork()):
        words = [f"child {{k}} {{i}}" for i in range(5)]
        os._exit(0 if model(words).tolist() == [word.upper() for word in words] else 1)
    good += os.waitpid(pid, 0)[1] == 0
over.append(1)
thread.join()
print(good, all(out))
"""
    assert run(code, seconds=600) == f"{size} True\n"


@sized(3, 1000)
@pytest.mark.parametrize("way", ["break", "del", "exception", "async"])
def test_streams_that_are_left_close_their_connections(replay: Replay, way: str, size: int) -> None:
    """L5: nothing stays open, however they are left."""
    url = replay.play("left", streamed(events(*(piece("w ") for _ in range(4000))), every=2000, delay=0.02))
    model = model_at(url)
    for k in range(size):
        if way == "async":
            asyncio.run(reading_async(model, [f"{k}"]))
        elif way == "del":
            stream = iter(model.stream(f"{k}"))
            next(stream)
            del stream
            gc.collect(1)  # it is young
        else:
            with contextlib.suppress(LookupError):
                reading(model, [f"{k}"], LookupError if way == "exception" else None)
    assert len(replay.log("left")) == size
    assert all(arrival.gone.wait(5) for arrival in replay.log("left"))


# Secrets and safety


def faults_that_echo(key: str) -> Iterator[Step]:
    """48 faults that tell the key back, in bodies and headers."""
    spelt = [key, quote(key, safe=""), base64.b64encode(key.encode()).decode()]
    for status in ("200 OK", "400 Bad", "401 No", "403 No", "404 Where", "429 Wait", "500 Oops", "503 Busy"):
        yield respond({"error": {"message": f"key {spelt[0]}", "code": "x", "param": spelt[1]}}, status)
        yield respond(f"<html>{' '.join(spelt)}", status, "Content-Type: text/html")
        yield respond({"detail": [{"loc": ["header", spelt[1]], "msg": f"bad {spelt[2]}"}]}, status)
        yield respond({"error": spelt}, status, f"x-request-id: {spelt[0]}", f"Location: /{spelt[1]}")
        yield respond(f'{{"error": "{spelt[0]}', status)
        yield Step(respond({"error": spelt[0]}, status).data[:-4], end="close")


def test_a_canary_key_is_seen_nowhere(replay: Replay, caplog: pytest.LogCaptureFixture, store_folder: Path) -> None:
    """X1: 50 kinds of faults, and every place where text may end up."""
    caplog.set_level(logging.DEBUG)
    steps = [*faults_that_echo(KEY), Step(end="abort"), Step(f"HTTP/1.1 200 {KEY}\r\n{KEY}\r\n\r\n".encode(), end="close")]
    seen = []
    for number, step in enumerate(steps):
        model = model_at(replay.play(f"canary{number}", step), api_key=KEY, retries=0)
        error = ol.vectorize(model, on_error="return")(["hi"])[0]
        assert isinstance(error, ModelError)
        shown = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
        seen += [str(error), repr(error), repr(vars(error)), shown, pickle.dumps(error).decode("latin-1"), repr(vars(model))]
    seen += [caplog.text, *(file.read_bytes().decode("latin-1") for file in store_folder.rglob("*") if file.is_file())]
    spelt = {KEY, quote(KEY), quote(KEY, safe=""), base64.b64encode(KEY.encode()).decode().rstrip("=")}
    assert len(steps) == 50
    assert not any(word in text for text in seen for word in spelt)


TLS = DATA.parent / "tls"
SECURE = """
import os, sys
import outlines_like as ol
for url in sys.argv[1:]:
    model = ol.models.openai("m", base_url=url, retries=0)
    error = ol.vectorize(model, on_error="return")(["hi"])[0]
    print(type(error).__name__, getattr(error, "retryable", None), "no secure connection" in str(error))
"""


def tls_server(name: str, accepted: list[str]) -> int:
    """The port of a server with the certificate of that name; whoever trusts it is noted, and hung up on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(TLS / f"{name}.pem")
    import socket

    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as connection, contextlib.suppress(OSError):
                    with context.wrap_socket(connection, server_side=True) as secure:
                        secure.recv(1000)
                        accepted.append(f"{name} {secure.version()}")

    threading.Thread(target=serve, daemon=True).start()
    port: int = server.getsockname()[1]
    return port


def test_certificates_are_verified_whatever_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """X3: expired and for another host are refused, once; a good one of the same authority is taken; no switch turns it off."""
    accepted: list[str] = []
    for name in ("PYTHONHTTPSVERIFY", "SSL_VERIFY", "CURL_CA_BUNDLE", "REQUESTS_CA_BUNDLE", "NODE_TLS_REJECT_UNAUTHORIZED"):
        monkeypatch.setenv(name, "0" if "BUNDLE" not in name else "")
    monkeypatch.setenv("SSL_CERT_FILE", str(TLS / "ca.pem"))
    urls = [f"https://localhost:{tls_server(name, accepted)}/v1" for name in ("expired", "wrong_host", "good")]
    refused = "UnreachableError False True\n"
    assert run(SECURE, *urls) == refused * 2 + "UnreachableError True False\n"
    assert {line.split()[0] for line in accepted} == {"good"}
    assert all(line.split()[1] in ("TLSv1.2", "TLSv1.3") for line in accepted)


LURES = [
    "file:///etc/passwd",
    "file://localhost/etc/hostname",
    "/etc/passwd",
    "../../../../etc/passwd",
    "~/.netrc",
    "{url}/lure",
    "http://169.254.169.254/latest/meta-data/",
    "ftp://127.0.0.1/x",
    "data:text/plain;base64,aGk=",
    "gopher://127.0.0.1:70/",
    "http://[::1]:1/x",
    "\\\\server\\share\\x",
    "@/etc/passwd",
    "![x]({url}/lure)",
    "<img src='{url}/lure'>",
]


@pytest.mark.parametrize("lure", LURES)
def test_addresses_in_prompts_are_text(replay: Replay, lure: str) -> None:
    """X6: nothing is fetched or opened by us; parts of messages travel as they are."""
    trap = replay.play("trap", PONG)
    replay.play("lures", PONG)
    text = lure.replace("{url}", trap)
    part = {"type": "image_url", "image_url": {"url": text}}
    model_at(replay.url("lures"))([text, [{"role": "user", "content": [part]}]])
    said = [body["messages"][0]["content"] for body in replay.bodies("lures")]
    assert text in said
    assert [part] in said
    assert replay.log("trap") == []


@sized(40, 10_000)
def test_odd_documents_are_answers_or_errors_of_ours(replay: Replay, size: int) -> None:
    """X5: deep, huge, with NaN, with keys twice, cut, garbled: a text or an error of ours, and no recursion."""
    dice = random.Random(11)
    good = PONG.data.partition(b"\r\n\r\n")[2]

    def odd() -> bytes:
        kind = dice.randrange(6)
        if kind == 0:
            return b'{"choices":' + b"[" * dice.choice([100, 1000, 100_000]) + b"]" * 50
        if kind == 1:
            return good.replace(b'"index": 0', b'"index": ' + dice.choice([b"NaN", b"1e999", b"-0", b"9" * 400]))
        if kind == 2:
            return good.replace(b'"content"', b'"content": "first", "content"')
        if kind == 3:
            return good[: dice.randrange(len(good))]
        garbled = bytearray(good)
        for _ in range(dice.randint(1, 4)):
            garbled[dice.randrange(len(good))] = dice.randrange(256)
        return bytes(garbled)

    model = model_at(replay.play("odd", lambda arrival: respond(odd())), retries=0, concurrency=8)
    with ol.cache.disabled():
        got = ol.vectorize(model, on_error="return")([str(i) for i in range(size)])
    assert all(isinstance(value, (str, ModelError)) for value in got)
    assert any(value == "pong" for value in got)  # of a key that comes twice, the last counts


def test_a_wait_in_the_queue_counts_against_no_timeout(replay: Replay) -> None:
    """C1: 200 rows, 4 at a time, wait far longer for their turn than a request may take."""
    model = model_at(replay.play("queued", respond(choices("pong"), wait=0.02)), concurrency=4, timeout=0.5, retries=0)
    got = ol.vectorize(model, on_error="return")([str(i) for i in range(200)])
    assert not any(isinstance(value, TimedOutError) for value in got)


def test_the_wheel_needs_little_and_only_what_is_mended() -> None:
    """X7: at most six packages at run time, each from its last security fix on, and no hook that runs at start."""
    lines = (Path(__file__).parents[1] / "setup.cfg").read_text().split("install_requires =\n")[1].split("\n\n")[0].splitlines()
    needs = dict(line.strip().split(">=") for line in lines)
    assert len(needs) <= 6
    assert tuple(map(int, needs["aiohttp"].split("."))) >= (3, 14, 3)
    assert not list(Path(ol.__file__).parents[1].glob("*.pth"))


def test_importing_opens_no_connection() -> None:
    """X7: also not those of the model that asks servers."""
    code = """
import socket
def refuse(*args, **kwargs): raise AssertionError("a socket")
import asyncio
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
import outlines_like as ol
import outlines_like.models.remote
ol.models.openai("m", base_url="http://localhost:1/v1")
print("quiet")
"""
    assert run(code) == "quiet\n"
