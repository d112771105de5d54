"""Any mix of sync and async, any loop, any thread; leaving at any time leaves nothing behind (section 5 of the cases)."""

import asyncio
import gc
import threading

import pytest

import outlines_like as ol
from outlines_like import Completion, Event, bridge
from outlines_like.errors import ServerError

from .backends import endless, within


def tasks_at_home():
    """The tasks on the library's loop, but for the one that counts them."""

    async def count():
        for _ in range(20):  # what was cancelled just now has its turns to end
            await asyncio.sleep(0)
        return len(asyncio.all_tasks()) - 1

    return bridge.wait(count)


@pytest.fixture(autouse=True)
def nothing_left():
    """No task and no thread is left behind."""
    ol.vectorize(lambda x: x)("warm")
    ol.models.fake()("warm")  # opens the store of this test
    tasks, threads = tasks_at_home(), {thread for thread in threading.enumerate() if "worker" not in thread.name}
    yield
    gc.collect()
    for thread in set(threading.enumerate()) - threads:
        if thread.name.startswith(("asyncio_", "ThreadPool", "store ")):
            continue  # pools of the loops, and the stores opened meanwhile
        thread.join(5)
        assert not thread.is_alive(), thread
    assert tasks_at_home() == tasks


def hanging(closed, log=None, **options):
    return ol.models.Model("hanging", endless(log, closed), endpoint=f"hanging {id(closed)}", defaults={}, **options)


# Loops


def test_a_sync_call_works_inside_a_running_loop():
    """C01: as in a notebook."""
    model, inner = ol.models.fake(), ol.vectorize(lambda x: x + "!")

    async def cell():
        return model(["a", "b"]).tolist(), inner(["a"]).tolist(), [value for _, value, done in model.stream("one two") if done]

    assert within(lambda: asyncio.run(cell())) == (["A", "B"], ["a!"], ["ONE TWO"])


async def test_the_loop_of_a_test_is_as_good_as_any():
    assert ol.models.fake()(["a"]).tolist() == ["A"]
    assert (await ol.models.fake().acall(["a"])).tolist() == ["A"]


def test_one_model_serves_many_loops():
    """C02."""
    model = ol.models.fake()

    async def waiting(x):
        return x + "!"

    f = ol.vectorize(waiting)
    for g, wanted in ((model, "A"), (f, "a!")):
        for _ in range(3):
            assert within(lambda g=g: asyncio.run(g.acall(["a"]))).tolist() == [wanted]
        assert g(["a"]).tolist() == [wanted]
        both = within(lambda g=g: asyncio.run(two(g)))
        assert [out.tolist() for out in both] == [[wanted]] * 2


async def two(f):
    return await asyncio.gather(asyncio.to_thread(asyncio.run, f.acall(["a"])), f.acall(["a"]))


def test_a_users_async_function_runs_in_his_own_loop():
    loops = []

    async def f(x):
        loops.append(asyncio.get_running_loop())
        return x

    async def main():
        mine = asyncio.get_running_loop()
        await ol.vectorize(f).acall(["a", "b"])
        assert {*loops} == {mine}
        loops.clear()
        assert [value async for _, value, _ in ol.vectorize(f).stream(["a"])] == ["a"]
        assert loops == [mine]

    within(lambda: asyncio.run(main()))
    loops.clear()
    ol.vectorize(f)(["a"])
    assert loops == [bridge.home().loop]


def test_many_threads_may_call_at_once():
    model, out = ol.models.fake(), {}

    def call(k):
        out[k] = model([f"a{k}", f"b{k}"]).tolist()

    threads = [threading.Thread(target=call, args=(k,)) for k in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert out == {k: [f"A{k}", f"B{k}"] for k in range(16)}


# Nesting


def plain(fn):
    return ol.vectorize(lambda x: fn(x))


def waiting(fn):
    async def f(x):
        return await fn.acall(x)

    return ol.vectorize(f)


@pytest.mark.parametrize("inner", [plain, waiting])
@pytest.mark.parametrize("middle", [plain, waiting])
@pytest.mark.parametrize("outer", [plain, waiting])
@pytest.mark.parametrize("awaited", [False, True])
def test_lifted_functions_nest_three_deep_in_any_mix(inner, middle, outer, awaited):
    """C03 and row A: eight mixes, entered both ways."""
    model = ol.models.fake()
    f = outer(middle(inner(model)))
    rows = [f"x{k}" for k in range(20)]
    out = within(lambda: asyncio.run(f.acall(rows)) if awaited else f(rows))
    assert out.tolist() == [row.upper() for row in rows]


def test_a_thousand_rows_may_each_map_over_rows_of_their_own():
    """More than any pool has threads."""
    inner = ol.vectorize(lambda x: x + 1)
    outer = ol.vectorize(lambda x: sum(inner([x, x])))
    assert within(lambda: outer(range(1000)), 30).tolist() == [2 * x + 2 for x in range(1000)]


def test_rows_that_wait_for_each_other_are_all_under_way():
    meeting = threading.Barrier(64)
    assert within(lambda: ol.vectorize(lambda x: meeting.wait(10) * 0 + x)(range(64))).tolist() == list(range(64))


def test_a_thread_inside_a_plain_function_may_call_too():
    model, out = ol.models.fake(), []

    def f(x):
        thread = threading.Thread(target=lambda: out.append(model(x)))
        thread.start()
        thread.join()
        return out[-1]

    assert within(lambda: ol.vectorize(f, concurrency=1)(["a", "b"])).tolist() == ["A", "B"]


def test_a_call_may_be_made_while_a_stream_is_read():
    model = ol.models.fake()
    assert within(lambda: [model(value) for _, value, done in model.stream(["a", "b"]) if done]) == ["A", "B"]


# Leaving


@pytest.mark.parametrize(
    "layers",
    [
        [],
        [ol.batched(1, concurrency=2), ol.deduped()],
        [ol.retried(5), ol.limited(1), ol.batched(1), ol.deduped(), ol.cached()],
    ],
)
@pytest.mark.parametrize("way", ["cancel", "timeout", "wait_for"])
def test_a_call_that_is_cancelled_ends_its_backend_at_once(layers, way):
    """C08."""
    closed, log = threading.Event(), []
    model = hanging(closed, log, layers=layers)

    async def main():
        call = asyncio.ensure_future(model.acall(["a", "b"]))
        while not log:
            await asyncio.sleep(0.001)
        if way == "cancel":
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        elif way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await call
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.01)
        assert closed.is_set()
        asked = len(log)
        await asyncio.sleep(0.01)
        assert len(log) == asked

    within(lambda: asyncio.run(main()))


def test_cancelling_during_a_back_off_is_not_swallowed():
    tries, resting = [], asyncio.Event()

    async def run(rows):
        tries.append(len(rows))
        yield [Event(i, ol.Failure(ServerError("x"))) for i in range(len(rows))]

    def rest(attempt, errors):
        loop.call_soon_threadsafe(resting.set)
        return 60

    model = ol.models.Model("m", run, endpoint="e", defaults={}, layers=[ol.retried(5, wait=rest)])

    async def main():
        nonlocal loop
        loop = asyncio.get_running_loop()
        call = asyncio.ensure_future(model.acall("a"))
        await resting.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    loop = None
    within(lambda: asyncio.run(main()))
    assert tries == [1]


def test_cancelling_a_call_cancels_the_calls_its_functions_make():
    closed, log = threading.Event(), []
    model = hanging(closed, log)
    f = ol.vectorize(lambda x: model(x))

    async def main():
        call = asyncio.ensure_future(f.acall(["a"]))
        while not log:
            await asyncio.sleep(0.001)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    within(lambda: asyncio.run(main()))
    assert closed.wait(5)


def test_an_async_function_is_cancelled_with_its_call():
    ended, begun = [], []

    async def f(x):
        begun.append(x)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(x)

    async def main():
        call = asyncio.ensure_future(ol.vectorize(f, concurrency=3).acall(range(10)))
        while len(begun) < 3:
            await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert sorted(ended) == [0, 1, 2]

    within(lambda: asyncio.run(main()))


def test_equal_prompts_of_many_threads_are_one_request():
    """C: three separate calls of an equal prompt in flight."""
    log, go = [], threading.Event()

    async def run(rows):
        log.append(len(rows))
        while not go.is_set():
            await asyncio.sleep(0.001)
        yield [Event(i, Completion(row.text.upper(), "stop")) for i, row in enumerate(rows)]

    model = ol.models.Model("m", run, endpoint="shared", defaults={}, layers=[ol.deduped()])
    out = []
    threads = [threading.Thread(target=lambda: out.append(model("a"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    while tasks_at_home() < 3:
        pass
    go.set()
    for thread in threads:
        thread.join(10)
    assert out == ["A"] * 3
    assert log == [1]


class Hollow(Exception):
    """An error that counts as false."""

    def __len__(self):
        return 0


def test_an_error_that_counts_as_false_is_an_error():
    async def fail():
        raise Hollow("mine")

    with pytest.raises(Hollow, match="mine"):
        within(lambda: bridge.wait(fail), 5)


def test_rows_may_fail_with_errors_that_count_as_false():
    def f(x):
        raise Hollow(x)

    assert [str(error) for error in ol.vectorize(f, on_error="return")(["a", "b"])] == ["a", "b"]
    with pytest.raises(Hollow, match="a"):
        ol.vectorize(f)("a")
