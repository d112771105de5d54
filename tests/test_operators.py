"""Operators: small generators that combine, that close what they opened, and that serve `for` and `async for` alike."""

import asyncio
import functools
import gc
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outlines_like as ol
from outlines_like import Completion, Event, Snapshot, bridge
from outlines_like.errors import MalformedError, TimedOutError
from outlines_like.operators import LINE, SENTENCE

from .backends import Shuffled, endless, within

LAW = settings(max_examples=60, deadline=None)
LIMIT = 5
texts = st.lists(st.sampled_from(["a", "b", "c", "a longer prompt"]), max_size=6)
seeds = st.integers(0, 2**32)
samples = st.sampled_from([None, 1, 2])


def model_of(seed, **given):
    return ol.models.Model("m", Shuffled(seed, **given), endpoint=f"e{seed}", defaults={})


def hanging(closed, log=None):
    return ol.models.Model("hanging", endless(log, closed), endpoint=f"hanging {id(closed)}", defaults={})


def plainly(stream):
    return within(lambda: list(stream), LIMIT)


def in_a_loop(stream):
    async def read():
        return [item async for item in stream]

    return within(lambda: asyncio.run(read()), LIMIT)


both = pytest.mark.parametrize("read", [plainly, in_a_loop])
ways = st.sampled_from([plainly, in_a_loop])


@pytest.fixture(autouse=True)
def no_store():
    with ol.cache.disabled():
        yield


# Laws


@LAW
@given(texts, seeds, samples, ways)
def test_joined_deltas_are_the_text(prompts, seed, n, read):
    with ol.cache.disabled():
        model = model_of(seed)
        eager = model(prompts, samples=n)
        joined = defaultdict(str)
        for index, text in read(model.stream(prompts, samples=n) | ol.deltas):
            assert text
            joined[index] += text
    assert dict(joined) == dict(np.ndenumerate(eager))


@LAW
@given(texts, seeds, samples)
def test_collecting_gives_what_the_eager_call_gives(prompts, seed, n):
    with ol.cache.disabled():
        model = model_of(seed)
        eager = model(prompts, samples=n)
        made = within(lambda: model.stream(prompts, samples=n) | ol.collect, LIMIT)
        assert made.shape == eager.shape
        assert made.tolist() == eager.tolist()
        assert asyncio.run(ol.acollect(model.stream(prompts, samples=n))).tolist() == eager.tolist()


@LAW
@given(st.lists(texts, max_size=4), seeds, ways)
def test_a_merge_loses_and_invents_nothing_and_keeps_each_order(lists, seed, read):
    with ol.cache.disabled():
        model = model_of(seed)
        merged = read(ol.merge(*[model.stream(prompts) | ol.deltas for prompts in lists]))
        for k, prompts in enumerate(lists):
            mine = defaultdict(str)
            for name, (index, text) in merged:
                if name == k:
                    mine[index] += text
            assert dict(mine) == dict(np.ndenumerate(model(prompts)))
    assert {name for name, _ in merged} <= set(range(len(lists)))


@LAW
@given(texts, seeds, ways, st.integers(0, 5))
def test_operators_may_be_grouped_as_one_likes(prompts, seed, read, n):
    with ol.cache.disabled():
        stream = model_of(seed).stream(prompts)
        read(stream)  # a stream that has run replays the same each time
        shout, count = ol.map_values(str.upper), ol.map_values(len)
        left = (stream | shout) | count
        right = stream | (lambda part: count(shout(part)))
        assert read(left) == read(right) == read(stream | ol.map_values(lambda text: len(text.upper())))
        assert read(stream | ol.take(n) | ol.take(2)) == read(stream | ol.take(min(n, 2)))
        assert functools.reduce(lambda value, fn: fn(value), [stream, ol.deltas, ol.take(n)]) is not stream
        assert read(ol.take(ol.deltas(stream), n)) == read(stream | ol.deltas | ol.take(n)) == read(stream | ol.deltas)[:n]


OPERATORS = {
    "nothing": lambda stream: stream,
    "deltas": ol.deltas,
    "latest": ol.latest,
    "finished": ol.finished,
    "by_row": ol.by_row,
    "merge": lambda stream: ol.merge(stream, stream),
    "zip_latest": lambda stream: ol.zip_latest(stream, stream),
    "map_values": ol.map_values(len),
    "filter_rows": ol.filter_rows(lambda index: index != (0,)),
    "scan": ol.scan(lambda n, item: n + 1, 0),
    "take": ol.take(3),
    "first": ol.first(2),
    "lines": ol.lines,
    "sentences": ol.sentences,
    "chunks": ol.chunks(2),
    "chunks by time": ol.chunks(every=0.01),
    "throttle": ol.throttle(0.01),
    "stop_when": ol.stop_when(lambda text: len(text) > 3),
    "tee": lambda stream: ol.tee(stream, 2)[1],
    "timeout": ol.timeout(idle=60),
    "peek": ol.peek(lambda item: None),
    "deep": lambda stream: (
        stream | ol.map_values(str.upper) | ol.stop_when(lambda text: len(text) > 5) | ol.peek(id) | ol.deltas
    ),
}


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(OPERATORS)),
    st.lists(st.sampled_from("abc"), min_size=1, max_size=5),
    seeds,
    st.integers(0, 8),
    st.booleans(),
)
def test_whichever_end_leaves_first_all_is_closed(name, prompts, seed, stay, plain):
    """The reader after ``stay`` things, or the source when it has told all; then no stream is open and no task left."""
    backend = Shuffled(seed)
    before = within(lambda: bridge.wait(on_the_loop), LIMIT)
    with ol.cache.disabled():
        stream = OPERATORS[name](ol.models.Model("m", backend, endpoint=f"e{seed}", defaults={}).stream(prompts))

    async def read():
        items = aiter(stream)
        for _ in range(stay):
            await anext(items, None)
        await items.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    def read_plainly():
        items = iter(stream)
        for _ in range(stay):
            next(items, None)
        items.close()

    within(read_plainly if plain else lambda: asyncio.run(read()), LIMIT)
    assert backend.opened == backend.closed
    assert within(lambda: bridge.wait(on_the_loop), LIMIT) <= before


async def on_the_loop():
    """The tasks on the library's loop, but for this one."""
    for _ in range(20):
        await asyncio.sleep(0)
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize(
    "name",
    [name for name in OPERATORS if name not in ("lines", "sentences", "finished", "first", "chunks by time", "throttle")],
)
@pytest.mark.parametrize("leave", ["break", "del", "error", "close", "cancel", "async break"])
def test_leaving_cancels_what_is_behind_every_operator(name, leave):
    """T16: within a second, without help of the garbage collector, and no thread stays."""
    closed, threads = threading.Event(), threading.active_count()
    gc.collect()
    gc.disable()
    try:
        stream = OPERATORS[name](hanging(closed).stream(["a", "b"]))
        within(lambda: LEAVE[leave](stream), LIMIT)
        assert closed.wait(1)
    finally:
        gc.enable()
    for thread in threading.enumerate():
        if thread.name == "outlines_like reader":
            thread.join(1)
    assert threading.active_count() <= threads + 1  # the library's own may have begun here


def by_break(stream):
    for _ in stream:
        break


def by_del(stream):
    items = iter(stream)
    next(items)
    del items


def by_error(stream):
    try:
        for _ in stream:
            raise LookupError
    except LookupError:
        pass


def by_close(stream):
    with stream:
        next(iter(stream))


def by_cancel(stream):
    async def read():
        seen = asyncio.Event()

        async def reader():
            async for _ in stream:
                seen.set()

        task = asyncio.ensure_future(reader())
        await seen.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(read())


def by_async_break(stream):
    async def read():
        async with stream:
            async for _ in stream:
                break

    asyncio.run(read())


LEAVE = {
    "break": by_break,
    "del": by_del,
    "error": by_error,
    "close": by_close,
    "cancel": by_cancel,
    "async break": by_async_break,
}


# One by one


@both
def test_latest_gives_an_array_after_each_burst(read):
    async def run(rows):
        yield [Event(0, Completion("a"), False)]
        yield [Event(0, Completion("a b")), Event(1, Completion("c"), False)]
        yield [Event(1, Completion("c d"))]

    model = ol.models.Model("m", run, endpoint="e", defaults={})
    arrays = read(model.stream(["x", "y"]) | ol.latest)
    assert arrays[-1].tolist() == ["a b", "c d"]
    assert all(array.shape == (2,) for array in arrays)
    assert read(model.stream("x") | ol.take(0) | ol.latest) == []


@both
def test_rows_are_read_apart(read):
    rows = {}

    def sub(stream):
        return [value for _, value, _ in stream][-1]

    if read is plainly:
        rows = {index: sub(row) for index, row in ol.models.fake().stream(["a b", "c d"]) | ol.by_row}
    else:

        async def reading():
            async for index, row in ol.models.fake().stream(["a b", "c d"]) | ol.by_row:
                rows[index] = [value async for _, value, _ in row][-1]

        asyncio.run(reading())
    assert rows == {(0,): "A B", (1,): "C D"}


def test_rows_may_be_read_after_the_whole():
    log = []
    rows = dict(ol.models.fake(log=log).stream(["a b", "c d"]) | ol.by_row)
    assert [list(row) for row in rows.values()] == [[Snapshot((0,), "A B")], [Snapshot((1,), "C D")]]
    assert len(log) == 2


@both
def test_a_row_is_ended_where_its_value_pleases(read):
    """The others go on; a completion says that it was stopped."""
    model = ol.models.fake()
    stream = model.stream(["one two three", "no"]) | ol.stop_when(lambda text: "TWO" in text)
    assert {index: value for index, value, done in read(stream) if done} == {(0,): "ONE TWO", (1,): "NO"}
    ended = model.complete.stream("one two three") | ol.stop_when(lambda answer: "TWO" in answer.text)
    assert [(value.text, value.finish_reason) for _, value, done in read(ended) if done] == [("ONE TWO", "stopped")]


def test_the_call_behind_an_ended_row_is_cancelled_and_only_that():
    closed = defaultdict(threading.Event)
    go = threading.Event()

    async def run(rows):
        try:
            yield [Event(0, Completion("begun"), False)]
            if rows[0].text != "ended":
                await asyncio.to_thread(go.wait)
                yield [Event(0, Completion("begun and done", "stop"))]
            await asyncio.Event().wait()
        finally:
            closed[rows[0].text].set()

    model = ol.models.Model("m", run, endpoint="e", defaults={}, layers=[ol.batched(1)])
    seen = []

    def read():
        for index, value, done in (
            model.stream(["ended", "other"]) | ol.stop_when(lambda text: True) | ol.filter_rows(lambda i: i == (0,))
        ):
            assert closed["ended"].wait(2)
            go.set()
            seen.append((index, value, done))

    within(read, LIMIT)
    assert seen == [((0,), "begun", True)]


def test_an_ended_stream_runs_once_too():
    log = []
    stream = ol.models.fake(log=log).stream(["one two three", "no"]) | ol.stop_when(lambda text: "TWO" in text)
    assert (stream | ol.collect).tolist() == ["ONE TWO", "NO"]
    assert (stream | ol.collect).tolist() == ["ONE TWO", "NO"]
    assert len(log) == 2


def test_rows_that_are_run_apart_keep_to_the_bound_of_the_function():
    running, most = set(), []

    async def f(x):
        running.add(x)
        most.append(len(running))
        await asyncio.sleep(0)
        running.discard(x)
        return x

    assert (ol.vectorize(f, concurrency=3).stream(range(20)) | ol.stop_when(lambda x: False) | ol.collect).tolist() == list(
        range(20)
    )
    assert max(most) <= 3


@both
def test_the_first_rows_to_finish_win_and_the_others_are_cancelled(read):
    cancelled = []

    async def f(x):
        try:
            if x == "slow":
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(x)
            raise
        return x

    stream = ol.vectorize(f).stream(["slow", "a", "slow", "b"]) | ol.first(2)
    assert sorted(read(stream)) == [((1,), "a", True), ((3,), "b", True)]
    assert cancelled == ["slow", "slow"]
    assert (stream | ol.collect).tolist() == [None, "a", None, "b"]
    assert cancelled == ["slow", "slow"]


@both
def test_rows_that_are_filtered_out_are_cancelled_when_the_others_are_done(read):
    """One row waits for ever; it is left once the two that are kept have answered. Nothing runs where none is kept."""
    log, closed = [], threading.Event()

    async def run(rows):
        log.append(list(rows))
        try:
            yield [ol.Event(i, ol.Completion("done", "stop")) for i in range(2)]
            await asyncio.Event().wait()
        finally:
            closed.set()

    model = ol.models.Model("m", run, endpoint="e", defaults={})
    seen = within(lambda: read(model.stream(["a", "b", "never"]) | ol.filter_rows(lambda index: index[0] < 2)))
    assert sorted(index for index, *_ in seen) == [(0,), (1,)]
    assert closed.wait(5)
    assert read(model.stream(["a", "b"]) | ol.filter_rows(lambda index: False)) == []
    assert len(log) == 1


@both
def test_a_failure_that_is_kept_is_raised_at_the_end(read):
    stream = ol.vectorize(lambda x: 1 // x).stream([0, 1]) | ol.filter_rows(lambda index: index == (0,))
    with pytest.raises(ol.RowErrors):
        read(stream)


def test_streams_of_functions_stop_in_the_middle_too():
    def steps(x):
        for k in range(1000):
            yield f"{x}{k}"

    ended = ol.vectorize(steps).stream(["a", "b"]) | ol.stop_when(lambda text: text == "a0") | ol.collect
    assert ended.tolist()[1] == "b999"


@both
def test_lines_and_sentences_come_whole(read):
    def poem(x):
        text = 'One. Two two!\nThree? "Four." five\n\nsix'
        for k in range(1, len(text) + 1):
            yield text[:k]

    stream = ol.vectorize(poem).stream("x")
    assert [line for _, line in read(stream | ol.lines)] == ["One. Two two!", 'Three? "Four." five', "", "six"]
    assert [part for _, part in read(ol.vectorize(poem).stream("x") | ol.sentences)] == [
        "One.",
        "Two two!",
        "Three?",
        '"Four."',
        "five\n\nsix",
    ]


@LAW
@given(st.text("ab.!?\n \"'", max_size=30), st.data())
def test_units_do_not_depend_on_how_the_text_came(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for op, _pattern in ((ol.lines, LINE), (ol.sentences, SENTENCE)):

        def steps(_):
            yield from (text[:cut] for cut in cuts)
            yield text

        pieces = [piece for _, piece in plainly(ol.vectorize(steps).stream("x") | op)]
        whole = [piece for _, piece in plainly(ol.vectorize(lambda _: text).stream("x") | op)]
        assert pieces == whole
    assert "\n".join(piece for _, piece in plainly(ol.vectorize(lambda _: text).stream("x") | ol.lines)) == text.removesuffix(
        "\n"
    )


def test_json_is_read_as_it_comes_and_what_is_none_fails():
    def answer(_):
        text = '{"name": "Ann", "tags": ["a", "bc"]}'
        for k in range(1, len(text) + 1):
            yield text[:k]

    values = [value for _, value, _ in ol.vectorize(answer).stream("x") | ol.partial_json]
    assert values[-1] == {"name": "Ann", "tags": ["a", "bc"]}
    assert all(isinstance(value, dict) for value in values)
    with pytest.raises(MalformedError):
        ol.vectorize(lambda _: '{"name": ').stream("x") | ol.partial_json | ol.collect
    with pytest.raises(ol.RowErrors) as caught:
        ol.vectorize(lambda x: x).stream(["1", "{"]) | ol.partial_json | ol.collect
    assert caught.value.partial[0] == 1
    assert list(caught.value.errors) == [(1,)]


@both
def test_silence_meets_the_idle_timeout_and_slow_streams_do_not(read):
    closed = threading.Event()
    seen = []
    with pytest.raises(TimedOutError, match=r"nothing came for 0\.05 s"):
        read(hanging(closed).stream("a") | ol.timeout(idle=0.05) | ol.peek(seen.append))
    assert seen[-1] == ((), "one two", False)
    assert closed.wait(1)


@both
def test_throttled_streams_lose_no_answer(read):
    stream = ol.models.fake().stream([f"{k} and more words" for k in range(20)]) | ol.throttle(0.02)
    assert sorted(value for _, value, done in read(stream) if done) == sorted(f"{k} AND MORE WORDS" for k in range(20))


def test_an_error_comes_after_what_was_held():
    async def run(rows):
        yield [Event(0, Completion("one"), False)]
        raise ZeroDivisionError

    for op in (ol.throttle(5), ol.chunks(every=5), ol.chunks(10)):
        seen = []
        with pytest.raises(ZeroDivisionError):
            ol.models.Model("m", run, endpoint="e", defaults={}).stream("a") | op | ol.peek(seen.append) | list
        assert len(seen) == (op is not None)


def test_chunks_take_a_number_or_a_time():
    with pytest.raises(TypeError):
        list(ol.models.fake().stream("a") | ol.chunks)
    with pytest.raises(ValueError, match="n=0"):
        list(ol.models.fake().stream("a") | ol.chunks(0))
    numbers = ol.vectorize(lambda x: x).stream(range(5)) | ol.finished | ol.chunks(2)
    assert [len(chunk) for chunk in numbers] == [2, 2, 1]


def test_the_latest_of_several_streams_go_together():
    one, two = (ol.vectorize(lambda x: x).stream(k) for k in (1, 2))
    assert list(ol.zip_latest(one | ol.finished, two | ol.finished)) == [(((), 1), ((), 2))]
    assert list(ol.zip_latest()) == []
    assert list(ol.merge()) == []


def test_operators_show_errors_in_the_code_that_they_call():
    with pytest.raises(ZeroDivisionError):
        ol.models.fake().stream(["a", "b"]) | ol.map_values(lambda text: 1 / 0) | ol.collect


def test_code_that_operators_call_may_block_and_call_models():
    """It runs in no loop of the library's."""
    model = ol.models.fake()
    made = within(lambda: model.stream(["a", "b"]) | ol.map_values(lambda text: model(text + "!")) | ol.collect, LIMIT)
    assert made.tolist() == ["A!", "B!"]


def test_failures_pass_through_operators():
    def picky(x):
        if x == "b":
            raise LookupError(x)
        return x

    seen = []
    with pytest.raises(ol.RowErrors):
        ol.vectorize(picky).stream(["a", "b"]) | ol.peek(seen.append) | ol.map_values(str.upper) | ol.deltas | list
    assert {type(value) for _, value, _ in seen} == {str, ol.Failure}
    missing = ol.vectorize(picky, on_error="missing").stream(["a", "b"]) | ol.collect
    assert missing.tolist() == ["a", None]


def test_a_series_is_collected_into_a_series():
    import pandas as pd

    column = pd.Series(["a", "b"], index=[3, 4])
    assert (ol.models.fake().stream(column) | ol.collect).to_dict() == {3: "A", 4: "B"}


def test_streams_of_no_call_have_no_shape():
    with pytest.raises(TypeError, match="no shape"):
        ol.merge(ol.models.fake().stream("a")) | ol.collect


def test_operators_want_the_right_thing():
    with pytest.raises(TypeError, match="texts, not of int"):
        list(ol.vectorize(len).stream(["a"]) | ol.deltas)
    with pytest.raises(ValueError, match="n=-1"):
        ol.models.fake().stream("a") | ol.first(-1)


SCRIPT = """
import asyncio
import outlines_like as ol

async def hang(x):
    try:
        yield x
        await asyncio.Event().wait()
    finally:
        print("closed", flush=True)

stream = ol.vectorize(hang).stream(["a", "b"])
for item in {chain}:
    print("item", flush=True)
"""


@pytest.mark.parametrize(
    "chain",
    [
        "stream",
        "stream | ol.map_values(str.upper)",
        "stream | ol.stop_when(lambda text: False)",
        "ol.merge(stream, stream | ol.deltas)",
    ],
)
def test_ctrl_c_ends_a_stream_at_once(chain):
    """Every row is closed, and nothing is said but the KeyboardInterrupt."""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", SCRIPT.format(chain=chain)]
    script = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert [script.stdout.readline(), script.stdout.readline()] == ["item\n", "item\n"]
    start = time.monotonic()
    script.send_signal(signal.SIGINT)
    out, err = script.communicate(timeout=20)
    assert time.monotonic() - start < 3
    assert out.count("closed") == 2
    assert err.splitlines()[-1] == "KeyboardInterrupt"
    assert not any(word in err for word in ("never", "ignored", "destroyed", "Unclosed", "Warning"))


@pytest.mark.parametrize(
    ("written", "said"),
    [
        (lambda stream: ol.deltas([1]), r"deltas\(\[1\]\): too many .*; write stream \| deltas\(\)"),
        (lambda stream: ol.collect("text"), r"collect\('text'\): .*; write stream \| collect\(\)"),
        (lambda stream: ol.timeout(5), r"timeout\(5\): .*; write stream \| timeout\(idle\)"),
        (lambda stream: stream | ol.take, r"take\(\): missing .* 'n'; write stream \| take\(n\)"),
        (lambda stream: ol.map_values(stream), r"map_values\(\): missing .* 'fn'"),
        (lambda stream: stream | 3, r"stream \| 3; behind the bar stands an operator"),
        (lambda stream: (ol.models.fake().stream() + "x") | 3, r"stream \| 3; behind the bar stands an operator"),
    ],
)
def test_what_no_operator_takes_is_refused_where_it_is_written(written, said):
    with pytest.raises(TypeError, match=said):
        written(ol.models.fake().stream("x"))


@pytest.mark.parametrize(
    ("operator", "said"),
    [
        (lambda: ol.take(-1), "n=-1"),
        (lambda: ol.take(1.5), "n=1.5"),
        (lambda: ol.first(0), "n=0"),
        (lambda: ol.tee(0), "n=0"),
        (lambda: ol.chunks(0), "n=0"),
        (lambda: ol.chunks(every=0), "every=0"),
        (lambda: ol.chunks(every=float("inf")), "every=inf"),
        (lambda: ol.throttle(-1), "every=-1"),
        (lambda: ol.throttle("1"), "every='1'"),
        (lambda: ol.timeout(idle=-1), "idle=-1"),
        (lambda: ol.timeout(idle=0), "idle=0"),
        (lambda: ol.timeout(idle=True), "idle=True"),
        (lambda: ol.timeout(idle=float("nan")), "idle=nan"),
        (lambda: ol.watch(height=0), "height=0"),
    ],
)
def test_a_number_that_means_nothing_is_refused_before_anything_runs(operator, said):
    log = []
    with pytest.raises((ValueError, TypeError), match=f"{said}; it takes a (whole|finite) number"):
        ol.models.fake(log=log).stream("x") | operator()
    assert log == []
