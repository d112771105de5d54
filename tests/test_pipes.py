"""Pipes: rows flow one by one through several functions, and generators are functions that stream."""

import asyncio
import functools
import threading
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outlines_like as ol

from .backends import Drawn, Shuffled, within

LIMIT = 10


@pytest.mark.parametrize("shape", ["a", ["a"], [["a", "b"], ["c", "d"]], []])
@pytest.mark.parametrize("samples", [None, 2])
def test_a_pipe_is_the_functions_one_after_the_other(shape, samples):
    prompt, model, parse = ol.vectorize(lambda x: x + " and more"), ol.models.fake(), ol.vectorize(str.split)
    whole = ol.pipe(prompt, model, parse)(shape, samples=samples)
    apart = parse(model(prompt(shape), samples=samples))
    assert whole == apart if isinstance(apart, list) else (whole.shape, whole.tolist()) == (apart.shape, apart.tolist())
    assert asyncio.run(ol.pipe(prompt, model, parse).acall(shape)) is not None


def test_no_row_waits_for_another():
    """The first row is parsed while the second is still asked."""
    parsed = threading.Event()

    async def ask(x):
        if x == "second":
            assert await asyncio.to_thread(parsed.wait, 5)
        return x.upper()

    def parse(text):
        parsed.set()
        return text + "!"

    assert within(lambda: ol.pipe(ask, parse)(["first", "second"]), LIMIT).tolist() == ["FIRST!", "SECOND!"]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 12), st.integers(0, 2**32), st.integers(1, 4))
def test_any_delays_leave_rows_in_their_cells_and_bounds_kept(n, seed, bound):
    gate, running, most = Drawn(seed), set(), [0]

    async def slow(x):
        running.add(x)
        most.append(len(running))
        await gate.turn()
        running.discard(x)
        return f"{x}?"

    async def other(x):
        await gate.turn()
        return f"{x}!"

    f = ol.pipe(other, ol.vectorize(slow, concurrency=bound), other)
    assert within(lambda: f(range(n)), LIMIT).tolist() == [f"{x}!?!" for x in range(n)]
    assert max(most) <= bound


def test_values_so_far_flow_through_the_stages_that_take_them():
    async def grows(x):
        yield "a"
        await asyncio.sleep(0.01)
        yield "a b"

    size = ol.vectorize(len, partial=True)
    assert [(v, done) for _, v, done in ol.pipe(grows, str.upper, size).stream("x")] == [(3, True)]
    snapshots = [(v, done) for _, v, done in ol.pipe(grows, ol.vectorize(str.upper, partial=True), size).stream("x")]
    assert snapshots[0] == (1, False)
    assert snapshots[-1] == (3, True)
    assert ol.pipe(grows, ol.vectorize(int, partial=True), on_error="missing")("x") is None


def test_a_model_at_the_end_of_a_pipe_streams():
    with ol.cache.disabled():
        texts = [text for _, text, _ in ol.pipe(lambda name: f"hello dear {name}", ol.models.fake()).stream("you")]
    assert texts[-1] == "HELLO DEAR YOU"
    assert all("HELLO DEAR YOU".startswith(text) for text in texts)


def test_failures_and_missing_values_stay_in_their_rows():
    def picky(text):
        if text == "B":
            raise LookupError(text)
        return text

    f = ol.pipe(ol.models.fake(), picky, len)
    with pytest.raises(ol.RowErrors) as caught:
        f(["a", "b", None])
    assert list(caught.value.errors) == [(1,)]
    assert caught.value.partial[[0, 2]].tolist() == [1, None]
    assert ol.pipe(lambda x: 5, ol.models.fake(), on_error="return")(["a"])[0].args[0].startswith("a prompt is int")
    with pytest.raises(TypeError):
        ol.pipe()


def test_equal_prompts_of_different_rows_are_draws_of_their_own_and_replay():
    log = []
    model = ol.models.fake(lambda request: f"{request.text} {len(log)}", log=log)
    f = ol.pipe(lambda x: "same", model)
    first = f(["a", "b", "a"]).tolist()
    assert len(log) == 3
    assert f(["a", "b", "a"]).tolist() == first
    assert f(["a"]).tolist() == first[:1]
    assert len(log) == 3


def test_pipes_are_lifted_functions():
    class Shop:
        def __init__(self, mark):
            self.mark = mark

        def ask(self, x):
            return x + self.mark

        answer = ol.pipe(ask, ol.models.fake())

    assert Shop("!").answer(["a"]).tolist() == ["A!"]
    assert ol.through(ol.pipe(str.upper, len), ol.guarded)(["ab"]).tolist() == [2]
    assert ol.pipe(ol.pipe(str.upper, str.strip), len)([" ab "]).tolist() == [2]
    assert ol.vectorize(ol.pipe(str.upper, len), concurrency=1)(["ab"] * 3).tolist() == [2, 2, 2]
    assert ol.pipe(str.upper, ol.models.fake()).plan(["a", "b"]).rows == 2


def test_leaving_a_pipe_leaves_every_stage():
    backend, begun, cancelled = Shuffled(0), threading.Event(), threading.Event()

    async def hang(x):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def leave(stream):
        reading = asyncio.create_task(ol.acollect(stream))
        await asyncio.to_thread(begun.wait)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    model = ol.models.Model("m", backend, endpoint="e", defaults={})
    asyncio.run(leave(ol.pipe(model, hang).stream(["a", "b"])))
    assert cancelled.wait(5)
    assert backend.opened == backend.closed


# Generators


def plain(x):
    yield x
    yield x + "!"


async def waiting(x):
    yield x
    await asyncio.sleep(0)
    yield x + "!"


class Speaker:
    def __call__(self, x):
        yield x
        yield x + "!"

    def method(self, x):
        yield x
        yield x + "!"


@pytest.mark.parametrize("fn", [plain, waiting, Speaker(), Speaker().method, functools.partial(plain)], ids=str)
def test_the_last_thing_that_a_generator_yields_is_its_answer(fn):
    f = ol.vectorize(fn)
    assert f(["a", "b"]).tolist() == ["a!", "b!"]
    assert asyncio.run(f.acall("a")) == "a!"
    seen = defaultdict(list)
    for index, value, done in f.stream(["a", "b"]):
        seen[index].append((value, done))
    assert all(values[-1] == (f"{x}!", True) for values, x in zip(seen.values(), "ab", strict=True))
    assert {("a", False), ("a!", True)} <= set(seen[0,])


class Odd(BaseException):
    pass


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("error", [LookupError, KeyboardInterrupt, SystemExit, Odd])
def test_an_error_comes_after_the_pieces_with_its_traceback(kind, at, error):
    """T18: within a second."""

    def steps(x):
        yield from range(at)
        raise error("mine")

    async def asteps(x):
        for k in range(at):
            yield k
        raise error("mine")

    seen = []

    def read():
        for _, value, _ in ol.vectorize(steps if kind == "sync" else asteps).stream("x"):
            seen.append(value)

    with pytest.raises(error) as caught:
        within(read, 1)
    assert seen == list(range(at))
    assert any(entry.name in ("steps", "asteps") for entry in caught.traceback)


def test_a_generator_that_yields_nothing_has_no_answer():
    def nothing(x):
        yield from ()

    async def anothing(x):
        for _ in ():
            yield

    for fn in (nothing, anothing):
        with pytest.raises(ValueError, match="yielded nothing"):
            ol.vectorize(fn)("a")


def test_a_generator_is_closed_when_its_reader_leaves():
    closed = threading.Event()

    def steps(x):
        try:
            yield from range(10**9)
        finally:
            closed.set()

    for _ in ol.vectorize(steps).stream("x"):
        break
    assert closed.wait(1)


def test_a_watching_generator_may_watch_a_model():
    """A function that streams what it reads from another stream."""
    model = ol.models.fake()

    def shout(x):
        for _, text, _ in model.stream(x):
            yield text + "!"

    async def ashout(x):
        async for _, text, _ in model.stream(x):
            yield text + "!"

    with ol.cache.disabled():
        for fn in (shout, ashout):
            values = [value for _, value, _ in within(lambda fn=fn: list(ol.vectorize(fn).stream("one two")), LIMIT)]
            assert values[-1] == "ONE TWO!"


def test_samples_of_one_prompt_travel_together():
    """The model behind a prompt is asked once for all samples of a row; more samples pay for the new ones alone."""
    log = []
    model = ol.models.fake(lambda request: f"{request.text} {request.sample}", log=log)
    ask = ol.pipe(ol.vectorize.batched(lambda words: [f"about {word}" for word in words]), model, str.upper)
    assert ask(["a", "b"], samples=3).tolist() == [[f"ABOUT {x} {k}" for k in range(3)] for x in "AB"]
    assert sorted((call[0].text, len(call)) for call in log) == [("about a", 3), ("about b", 3)]
    ask(["a", "b"], samples=4)
    assert sum(map(len, log)) == 8


def test_samples_whose_prompts_differ_are_asked_apart():
    numbers = iter(range(4))
    ask = ol.pipe(lambda word: f"{word} {next(numbers)}", ol.models.fake(lambda request: f"{request.text} {request.sample}"))
    answers = ask("a", samples=4).tolist()
    assert sorted(a.split()[1] for a in answers) == list("0123")
    assert sorted(a.split()[2] for a in answers) == list("0123")


def test_a_pipe_begins_or_ends_with_programs():
    @ol.program
    def tell(lm, word):
        return lm + f"about {word}:" + ol.gen("x")

    model = ol.models.fake(lambda request: request.text.upper())
    told = ol.pipe(ol.vectorize(tell), lambda lm: lm["x"], model)
    assert told(model, ["a", "b"]).tolist() == ["ABOUT A:", "ABOUT B:"]
    built = ol.pipe(lambda word: model + f"about {word}:", ol.program(lambda lm: lm + ol.gen("x")), lambda lm: lm["x"])
    assert built(["a", "b"]).tolist() == ["ABOUT A:", "ABOUT B:"]


def test_a_pipe_takes_the_options_of_vectorize():
    """``concurrency`` too, which bounds the rows on their way."""
    running, most = [], []

    def slow(x):
        running.append(x)
        most.append(len(running))
        running.remove(x)
        return x

    assert ol.pipe(slow, str, concurrency=1)(range(20)).tolist() == list(map(str, range(20)))
    assert max(most) == 1
    with pytest.raises(ValueError, match="concurrency=0"):
        ol.pipe(slow, concurrency=0)
    with pytest.raises(TypeError, match="via='batch'"):
        ol.pipe(slow, via="batch")
