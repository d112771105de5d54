"""The parent's side of local models, with workers that follow a script: they die, hang, and are left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from outlines_like.errors import BadRequestError, ContextLengthError, NotFoundError, UnreachableError, WorkerError
from outlines_like.events import last_values
from outlines_like.models import hubs, nurseries, queues
from outlines_like.models.notices import Notice
from outlines_like.models.nurseries import Nursery, process
from outlines_like.models.pools import Pool
from outlines_like.models.queues import Job, Queue
from outlines_like.requests import Completion, Request, Terms
from outlines_like.streams import Mailbox
from outlines_like.worker.wire import Setup

ACTOR = Path(__file__).with_name("scripted_worker.py")


def request(prompt: Any, sample: int = 0, live: bool = False) -> Request:
    return Request("here", "m", prompt, {}, 0, sample, Terms(live=live))


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Makes pools of scripted workers on this test's own loop, and closes them."""
    monkeypatch.setattr(nurseries, "command", lambda *task: [sys.executable, str(ACTOR), task[-1]])
    made: list[Pool] = []
    nursery: list[Nursery] = []

    def living() -> Nursery:
        if not nursery or nursery[-1].over:
            nursery.append(Nursery(process))
        return nursery[-1]

    def make(workers: int = 1, timeout: float = 100, path: str = "/model") -> Pool:
        made.append(Pool(Setup(path, "auto", "auto", False, workers, timeout=timeout), living))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()
        assert not one._workers
    for one in nursery:
        await one.aclose()


async def answers(pool: Pool, *prompts: Any) -> list[Any]:
    values = await last_values(pool.run([request(prompt) for prompt in prompts]), len(prompts))
    return [value.text if isinstance(value, Completion) else value.error for value in values]


# The pool, with workers that follow a script


async def test_rows_are_answered_in_their_own_places(pool: Any) -> None:
    prompts = [f"echo {number}" for number in range(1000)]
    assert await answers(pool(2), *prompts) == prompts


async def test_no_rows_start_no_worker(pool: Any) -> None:
    empty = pool()
    assert await answers(empty) == []
    assert not empty._seats


async def test_several_calls_share_one_worker(pool: Any) -> None:
    one = pool()
    got = await asyncio.gather(*(answers(one, f"echo {call}", "echo who") for call in range(8)))
    assert [first for first, _ in got] == [f"echo {call}" for call in range(8)]
    assert len({who for _, who in got}) == 1


async def test_workers_share_the_rows(pool: Any) -> None:
    two = pool(2)
    async with aclosing(two.run([request("hold", sample) for sample in range(100)])) as bursts:
        reading = asyncio.ensure_future(anext(bursts))
        while sum(len(worker.jobs) for worker in two._workers) < 100:
            await asyncio.sleep(0.01)
        assert [len(worker.jobs) for worker in two._workers] == [50, 50]
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_worker_killed_in_a_batch_is_replaced_and_its_rows_are_done_again(pool: Any, tmp_path: Path) -> None:
    got = await answers(pool(), *["echo a"] * 4, f"die once {tmp_path / 'mark'}", *["echo b"] * 3)
    assert got == [*["echo a"] * 4, "alive", *["echo b"] * 3]


async def test_a_row_that_kills_its_workers_fails_alone_and_the_next_call_works(pool: Any) -> None:
    one = pool()
    got = await answers(one, "echo a", "die", "echo b", "die", "echo c")
    assert [got[0], got[2], got[4]] == ["echo a", "echo b", "echo c"]
    for error in (got[1], got[3]):
        assert isinstance(error, WorkerError)
        assert "SIGKILL" in str(error)
        assert "out of memory?" in str(error)
    assert await answers(one, "echo again") == ["echo again"]


@pytest.mark.parametrize(("way", "deaths"), [("exit", 2), ("segv", 2), ("kill", 4)])
async def test_a_row_alone_is_blamed_after_two_deaths_and_later_where_somebody_else_may_have_killed(
    pool: Any, way: str, deaths: int
) -> None:
    one = pool()
    assert isinstance((await answers(one, f"die by {way}"))[0], WorkerError)
    assert (one.counts.started, one.counts.died) == (deaths, deaths)


async def test_text_that_was_shown_is_not_taken_back_when_its_worker_dies(pool: Any, tmp_path: Path) -> None:
    shown = []
    async with aclosing(pool().run([request(f"partial {tmp_path / 'mark'}", live=True)])) as bursts:
        async for burst in bursts:
            shown += [event.value.text for event in burst]
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert shown[-1] == "one two three four"


async def test_leaving_early_takes_the_rows_out_of_the_worker(pool: Any) -> None:
    one = pool()
    async with aclosing(one.run([request("echo first"), *(request("hold", sample) for sample in range(300))])) as bursts:
        async for burst in bursts:
            assert burst[0].value.text == "echo first"
            break
    assert not one._queue
    assert [len(worker.jobs) for worker in one._workers] == [0]
    given, cancelled = (int(word) for word in (await answers(one, "how many?"))[0].split() if word.isdigit())
    assert cancelled == given - 2  # but for the first row and the question itself


async def test_a_fault_crosses_as_an_error_of_ours_and_what_cannot_cross_fails_alone(pool: Any) -> None:
    rows = [request("fault"), replace(request("echo a"), params={"seed": 2**70}), request("echo a")]
    got = await last_values(pool().run(rows), 3)
    assert isinstance(got[0].error, ContextLengthError)
    assert isinstance(got[1].error, BadRequestError)
    assert got[2].text == "echo a"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; print('no such tensor', file=sys.stderr); sys.exit(3)", ["exit code 3", "no such tensor", "/model"]),
        ("import os; os.kill(os.getpid(), 9)", ["SIGKILL", "out of memory?"]),
    ],
)
async def test_a_worker_that_does_not_start_is_an_error_with_its_last_words(
    pool: Any, monkeypatch: pytest.MonkeyPatch, script: str, words: list[str]
) -> None:
    monkeypatch.setattr(nurseries, "command", lambda *task: [sys.executable, "-c", script])
    one = pool()
    for error in await answers(one, "echo a", "echo b"):
        assert isinstance(error, WorkerError)
        assert all(word in str(error) for word in words)
    monkeypatch.setattr(nurseries, "command", lambda *task: [sys.executable, str(ACTOR), task[-1]])
    assert await answers(one, "echo c") == ["echo c"]


async def test_a_name_on_the_hub_is_refused_by_a_process_of_its_own_before_a_worker_is_made(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    one = pool(path="nobody/nothing-at-all")
    for error in await answers(one, "echo a", "echo b"):
        assert isinstance(error, UnreachableError)
        assert "'nobody/nothing-at-all' is not on this machine" in str(error)
    assert one.counts.started == 0


async def test_a_name_on_the_hub_is_the_folder_where_its_files_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "models--org--tiny" / "snapshots" / "abc"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    (tmp_path / "models--org--tiny" / "refs").mkdir()
    (tmp_path / "models--org--tiny" / "refs" / "main").write_text("abc")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert await hubs.fetched("org/tiny", pickled=False) == str(place)


async def test_a_worker_that_cannot_even_be_made_leaves_nobody_waiting(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nurseries, "command", lambda *task: ["/nowhere/python"])
    (error,) = await answers(pool(), "echo a")
    assert isinstance(error, WorkerError)
    assert "/nowhere/python" in str(error)


# Death


@pytest.mark.parametrize("way", ["kill", "segv", "exit", "raise"])
async def test_a_worker_that_dies_in_any_way_is_replaced_and_its_rows_are_done_again(
    pool: Any, tmp_path: Path, way: str
) -> None:
    one = pool(2)
    assert await answers(one, "echo a", f"die once {tmp_path / 'mark'} {way}", "echo b") == ["echo a", "alive", "echo b"]
    assert one.counts.died == 1


async def test_a_death_is_told_with_the_last_words_and_the_screen_stays_clean(pool: Any, capfd: Any) -> None:
    (error,) = await answers(pool(), "die after 10000 lines")
    assert "line 9999" in str(error)
    assert "line 9000" not in str(error)
    assert "exit code 3" in str(error)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("size", [200, pytest.param(1000, marks=pytest.mark.long)])
async def test_each_of_5_poison_rows_is_blamed_after_3_deaths_and_all_others_are_answered(pool: Any, size: int) -> None:
    one = pool(2)
    prompts = [f"echo {number}" for number in range(size)]
    poison = random.Random(0).sample(range(size), 5)
    got = await answers(one, *("die by exit" if number in poison else prompt for number, prompt in enumerate(prompts)))
    assert [number for number, answer in enumerate(got) if isinstance(answer, WorkerError)] == sorted(poison)
    assert [answer for answer in got if isinstance(answer, str)] == [p for n, p in enumerate(prompts) if n not in poison]
    assert one.counts.died <= 15


@pytest.mark.parametrize("stops", [1, pytest.param(20, marks=pytest.mark.long)])
async def test_a_worker_that_gives_no_sign_of_life_is_killed_and_its_rows_are_done_again(
    pool: Any, tmp_path: Path, stops: int
) -> None:
    one = pool(timeout=0.5)
    for number in range(stops):
        assert await answers(one, f"stop once {tmp_path / str(number)}", "echo a") == ["alive", "echo a"]
    assert one.counts.died == stops


async def test_a_row_that_makes_workers_hang_is_blamed(pool: Any) -> None:
    (error,) = await answers(pool(timeout=0.3), "stop")
    assert isinstance(error, WorkerError)
    assert "no sign of life for 0.3 s" in str(error)


async def test_an_idle_worker_may_be_silent(pool: Any) -> None:
    one = pool(timeout=5)
    first = await answers(one, "echo who")
    assert one._workers[0]._alarm is None
    assert await answers(one, "echo who") == first


@pytest.mark.parametrize("level", ["of the model", "of all models"])
async def test_a_nursery_that_dies_costs_its_workers_and_no_answer(pool: Any, level: str) -> None:
    one = pool()
    assert await answers(one, "echo a") == ["echo a"]
    reading = asyncio.ensure_future(answers(one, *["slow echo b"] * 50))
    while not any(worker.jobs for worker in one._workers):
        await asyncio.sleep(0.01)
    nursery = psutil.Process(one._workers[0].pid).parents()[level == "of all models"]
    nursery.kill()
    assert await reading == ["slow echo b"] * 50


@pytest.mark.parametrize(
    ("batches", "kills", "rate"),
    [
        (10, 3, 5),
        (10, 20, 100),
        pytest.param(1000, 200, 4, marks=pytest.mark.long),
        pytest.param(100, 200, 100, marks=pytest.mark.long),
    ],
)
async def test_under_random_kills_every_answer_is_right(pool: Any, batches: int, kills: int, rate: float) -> None:
    one, dice, asked = pool(2), random.Random(kills), 0
    killing = asyncio.ensure_future(kill(one, kills, dice, rate))
    while asked < batches or not killing.done():
        prompts = [f"slow echo {asked} {number}" for number in range(40)]
        assert await answers(one, *prompts) == prompts
        asked += 1
    assert one.counts.died == kills
    assert sorted(killing.result())[kills // 2] < 0.25  # half of them; a busy machine may be late now and then


async def kill(pool: Pool, count: int, dice: random.Random, rate: float) -> list[float]:
    """Kill busy workers at random moments, ``rate`` times a second or as often as there is one; after what time it was seen."""
    delays = []
    for number in range(1, count + 1):
        while pool.counts.died < number:
            await asyncio.sleep(dice.expovariate(rate))
            busy = [worker.pid for worker in pool._workers if worker.ready and worker.jobs]
            if busy and pool.counts.died < number:
                os.kill(dice.choice(busy), signal.SIGKILL)
                start = time.monotonic()
                while pool.counts.died < number:  # a dead one must not be killed again
                    await asyncio.sleep(0.001)
                delays.append(time.monotonic() - start)
    return delays


PARENT = """
import asyncio, sys
from outlines_like.models import nurseries
from outlines_like.models.nurseries import Nursery, process
from outlines_like.models.pools import Pool
from outlines_like.requests import Request, Terms
from outlines_like.worker.wire import Setup

nurseries.command = lambda *task: [sys.executable, sys.argv[1], task[-1]]

async def main(path, prompts):
    nursery = Nursery(process)
    rows = [Request("here", "m", prompt) for prompt in prompts]
    async for burst in Pool(Setup(path, "auto", "auto", False, 2), lambda: nursery).run(rows):
        print("answer", flush=True)
    await asyncio.Event().wait()

states = {"idle": ("/m", ["echo a"]), "busy": ("/m", ["echo a"] + ["hold"] * 9), "loading": ("/never", ["echo a"])}
asyncio.run(main(*states[sys.argv[2]]))
"""
STATES = ["idle", "busy", "loading"]


@pytest.mark.parametrize("times", [1, pytest.param(100, marks=pytest.mark.long)])
@pytest.mark.parametrize("state", STATES)
def test_when_the_parent_is_killed_no_worker_is_left_after_2_seconds(state: str, times: int) -> None:
    for _ in range(times):
        with parent(state) as process:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
        assert len(family) >= 2
        assert left_of(family, seconds=2) == []


def left_of(family: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Who still runs after that time. The dead whom nobody has buried yet do not."""
    end = time.monotonic() + seconds
    while (left := [one for one in family if runs(one)]) and time.monotonic() < end:
        time.sleep(0.005)
    return left


def runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@contextmanager
def parent(state: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process with a pool, in that state."""
    command = [sys.executable, "-c", PARENT, str(ACTOR), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ACTOR.parents[1])}) as process:
        assert process.stdout
        if state == "loading":
            while len(psutil.Process(process.pid).children(recursive=True)) < 2:
                pass
        else:
            assert process.stdout.readline() == b"answer\n"
        yield process


# Turns and places


async def test_a_call_of_one_row_does_not_wait_for_a_call_of_a_thousand(pool: Any) -> None:
    one = pool()
    async with aclosing(one.run([request(f"slow echo {number}") for number in range(1000)])) as bursts:
        big = asyncio.ensure_future(gather(bursts))
        while not any(worker.jobs for worker in one._workers):
            await asyncio.sleep(0.01)
        assert await answers(one, "echo me") == ["echo me"]
        assert len(one._queue) > 500
        assert len(await big) == 1000


async def gather(bursts: Any) -> list[Any]:
    return [event async for burst in bursts for event in burst]


def job(text: str, mailbox: Any = None, number: int = 0) -> Job:
    return Job(number, 0, number, request(text), mailbox or Mailbox())


async def test_calls_are_served_in_turn_and_what_a_dead_worker_held_comes_first() -> None:
    queue, calls = Queue(), [Mailbox() for _ in range(3)]
    for call, texts in zip(calls, ["aaaa", "b", "ccc"], strict=True):
        queue.add([job(text, call) for text in texts])
    assert len(queue) == 8
    first = [queue.pop() for _ in range(3)]
    queue.again(first)
    assert "".join(one.request.text for one in queue.drain()) == "abcacaca"
    assert not queue


async def test_a_call_that_is_left_leaves_the_queue() -> None:
    queue, calls = Queue(), [Mailbox(), Mailbox()]
    for call in calls:
        queue.add([job("x", call) for _ in range(5)])
    queue.again([queue.pop(), queue.pop()])
    queue.drop(calls[0])
    assert len(queue) == 5
    assert all(one.mailbox is calls[1] for one in queue.drain())


async def test_rows_go_where_their_beginning_was_read_unless_others_have_less_to_do(pool: Any) -> None:
    two = pool(2)
    tales = [letter * 300 for letter in "ab"]
    while len(two._workers) < 2 or not all(worker.ready for worker in two._workers):
        await answers(two, *["echo start"] * 20)
    homes = [await who(two, f"echo who {tale}") for tale in tales]
    for tale, home in zip(tales, homes, strict=True):
        assert {await who(two, f"echo who {tale} {number}") for number in range(5)} == {home}
    crowd = await answers(two, *(f"echo who {tales[0]} {number}" for number in range(100)))
    assert len({answer.rsplit(" ", 1)[1] for answer in crowd}) == 2


async def who(pool: Pool, prompt: str) -> str:
    """Which worker answers."""
    (answer,) = await answers(pool, prompt)
    return str(answer).rsplit(" ", 1)[1]


# Left and closed


async def test_a_reader_that_stops_reading_holds_nobody_up_and_misses_no_answer(pool: Any) -> None:
    one = pool()
    async with aclosing(one.run([request(f"count {number}", live=True) for number in range(100)])) as bursts:
        seen = await anext(bursts)
        for _ in range(3):
            assert await answers(one, "echo other") == ["echo other"]
        seen += await gather(bursts)
    ends = {event.row: event.value.text for event in seen if event.done}
    assert ends == {number: " ".join(map(str, range(100))) for number in range(100)}


async def test_10000_rows_wait_in_the_parent_and_are_answered(pool: Any) -> None:
    prompts = [f"echo {number}" for number in range(10_000)]
    one = pool(2)
    reading = asyncio.ensure_future(answers(one, *prompts))
    while not one._workers or not one._workers[0].jobs:
        await asyncio.sleep(0.001)
    assert all(len(worker.jobs) <= queues.WINDOW for worker in one._workers)
    assert await reading == prompts


async def test_a_pool_that_is_closed_fails_what_is_under_way_and_ends_its_workers(pool: Any) -> None:
    one = pool(2)
    reading = asyncio.ensure_future(answers(one, *["hold"] * 300))
    while not all(worker.jobs for worker in one._workers) or not one._workers:
        await asyncio.sleep(0.01)
    pids = [worker.pid for worker in one._workers]
    await one.aclose()
    assert all("closed" in str(error) for error in await reading)
    assert not any(map(psutil.pid_exists, pids))


async def test_why_a_model_cannot_be_loaded_is_told_in_our_words(pool: Any) -> None:
    one = pool(path="/refused")
    for error in await answers(one, "echo a", "echo b"):
        assert isinstance(error, NotFoundError)
        assert str(error) == "no such model. Look again."
    assert one.counts.started == 1


def test_loading_is_shown_where_somebody_looks_and_wiped(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    notice = Notice("loading m")
    notice.show("reading")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    notice.show("reading")
    notice.show("reading")
    notice.wipe()
    shown = capsys.readouterr().err
    assert shown.count("outlines_like: loading m: reading ...") == 1
    assert shown.endswith("\r\x1b[K")
