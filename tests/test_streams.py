"""Watching: snapshots as they come, in plain and in async code, left at any time."""

import asyncio
import gc
import threading
from contextlib import aclosing, suppress

import pytest

import outlines_like as ol
from outlines_like import Completion, Event, Failure, RowErrors
from outlines_like.events import last_values
from outlines_like.streams import SLACK, Mailbox, interleave

from .backends import endless, within


def hanging(closed, log=None):
    return ol.models.Model("hanging", endless(log, closed), endpoint=f"hanging {id(closed)}", defaults={})


async def collected(stream):
    return [snapshot async for snapshot in stream]


def test_a_stream_shows_every_answer_as_it_grows():
    model = ol.models.fake()
    wanted = [((), "ONE", False), ((), "ONE TWO", False), ((), "ONE TWO THREE", True)]
    assert list(model.stream("one two three")) == wanted
    with ol.cache.disabled():
        assert asyncio.run(collected(model.stream("one two three"))) == wanted
    assert list(model.stream("one two three")) == wanted[-1:]  # from the store: all at once


def test_both_kinds_of_iteration_show_the_index_of_each_row():
    model = ol.models.fake()
    for snapshots in (
        list(model.stream([["a", "b"]], samples=2)),
        asyncio.run(collected(model.stream([["c", "d"]], samples=2))),
    ):
        assert sorted(index for index, _, _ in snapshots) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
        assert all(done for _, _, done in snapshots)


def test_a_stream_of_a_function_shows_its_results():
    async def waiting(x):
        return x + "!"

    for fn in (lambda x: x + "!", waiting):
        f = ol.vectorize(fn)
        assert {index: value for index, value, _ in f.stream(["a", "b", None])} == {(0,): "a!", (1,): "b!", (2,): None}


def test_a_stream_of_completions_shows_completions():
    snapshots = list(ol.models.fake().complete.stream("one two"))
    assert [(type(value), value.text, value.finish_reason) for _, value, _ in snapshots] == [
        (Completion, "ONE", None),
        (Completion, "ONE TWO", "stop"),
    ]


def test_nothing_runs_until_it_is_read_and_it_runs_once():
    calls = []
    stream = ol.vectorize(lambda x: calls.append(x) or x).stream(["a"])
    assert calls == []
    assert list(stream) == [((0,), "a", True)]
    assert list(stream) == [((0,), "a", True)]
    assert calls == ["a"]


def test_a_first_event_is_seen_before_the_last_row_is_run():
    for concurrency in (1, 4):
        calls = []

        async def f(x, calls=calls):
            calls.append(x)
            return x

        async def leave(f=f, concurrency=concurrency):
            async for _ in ol.vectorize(f, concurrency=concurrency).stream(range(10_000)):
                break

        asyncio.run(leave())
        assert len(calls) < 1_000


# Errors


def picky(x):
    if x == "b":
        raise LookupError(x)
    return x + "!"


@pytest.mark.parametrize("read", [list, lambda stream: asyncio.run(collected(stream))], ids=["sync", "async"])
def test_a_failed_row_is_shown_and_raised_at_the_end(read):
    f = ol.vectorize(picky)
    with pytest.raises(RowErrors) as caught:
        within(lambda: read(f.stream(["a", "b", "c"])))
    assert list(caught.value.errors) == [(1,)]
    assert caught.value.partial[[0, 2]].tolist() == ["a!", "c!"]
    assert caught.value.partial[1] is caught.value.errors[1,]
    with pytest.raises(LookupError):
        within(lambda: read(f.stream("b")))


def test_a_failed_row_comes_as_its_error_or_as_none_if_asked():
    returned = {index: value for index, value, _ in ol.vectorize(picky, on_error="return").stream(["a", "b"])}
    assert returned[0,] == "a!"
    assert isinstance(returned[1,], LookupError)
    assert {index: value for index, value, _ in ol.vectorize(picky, on_error="missing").stream(["a", "b"])} == {
        (0,): "a!",
        (1,): None,
    }
    shown = []
    with pytest.raises(RowErrors):
        shown.extend(ol.vectorize(picky).stream(["a", "b"]))
    assert {type(value) for _, value, _ in shown} == {str, Failure}


@pytest.mark.parametrize("on_error", ["raise", "return", "missing"])
def test_fail_fast_ends_a_stream_at_the_first_failure(on_error):
    calls = []

    async def f(x):
        calls.append(x)
        await asyncio.sleep(0)
        raise LookupError(x)

    stream = ol.vectorize(f, concurrency=1, fail_fast=True, on_error=on_error).stream(range(1000))
    if on_error == "raise":
        with pytest.raises(RowErrors):
            list(stream)
    else:
        list(stream)
    assert len(calls) < 100


def test_an_error_comes_after_the_pieces_before_it():
    """T18: with its own traceback."""

    async def run(rows):
        yield [Event(0, Completion("one"), False)]
        yield [Event(0, Completion("one two"), False)]
        raise ZeroDivisionError("broken")

    seen = []
    with pytest.raises(ZeroDivisionError) as caught:
        seen.extend(ol.models.Model("m", run, endpoint="e", defaults={}).stream("a"))
    assert seen[-1] == ((), "one two", False)
    assert any(entry.name == "run" for entry in caught.traceback)


# Leaving


def breaks(stream):
    for _ in stream:
        break


def closes(stream):
    next(iter(stream))
    stream.close()


def leaves_block(stream):
    with stream as open_stream:
        next(iter(open_stream))


def deletes(stream):
    reader = iter(stream)
    next(reader)
    del reader


def raises(stream):
    with suppress(LookupError):
        for _ in stream:
            raise LookupError


def closes_reader(stream):
    reader = iter(stream)
    next(reader)
    reader.close()


@pytest.mark.parametrize("leave", [breaks, closes, leaves_block, deletes, raises, closes_reader])
def test_leaving_a_plain_stream_closes_what_is_behind_it(leave):
    """T16."""
    closed, kept = threading.Event(), []
    gc.collect()
    gc.disable()  # it must not depend on the collector
    try:
        stream = hanging(closed).stream(["a", "b"])
        kept.append(stream) if leave is closes or leave is leaves_block else None
        within(lambda: leave(stream))
        assert closed.wait(1)
    finally:
        gc.enable()


def async_break(stream):
    async def read():
        async for _ in stream:
            break
        await asyncio.sleep(0)

    return read()


def async_closing(stream):
    async def read():
        async with aclosing(aiter(stream)) as snapshots:
            async for _ in snapshots:
                break

    return read()


def async_error(stream):
    async def read():
        with suppress(LookupError):
            async for _ in stream:
                raise LookupError

    return read()


def async_cancel(stream):
    async def read():
        seen = asyncio.Event()

        async def reader():
            async for _ in stream:
                seen.set()

        task = asyncio.ensure_future(reader())
        await seen.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    return read()


@pytest.mark.parametrize("leave", [async_break, async_closing, async_error, async_cancel])
def test_leaving_an_async_stream_closes_what_is_behind_it(leave):
    closed = threading.Event()
    within(lambda: asyncio.run(leave(hanging(closed).stream(["a", "b"]))))
    assert closed.wait(1)


def test_a_closed_stream_can_be_read_again():
    model = ol.models.fake()
    with model.stream("one two") as stream:
        assert next(iter(stream))[1] == "ONE"
    with ol.cache.disabled():
        assert [value for _, value, _ in model.stream("one two")] == ["ONE", "ONE TWO"]
    assert [done for _, _, done in stream][-1]


# The machinery


def test_a_slow_reader_loses_partial_values_but_no_answer():
    async def story():
        mailbox = Mailbox()
        for k in range(3 * SLACK):
            mailbox.post([Event(k % 2, k, False)])
        mailbox.post([Event(0, "done"), Event(1, "done")])
        mailbox.close()
        burst = await mailbox.take()
        assert len(burst) < 2 * SLACK
        assert [event for event in burst if event.done] == [Event(0, "done"), Event(1, "done")]
        assert [event.value for event in burst if not event.done] == sorted(event.value for event in burst if not event.done)
        assert await mailbox.take() is None

    asyncio.run(story())


def test_an_error_of_a_mailbox_comes_after_what_was_posted():
    async def story():
        mailbox = Mailbox()
        mailbox.post([Event(0, "a")])
        mailbox.close(LookupError("late"))
        mailbox.close()
        assert await mailbox.take() == [Event(0, "a")]
        with pytest.raises(LookupError, match="late"):
            await mailbox.take()

    asyncio.run(story())


def test_interleaving_takes_items_as_there_is_room():
    taken = []

    def items():
        for k in range(100):
            taken.append(k)
            yield k

    async def one(k):
        await asyncio.sleep(0)
        yield [Event(k, k)]

    async def story():
        async with aclosing(interleave(one, items(), 3)) as bursts:
            first = await anext(bursts)
            assert len(taken) <= 3 + len(first) + 3
            rest = [event.row async for burst in bursts for event in burst]
        assert sorted([event.row for event in first] + rest) == list(range(100))

    asyncio.run(story())


def test_the_first_error_ends_an_interleaving_and_the_others_are_closed():
    closed = []

    async def one(k):
        try:
            await asyncio.sleep(0)
            if k == 1:
                raise LookupError(k)
            await asyncio.Event().wait()
            yield []
        finally:
            closed.append(k)

    async def story():
        with pytest.raises(LookupError):
            await last_values(interleave(one, range(5), 3), 5)
        assert sorted(closed) == [0, 1, 2]

    within(lambda: asyncio.run(story()))


def test_a_stream_says_what_it_is_and_how_far():
    async def growing(x):
        yield x
        await asyncio.Event().wait()

    stream = ol.stream(growing)(["a", "b"], samples=2)
    assert repr(stream) == "<stream of 4 rows, not begun>"
    with stream:
        next(reader := iter(stream))
        assert repr(stream) == "<stream of 4 rows, under way>"
    reader.close()
    assert repr(stream) == "<stream of 4 rows, not begun>"  # who left it has cancelled it
    over = ol.models.fake().stream("a")
    assert list(over)
    assert repr(over) == "<stream of 1 row, over>"
    assert repr(stream | ol.deltas) == "<stream of 4 rows>"
    assert repr(ol.merge(stream)) == "<stream>"
    assert repr(ol.models.fake().stream() + "x") == "<stream of <lm of 'fake', not run>>"
