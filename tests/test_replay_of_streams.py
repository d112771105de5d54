"""One run, many readers: late ones, several at once, in threads and in other loops; and what is left when all have gone."""

import asyncio
import threading

import psutil
import pytest

import outlines_like as ol
from outlines_like import Completion, Event, Snapshot, bridge
from outlines_like.errors import BlockingError

from .backends import endless, within

LIMIT = 10


class Steps:
    """A backend that says one more word whenever it is let."""

    def __init__(self):
        self.log, self.gates, self.closed = [], [threading.Event() for _ in range(3)], 0

    async def __call__(self, rows):
        self.log.append(list(rows))
        try:
            for k, gate in enumerate(self.gates):
                await asyncio.to_thread(gate.wait, LIMIT)
                yield [
                    Event(i, Completion("one two three"[: (3, 7, 13)[k]], "stop" if k == 2 else None), k == 2)
                    for i in range(len(rows))
                ]
        finally:
            self.closed += 1

    def model(self):
        return ol.models.Model("steps", self, endpoint=f"steps {id(self)}", defaults={})


@pytest.fixture
def steps():
    return Steps()


def test_a_late_reader_sees_the_present_and_then_what_follows(steps):
    stream = steps.model().stream(["x", "y"])
    steps.gates[0].set()
    early = iter(stream)
    assert {next(early)[1], next(early)[1]} == {"one"}
    steps.gates[1].set()
    assert {next(early)[1], next(early)[1]} == {"one two"}
    late = iter(stream)
    assert [next(late), next(late)] == [((0,), "one two", False), ((1,), "one two", False)]
    steps.gates[2].set()
    assert [*early] == [*late] == [((0,), "one two three", True), ((1,), "one two three", True)]
    assert [*stream] == [((0,), "one two three", True), ((1,), "one two three", True)]
    assert len(steps.log) == 1


def test_it_goes_on_until_the_last_reader_has_left(steps):
    stream = steps.model().stream("x")
    steps.gates[0].set()
    one, two = iter(stream), iter(stream)
    next(one), next(two)
    one.close()
    steps.gates[1].set()
    assert next(two) == ((), "one two", False)
    two.close()
    assert steps.closed == 1
    for gate in steps.gates:
        gate.set()
    assert [value for _, value, _ in stream][-1] == "one two three"  # afresh
    assert len(steps.log) == 2


def test_threads_and_loops_may_read_together(steps):
    stream = steps.model().stream("x")
    seen = []

    def plain():
        seen.append(list(stream))

    def awaited():
        async def read():
            return [snapshot async for snapshot in stream]

        seen.append(asyncio.run(read()))

    threads = [threading.Thread(target=read) for read in (plain, awaited, plain, awaited)]
    for thread in threads:
        thread.start()
    for gate in steps.gates:
        gate.set()
    for thread in threads:
        thread.join(LIMIT)
    assert [reading[-1] for reading in seen] == [Snapshot((), "one two three", True)] * 4
    assert len(steps.log) == 1


def test_who_was_held_up_while_the_loop_of_a_run_ended_misses_nothing(steps):
    """The run was over before its loop ended, so all of it is told."""
    stream = steps.model().stream("x")
    begun = threading.Event()

    async def first():
        async for _ in stream:
            begun.set()

    async def held_up():
        seen = []
        async for snapshot in stream:
            seen.append(snapshot)
            for gate in steps.gates:
                gate.set()
            owner.join()  # this loop stands still until the other is closed
        return seen

    owner = threading.Thread(target=lambda: asyncio.run(first()))
    owner.start()
    steps.gates[0].set()
    begun.wait()
    seen = within(lambda: asyncio.run(held_up()), LIMIT)
    assert seen[-1] == Snapshot((), "one two three", True)
    assert [value for _, value, _ in seen] == sorted({value for _, value, _ in seen})
    assert len(steps.log) == 1


def test_what_ran_in_one_loop_replays_in_another():
    calls = []

    async def f(x):
        calls.append(x)
        return x + "!"

    stream = ol.vectorize(f).stream(["a", "b"])

    async def read():
        return sorted([value async for _, value, _ in stream])

    assert asyncio.run(read()) == asyncio.run(read()) == sorted(value for _, value, _ in stream) == ["a!", "b!"]
    assert sorted(calls) == ["a", "b"]


def test_a_loop_that_ends_under_other_readers_is_an_error_not_an_end():
    begun = threading.Event()

    async def hang(x):
        yield x
        await asyncio.Event().wait()

    stream = ol.vectorize(hang).stream("x")
    outcome = []

    def plain():
        begun.wait(LIMIT)
        try:
            outcome.extend(stream)
        except ol.OutlinesError as error:
            outcome.append(error)

    thread = threading.Thread(target=plain)
    thread.start()

    async def main():
        async for _ in stream:
            begun.set()
            while stream._source._run.readers < 2:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            return

    asyncio.run(main())
    thread.join(LIMIT)
    assert not thread.is_alive()
    assert "event loop that ran this ended" in str(outcome[-1])


def test_errors_replay_too():
    calls = []

    def broken(x):
        calls.append(x)
        raise LookupError(x)

    stream = ol.vectorize(broken).stream("a")
    for _ in range(2):
        with pytest.raises(LookupError):
            list(stream)
    assert calls == ["a"]


async def test_a_blocking_loop_over_what_its_own_loop_runs_is_refused():
    async def hang(x):
        await asyncio.Event().wait()
        yield x

    async def slow(x):
        yield x
        await asyncio.Event().wait()

    stream = ol.vectorize(slow).stream("x")
    async with stream:
        async for _ in stream:
            with pytest.raises(BlockingError, match="async for"):
                list(stream)
            break


@pytest.mark.parametrize("derived", [False, True])
def test_closing_ends_readers_that_wait_elsewhere(derived):
    closed = threading.Event()
    stream = ol.models.Model("h", endless(None, closed), endpoint=f"h{id(closed)}", defaults={}).stream("x")
    if derived:
        stream = stream | ol.map_values(str.upper)
    begun, seen = threading.Event(), []

    def read():
        for snapshot in stream:
            seen.append(snapshot)
            begun.set()
        seen.append("end")

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(LIMIT)
    within(stream.close, LIMIT)
    thread.join(LIMIT)
    assert seen[-1] == "end"
    assert closed.wait(1)


async def test_closing_ends_tasks_that_wait():
    closed = threading.Event()
    stream = ol.models.Model("h", endless(None, closed), endpoint=f"h{id(closed)}", defaults={}).stream("x") | ol.deltas
    begun, seen = asyncio.Event(), []

    async def read():
        async for item in stream:
            seen.append(item)
            begun.set()
        seen.append("end")

    task = asyncio.ensure_future(read())
    await begun.wait()
    await stream.aclose()
    await asyncio.wait_for(task, LIMIT)
    assert seen[-1] == "end"
    assert closed.wait(1)


def test_a_slow_reader_holds_few_events():
    """Of 200,000 events that come before he reads on, he sees few, and all answers."""
    over = threading.Event()

    async def run(rows):
        for k in range(200):
            yield [Event(i, Completion("x" * k), False) for i in range(1000)]
            await asyncio.sleep(0)
        yield [Event(i, Completion("done", "stop")) for i in range(1000)]
        over.set()

    stream = ol.models.Model("m", run, endpoint="e", defaults={}).stream(["x"] * 1000)
    seen = answers = 0
    for _, value, done in stream:
        assert over.wait(LIMIT)
        seen += 1
        answers += done
        assert done == (value == "done")
    assert answers == 1000
    assert seen < 20_000


@pytest.mark.parametrize("read", ["for", "async for"])
def test_a_function_that_never_waits_and_never_ends_can_be_watched_and_left(read):
    """It runs on the library's loop, or on the reader's own: that goes on living, and leaving ends the function."""
    closed = threading.Event()

    async def count(n):
        try:
            while True:
                n += 1
                yield n
        finally:
            closed.set()

    async def look():
        async for _, value, _ in ol.vectorize(count).stream([0]):
            if value > 1000:
                break

    def plain():
        for _, value, _ in ol.vectorize(count).stream([0]):
            if value > 1000:
                break

    within(plain if read == "for" else lambda: asyncio.run(look()))
    assert closed.wait(LIMIT)


def open_sockets(port):
    return [
        c for c in psutil.Process().net_connections("tcp") if c.raddr and c.raddr.port == port and c.status == "ESTABLISHED"
    ]


@pytest.mark.parametrize("operator", [None, ol.deltas, ol.map_values(str.upper)], ids=["plain", "deltas", "map_values"])
def test_leaving_a_hundred_times_leaves_nothing(replay, operator, request):
    """Each time all connections are closed within a second; no task, thread, socket or file stays."""
    bridge.wait(close_links)  # connections that other tests have kept alive would be counted, and end in the middle
    name = f"leave {request.node.callspec.id}".replace(" ", "-")
    url = replay.replay("T16", name)
    model = ol.models.openai("m", base_url=url, api_key="k")
    process = psutil.Process()
    counts = []
    with ol.cache.disabled():
        for _ in range(100):
            stream = model.stream(["a", "b"])
            for _ in stream if operator is None else stream | operator:
                break
            assert all(arrival.gone.wait(1) for arrival in replay.log(name))
            assert open_sockets(replay.port) == []
            counts.append((threading.active_count(), process.num_fds(), bridge.wait(tasks)))
    assert {len(set(column)) for column in zip(*counts[5:], strict=True)} == {1}, counts[5:]


async def close_links():
    for key in [key for key in bridge.home().owned if isinstance(key, tuple) and key[0] == "link"]:
        await bridge.disown(key).aclose()


async def tasks():
    await asyncio.sleep(0)
    return len(asyncio.all_tasks())
