"""Each layer for itself."""

import asyncio

import pytest

import outlines_like as ol
from outlines_like import Completion, Event, Failure, bridge
from outlines_like.errors import AuthenticationError, BadRequestError, RateLimitError, ServerError
from outlines_like.events import last_values, stack, subset
from outlines_like.layers import halted
from outlines_like.layers.batching import plan
from outlines_like.layers.retrying import backoff

from .backends import Drawn, Shuffled, endless, requests_of, within


def answers(run, rows):
    return within(lambda: bridge.wait(last_values, run(rows), len(rows)))


def logging(log):
    async def run(rows):
        log.append(list(rows))
        yield [Event(i, row) for i, row in enumerate(rows)]

    return run


# batched


@pytest.mark.parametrize(
    ("rows", "size", "by", "batches"),
    [
        ("", 2, None, []),
        ("abcde", 2, None, [[0, 1], [2, 3], [4]]),
        ("abcde", None, None, [[0, 1, 2, 3, 4]]),
        ("abcab", 2, str, [[0, 3], [1, 4], [2]]),
        ("aaaba", None, str, [[0, 1, 2, 4], [3]]),
    ],
)
def test_rows_are_cut_into_batches(rows, size, by, batches):
    assert (plan(rows, size, by) if by else plan(rows, size)) == batches


def test_batches_go_out_as_planned():
    log = []
    assert answers(stack(logging(log), ol.batched(2, concurrency=1)), "abcde") == list("abcde")
    assert log == [["a", "b"], ["c", "d"], ["e"]]


def test_samples_of_one_prompt_travel_in_one_call():
    log = []
    ol.models.fake(log=log)(["a", "b"], samples=3)
    assert [[(request.text, request.sample) for request in batch] for batch in log] == [
        [(t, k) for k in range(3)] for t in "ab"
    ]


@pytest.mark.parametrize(
    "make", [lambda: ol.batched(0), lambda: ol.limited(0), lambda: ol.retried(0), lambda: ol.batched(1, concurrency=0)]
)
def test_sizes_that_would_hang_are_refused_at_once(make):
    with pytest.raises(ValueError, match="0"):
        make()


def test_a_fake_that_could_do_nothing_is_refused():
    with pytest.raises(ValueError, match="0"):
        ol.models.fake(concurrency=0)


# retried


def test_a_row_that_may_pass_is_tried_again_alone():
    log = []
    errors = {"b": [ServerError("x"), RateLimitError("x")], "c": [BadRequestError("x")]}
    backend = Shuffled(0, errors)
    rows = requests_of("abc", live=False)
    a, b, c = answers(stack(backend, ol.retried(3, wait=lambda *_: 0)), rows)
    assert (a.text, b.text) == ("a says 0 0", "b says 0 0")
    assert isinstance(c.error, BadRequestError)
    assert [[row.text for row in batch] for batch in backend.log] == [["a", "b", "c"], ["b"], ["b"]]
    assert log == []


def test_the_last_failure_is_told_when_the_tries_are_used_up():
    backend = Shuffled(0, {"a": [ServerError("1"), ServerError("2"), ServerError("3")]})
    [failure] = answers(stack(backend, ol.retried(2, wait=lambda *_: 0)), requests_of("a"))
    assert failure.error.args == ("2",)
    assert len(backend.log) == 2


def test_a_row_that_has_spoken_is_not_tried_again():
    """What was shown is never taken back."""
    tries = []

    async def run(rows):
        tries.append(len(rows))
        yield [Event(0, Completion("beg"), False)]
        yield [Event(0, Failure(ServerError("broke")))]

    [failure] = answers(stack(run, ol.retried(3, wait=lambda *_: 0)), requests_of("a"))
    assert isinstance(failure.error, ServerError)
    assert tries == [1]


def test_the_wait_is_what_the_server_asked_for_or_under_a_ceiling():
    assert backoff(1, [RateLimitError("x", retry_after=7.5), ServerError("x")]) == 7.5
    assert all(0 <= backoff(attempt, [ServerError("x")]) <= min(20, 0.5 * 2**attempt) for attempt in range(1, 12))


def test_waiting_starts_over_for_nobody_else():
    """Between two tries the layer waits, with what the rows said."""
    waits = []
    backend = Shuffled(0, {"a": [ServerError("1"), ServerError("2")], "b": [ServerError("3")]})
    answers(
        stack(backend, ol.retried(5, wait=lambda attempt, errors: waits.append((attempt, len(errors))) or 0)),
        requests_of("abc"),
    )
    assert waits == [(1, 2), (2, 1)]


# limited


def test_a_limit_bounds_the_calls_under_way():
    gate = Drawn(3)

    async def run(rows):
        await gate.turn()
        yield [Event(i, row) for i, row in enumerate(rows)]

    assert answers(stack(run, ol.limited(3), ol.batched(1, concurrency=50)), range(30)) == list(range(30))
    assert gate.most == 3


@pytest.mark.parametrize(
    "layers",
    [lambda limit: [ol.limited(limit), ol.batched(1)], lambda limit: [ol.batched(1, within=lambda: limit)]],
    ids=["limited", "within"],
)
def test_a_limit_is_shared_by_all_who_hold_it(layers):
    gate, limit = Drawn(3), ol.Limit(2)

    async def run(rows):
        await gate.turn()
        yield [Event(i, row) for i, row in enumerate(rows)]

    runs = [stack(run, *layers(limit)) for _ in range(3)]

    async def all_of_them():
        return await asyncio.gather(*(last_values(run(range(10)), 10) for run in runs))

    assert within(lambda: bridge.wait(all_of_them)) == [list(range(10))] * 3
    assert gate.most == 2
    assert limit.held == 0


def test_a_limit_works_over_several_loops():
    gate = Drawn(0)

    async def f(x):
        await asyncio.sleep(0)
        return x

    f = ol.through(ol.vectorize(f), ol.limited(1), ol.batched(1))

    async def both():
        return await asyncio.gather(*(asyncio.to_thread(asyncio.run, f.acall(range(20))) for _ in range(3)), f.acall(range(20)))

    outs = within(lambda: asyncio.run(asyncio.wait_for(both(), 8)))
    assert [out.tolist() for out in outs] == [list(range(20))] * 4
    assert f(range(3)).tolist() == [0, 1, 2]
    assert gate.most == 0


def test_who_leaves_the_queue_of_a_limit_takes_no_place():
    async def story():
        limit = ol.Limit(1)
        order = []

        async def hold(name, leave):
            async with limit:
                order.append(name)
                await leave.wait()

        go = asyncio.Event()
        tasks = []
        for name in "abcd":
            tasks.append(asyncio.ensure_future(hold(name, go)))
            await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == ["a", "c", "d"]
        assert limit.held == 0

    asyncio.run(story())


def test_who_is_cancelled_as_his_turn_comes_hands_it_on():
    async def story():
        limit = ol.Limit(1)
        await limit.__aenter__()
        second = asyncio.ensure_future(limit.__aenter__())
        third = asyncio.ensure_future(limit.__aenter__())
        await asyncio.sleep(0)
        await limit.__aexit__()
        second.cancel()
        await asyncio.wait_for(third, 5)
        assert second.cancelled() or second.done()
        await limit.__aexit__()
        assert limit.held == 0

    asyncio.run(story())


# guarded


def test_what_a_backend_throws_fails_the_rows_it_had_left():
    async def run(rows):
        yield [Event(1, "one")]
        raise LookupError("broken")

    out = answers(stack(run, ol.guarded), "abc")
    assert out[1] == "one"
    assert [type(value.error) for value in (out[0], out[2])] == [LookupError, LookupError]


def test_a_row_that_a_backend_forgets_fails():
    async def run(rows):
        yield [Event(0, Completion("A", "stop"))]

    model = ol.models.Model("m", run, endpoint="e", defaults={})
    with pytest.raises(ol.RowErrors) as caught:
        model(["a", "b"])
    assert list(caught.value.errors) == [(1,)]
    with pytest.raises(ol.RowErrors) as streamed:
        list(model.stream(["c", "d"]))
    assert list(streamed.value.errors) == [(1,)]


# tapped


def test_a_watcher_sees_all_and_changes_nothing():
    seen = []
    rows = requests_of("ab")
    events = answers(stack(Shuffled(1), ol.tapped(lambda burst: seen.extend(burst))), rows)
    assert [value.text for value in events] == ["a says 0 0", "b says 0 0"]
    assert sum(event.done for event in seen) == 2
    assert len(seen) == 8


# deduped


def test_equal_rows_of_one_call_run_once():
    backend = Shuffled(0)
    rows = [*requests_of("ab", temperature=0), *requests_of("ba", temperature=0)]
    out = answers(stack(backend, ol.deduped()), rows)
    assert [value.text for value in out] == ["a says 0 0", "b says 0 0", "b says 0 0", "a says 0 0"]
    assert [[row.text for row in batch] for batch in backend.log] == [["a", "b"]]


class Held:
    """A backend that answers when it is let go."""

    def __init__(self, answer=lambda row: Completion(row.text.upper(), "stop")):
        self.log, self.go, self.answer = [], asyncio.Event(), answer
        self.left = 0

    async def __call__(self, rows):
        self.log.append([row.text for row in rows])
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        yield [Event(i, self.answer(row)) for i, row in enumerate(rows)]


async def turns(n=5):
    for _ in range(n):
        await asyncio.sleep(0)


def in_flight(story):
    """Run ``story`` on the library's loop, where the table of calls under way is."""
    within(lambda: bridge.wait(story))


def test_three_calls_in_flight_of_an_equal_prompt_are_one_request():
    async def story():
        backend = Held()
        run = stack(backend, ol.deduped())
        calls = [asyncio.ensure_future(last_values(run(requests_of("a")), 1)) for _ in range(3)]
        await turns()
        backend.go.set()
        assert [value.text for [value] in await asyncio.gather(*calls)] == ["A", "A", "A"]
        assert backend.log == [["a"]]
        assert (await last_values(run(requests_of("a")), 1))[0].text == "A"
        assert backend.log == [["a"], ["a"]]  # afterwards the table is empty

    in_flight(story)


def test_only_what_nobody_else_asks_is_sent():
    async def story():
        backend = Held()
        run = stack(backend, ol.deduped())
        calls = [asyncio.ensure_future(last_values(run(requests_of(texts)), len(texts))) for texts in ("ab", "bc", "abc")]
        await turns()
        backend.go.set()
        out = await asyncio.gather(*calls)
        assert [[value.text for value in values] for values in out] == [["A", "B"], ["B", "C"], ["A", "B", "C"]]
        assert sorted(backend.log) == [["a", "b"], ["c"]]  # and no empty call

    in_flight(story)


def test_the_first_asker_may_leave():
    async def story():
        backend = Held()
        run = stack(backend, ol.deduped())
        calls = [asyncio.ensure_future(last_values(run(requests_of("ab")), 2)) for _ in range(3)]
        await turns()
        calls[0].cancel()
        await turns()
        backend.go.set()
        outs = await asyncio.gather(*calls[1:])
        assert [[value.text for value in out] for out in outs] == [["A", "B"], ["A", "B"]]
        assert backend.left == 1
        assert len(backend.log) == 2

    in_flight(story)


def test_a_follower_may_leave():
    async def story():
        backend = Held()
        run = stack(backend, ol.deduped())
        calls = [asyncio.ensure_future(last_values(run(requests_of("a")), 1)) for _ in range(3)]
        await turns()
        calls[1].cancel()
        await turns()
        backend.go.set()
        outs = await asyncio.gather(calls[0], calls[2])
        assert [out[0].text for out in outs] == ["A", "A"]
        assert backend.log == [["a"]]
        assert backend.left == 0

    in_flight(story)


def test_failures_are_told_to_all_who_asked():
    async def story():
        backend = Held(lambda row: Failure(LookupError(row.text)))
        run = stack(backend, ol.deduped())
        calls = [asyncio.ensure_future(last_values(run(requests_of("a")), 1)) for _ in range(3)]
        await turns()
        backend.go.set()
        outs = await asyncio.gather(*calls)
        assert {out[0].error.args for out in outs} == {("a",)}
        assert backend.log == [["a"]]

    in_flight(story)


def test_a_backend_that_breaks_for_the_leader_is_asked_again_by_the_others():
    async def story():
        tries = []

        async def run(rows):
            tries.append(rows[0].text)
            await turns()
            if len(tries) == 1:
                raise ZeroDivisionError
            yield [Event(0, Completion("A", "stop"))]

        layered = stack(run, ol.deduped())
        calls = [asyncio.ensure_future(last_values(layered(requests_of("a")), 1)) for _ in range(2)]
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, ZeroDivisionError)
        assert second[0].text == "A"

    in_flight(story)


# cached (its store has tests of its own)


def test_an_error_is_not_kept():
    backend, store = Shuffled(0, {"a": [LookupError("x")]}), {}
    run = stack(backend, ol.cached(store))
    first, second = (answers(run, requests_of("a"))[0] for _ in range(2))
    assert isinstance(first, Failure)
    assert second.text == "a says 0 0"
    assert [value.text for value in store.values()] == ["a says 0 0"]


def test_a_call_that_is_left_is_not_kept():
    store = {}

    async def story():
        run = stack(endless(), ol.cached(store))
        bursts = run(requests_of("a"))
        await anext(bursts)
        await bursts.aclose()

    in_flight(story)
    assert store == {}


def test_what_is_done_is_kept_before_the_rest_ends():
    store = {}

    async def run(rows):
        yield [Event(1, Completion("B", "stop"))]
        raise LookupError("the rest")

    with pytest.raises(LookupError):
        answers(stack(run, ol.cached(store)), requests_of("ab"))
    assert [value.text for value in store.values()] == ["B"]


# all


async def bare(rows):
    yield [Event(i, row) for i, row in enumerate(rows)]


def test_a_subset_keeps_the_callers_row_numbers():
    async def read():
        return [event async for burst in subset(bare, "abcd", [3, 1]) for event in burst]

    assert asyncio.run(read()) == [Event(3, "d"), Event(1, "b")]


@pytest.mark.parametrize(
    "layer",
    [ol.batched(2), ol.cached({}), ol.deduped(), ol.guarded, ol.limited(1), ol.retried(2), ol.tapped(print)],
    ids=["batched", "cached", "deduped", "guarded", "limited", "retried", "tapped"],
)
def test_the_inner_function_is_named_after_the_layer(layer, request):
    assert layer(bare).__name__ == f"{request.node.callspec.id}_run"


def test_the_failure_that_ended_a_call_comes_before_those_of_rows_that_were_spared():
    """A refused key in the middle of a map is what is told, not that the first row was not sent."""

    async def ask(text):
        if text == "refused":
            raise AuthenticationError("the server refused the key", status=401)
        await asyncio.Event().wait()

    with pytest.raises(ol.RowErrors, match=r"4 of 4 .*; the first, at \(2,\): .*: the server refused the key") as caught:
        ol.through(ask, halted)(["a", "b", "refused", "c"])
    first, *spared = caught.value.exceptions
    assert list(caught.value.errors) == [(2,), (0,), (1,), (3,)]
    assert caught.value.partial[2] is first
    assert all(error.__cause__ is first and "not sent" in str(error) for error in spared)
