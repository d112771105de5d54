"""What can be lifted, and what becomes of errors."""

import asyncio
import contextvars
import functools
import inspect
import threading

import numpy as np
import pytest

import outlines_like as ol
from outlines_like import RowErrors, bridge
from outlines_like.errors import BlockingError

from .backends import Drawn, endless, within


class Picky:
    """A function that fails for chosen rows and counts its calls."""

    def __init__(self, *bad, error=LookupError):
        self.bad, self.error, self.calls = bad, error, []

    def __call__(self, x):
        self.calls.append(x)
        if x in self.bad:
            raise self.error(x)
        return x + "!"


def asynchronous(fn):
    @functools.wraps(fn, updated=())
    async def run(*args):
        return fn(*args)

    return run


# Forms


def test_name_and_doc_of_what_is_lifted_stay():
    def plain(x: str, y: int = 1) -> str:
        """Plain words."""

    async def waiting(x):
        """Waiting words."""

    for fn in (plain, waiting):
        f = ol.vectorize(fn)
        assert (f.__name__, f.__doc__, f.__qualname__, f.__module__) == (
            fn.__name__,
            fn.__doc__,
            fn.__qualname__,
            fn.__module__,
        )
        assert f.__wrapped__ is fn
        assert inspect.signature(f) == inspect.signature(fn)
    assert "plain" in repr(ol.vectorize(plain))


def test_a_function_of_nothing_is_called_once():
    async def one():
        return 1

    assert ol.vectorize(lambda: 1)() == 1
    assert ol.vectorize(one)() == 1
    assert ol.vectorize(lambda: one())() == 1
    assert ol.vectorize(lambda: 1)(samples=2).tolist() == [1, 1]


class Greeter:
    greeting = "hello "

    @ol.elemwise
    def plain(self, name):
        return self.greeting + name

    @ol.elemwise(on_error="missing")
    async def waiting(self, name):
        return self.greeting + name

    @staticmethod
    @ol.elemwise
    def static(name):
        return "static " + name

    @classmethod
    def kind(cls, name):
        return cls.greeting + name

    def listed(self, names):
        return [self.greeting + name for name in names]

    listed = ol.vectorize.batched(listed, size=2)


def test_methods_can_be_lifted():
    greeter = Greeter()
    greeter.greeting = "hi "
    assert greeter.plain(["a", "b"]).tolist() == ["hi a", "hi b"]
    assert greeter.waiting(["a", "b"]).tolist() == ["hi a", "hi b"]
    assert Greeter.plain(greeter, ["a"]).tolist() == ["hi a"]
    assert Greeter.static(["a"]).tolist() == ["static a"]
    assert ol.vectorize(greeter.kind)(["a"]).tolist() == ["hello a"]


def test_a_method_keeps_how_it_was_lifted():
    """Batches, layers and options do not get lost on the way through an instance."""
    tries = []

    class Flaky:
        def ask(self, x):
            tries.append(x)
            if len(tries) < 3:
                raise LookupError(x)
            return x + "!"

        ask = ol.through(ol.vectorize(ask), ol.retried(3, on=lambda error: True, wait=lambda *_: 0))

    assert Greeter().listed(["a", "b", "c"]).tolist() == ["hello a", "hello b", "hello c"]
    assert Flaky().ask("a") == "a!"


def test_lifting_twice_changes_nothing():
    f = ol.vectorize(lambda x: x[0], signature="(m)->()", on_error="return")
    g = ol.vectorize(f)
    assert g([["a", "b"], ["c", "d"]]).tolist() == ["a", "c"]
    failing = ol.vectorize(ol.vectorize(Picky("b"), on_error="missing"))
    assert failing(["a", "b"]).tolist() == ["a!", None]
    model = ol.models.fake()
    assert ol.vectorize(ol.vectorize(model))(["a"]).tolist() == ["A"]
    assert ol.vectorize(model, on_error="return")(["a"]).tolist() == ["A"]


def test_what_is_no_function_is_refused():
    for thing in ("text", 5, None, [len]):
        with pytest.raises(TypeError, match="vectorize takes a model or a function"):
            ol.vectorize(thing)


@pytest.mark.parametrize("options", [{"on_error": "ignore"}, {"concurrency": 0}, {"concurrency": -1}, {"signature": "x"}])
def test_options_that_mean_nothing_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        within(lambda: ol.vectorize(len, **options))
    with pytest.raises(TypeError):
        ol.vectorize(len, onerror="raise")


@pytest.mark.parametrize("samples", [-1, True, "3", 1.5])
def test_samples_are_a_number(samples):
    with pytest.raises((ValueError, TypeError)):
        ol.vectorize(len)("a", samples=samples)


@pytest.mark.parametrize("samples", [np.int64(2), 2])
def test_samples_may_be_numpys(samples):
    assert ol.vectorize(len)("a", samples=samples).tolist() == [1, 1]


def test_no_samples_are_no_calls():
    calls = []
    f = ol.vectorize(calls.append)
    assert f(["a", "b"], samples=0).shape == (2, 0)
    assert f("a", samples=0).shape == (0,)
    assert calls == []


def test_keywords_can_be_anything_the_function_takes():
    def f(a, *rest, k="k", **more):
        return f"{a}{''.join(rest)}{k}{''.join(more.values())}"

    lifted = ol.vectorize(f)
    assert lifted(["a", "b"], "x", ["y", "z"], k=["1", "2"], other="o").tolist() == ["axy1o", "bxz2o"]
    with pytest.raises(TypeError, match="missing a required argument"):
        lifted()


# Batch functions


def test_a_batch_function_gets_lists_of_at_most_its_size():
    sizes = []

    def upper(words, marks):
        sizes.append(len(words))
        return [word.upper() + mark for word, mark in zip(words, marks, strict=True)]

    f = ol.vectorize.batched(upper, size=3)
    assert f([["a", "b"], ["c", "d"]], "!").tolist() == [["A!", "B!"], ["C!", "D!"]]
    assert f(["a", None, "b"], marks=["1", "2", "3"]).tolist() == ["A1", None, "B3"]
    assert f("a", "?") == "A?"
    assert sizes == [3, 1, 2, 1]


def test_an_async_batch_function_is_awaited():
    async def upper(words):
        return [word.upper() for word in words]

    assert ol.vectorize.batched(upper, size=2)(["a", "b", "c"]).tolist() == ["A", "B", "C"]


@pytest.mark.parametrize("result", [["one"], ["one"] * 3, "ab", None, 5])
def test_a_batch_function_that_returns_something_else_fails_those_rows(result):
    f = ol.vectorize.batched(lambda words: result, size=2, on_error="return")
    out = f(["a", "b"])
    assert [type(cell) for cell in out] == [ValueError, ValueError]
    assert "list of 2" in str(out[0])


def test_a_batch_that_fails_costs_no_other_batch():
    def upper(words):
        if "c" in words:
            raise LookupError("c")
        return [word.upper() for word in words]

    with pytest.raises(RowErrors) as caught:
        ol.vectorize.batched(upper, size=2)(["a", "b", "c", "d", "e"])
    assert list(caught.value.errors) == [(2,), (3,)]
    assert caught.value.partial[[0, 1, 4]].tolist() == ["A", "B", "E"]


# Concurrency


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_no_more_calls_are_under_way_than_asked_for(concurrency):
    """V: 500 prompts with concurrency=16."""
    gate = Drawn(0)

    async def f(x):
        await gate.turn()
        return x

    assert ol.vectorize(f, concurrency=concurrency)(range(500)).tolist() == list(range(500))
    assert gate.most == concurrency


def test_plain_functions_run_side_by_side_up_to_the_bound():
    meeting = threading.Barrier(8)
    running, most = [], []

    def f(x):
        running.append(x)
        most.append(len(running))
        meeting.wait(10)  # only eight that are there together get past
        running.remove(x)
        return x

    assert within(lambda: ol.vectorize(f, concurrency=8)(range(16))).tolist() == list(range(16))
    assert max(most) <= 8


def test_a_model_can_be_bounded_further():
    gate = Drawn(1)
    model = ol.models.Model("gated", backend_of(gate), endpoint="gated", defaults={}, layers=[ol.batched(1)])
    assert ol.vectorize(model, concurrency=2)([str(k) for k in range(20)]).tolist() == [str(k) for k in range(20)]
    assert gate.most == 2


def backend_of(gate):
    async def run(rows):
        await gate.turn()
        yield [ol.Event(i, ol.Completion(row.text, "stop")) for i, row in enumerate(rows)]

    return run


def test_context_variables_travel_along():
    color = contextvars.ContextVar("color", default="none")
    color.set("blue")

    async def waiting(x):
        return x + color.get()

    assert ol.vectorize(lambda x: x + color.get())(["a", "b"]).tolist() == ["ablue", "bblue"]
    assert ol.vectorize(waiting)(["a", "b"]).tolist() == ["ablue", "bblue"]


def test_progress_is_told():
    told = []
    ol.vectorize(lambda x: x, progress=lambda done, total: told.append((done, total)))(range(20))
    assert told[-1] == (20, 20)
    assert told == sorted(told)


# Errors


@pytest.mark.parametrize("kind", [lambda fn: fn, asynchronous], ids=["sync", "async"])
def test_one_row_that_fails_costs_no_other_row(kind):
    picky = Picky("b")
    with pytest.raises(RowErrors) as caught:
        ol.vectorize(kind(picky))([["a", "b"], ["c", "d"]])
    error = caught.value
    assert sorted(picky.calls) == ["a", "b", "c", "d"]
    assert list(error.errors) == [(0, 1)]
    assert type(error.errors[0, 1]) is LookupError
    assert "(0, 1)" in str(error)
    assert "LookupError: b" in str(error)
    assert error.partial.shape == (2, 2)
    assert error.partial[0, 1] is error.errors[0, 1]
    assert [error.partial[index] for index in ((0, 0), (1, 0), (1, 1))] == ["a!", "c!", "d!"]


def test_the_error_names_the_sample_too():
    with pytest.raises(RowErrors) as caught:
        ol.vectorize(Picky("b"))(["a", "b"], samples=2)
    assert list(caught.value.errors) == [(1, 0), (1, 1)]
    assert caught.value.partial[0].tolist() == ["a!", "a!"]


def test_on_error_return_puts_the_error_in_its_cell():
    out = ol.vectorize(Picky("b"), on_error="return")(["a", "b", "c"])
    assert out[[0, 2]].tolist() == ["a!", "c!"]
    assert isinstance(out[1], LookupError)
    assert isinstance(ol.vectorize(Picky("b"), on_error="return")("b"), LookupError)


def test_on_error_missing_leaves_none():
    assert ol.vectorize(Picky("b"), on_error="missing")(["a", "b", "c"]).tolist() == ["a!", None, "c!"]
    assert ol.vectorize(Picky("b"), on_error="missing")("b") is None


def test_a_scalar_call_raises_its_bare_error():
    mine = LookupError("mine")

    def f(x):
        raise mine

    with pytest.raises(LookupError) as caught:
        ol.vectorize(f)("a")
    assert caught.value is mine
    assert any(entry.name == "f" for entry in caught.traceback)


def test_nothing_is_set_on_the_users_own_errors():
    mine = LookupError("mine")
    before = dict(vars(mine))

    def f(x):
        raise mine

    with pytest.raises(RowErrors) as caught:
        ol.vectorize(f)(["a", "b"])
    assert set(caught.value.errors.values()) == {mine}
    assert vars(mine) == before
    assert not hasattr(mine, "__notes__")
    assert mine.__cause__ is None


def test_row_errors_are_an_exception_group():
    def f(x):
        raise {"a": LookupError, "b": ArithmeticError, "c": LookupError}[x](x)

    seen = {}
    try:
        ol.vectorize(f)(["a", "b", "c"])
    except* LookupError as group:
        seen["lookup"] = group
    except* ArithmeticError as group:
        seen["arithmetic"] = group
    assert isinstance(seen["lookup"], RowErrors)
    assert isinstance(seen["lookup"], ol.OutlinesError)
    assert list(seen["lookup"].errors) == [(0,), (2,)]
    assert list(seen["arithmetic"].errors) == [(1,)]
    with pytest.raises(RowErrors) as caught:
        ol.vectorize(f)(["a", "b", "c"])
    match, rest = caught.value.split(LookupError)
    assert [len(match.exceptions), len(rest.exceptions)] == [2, 1]
    assert match.partial is caught.value.partial
    assert caught.value.subgroup(KeyError) is None


def test_groups_of_the_users_own_are_one_error():
    def f(x):
        raise ExceptionGroup("mine", [ValueError(x), LookupError(x)])

    with pytest.raises(RowErrors) as caught:
        ol.vectorize(f)(["a", "b"])
    assert [len(error.exceptions) for error in caught.value.errors.values()] == [2, 2]


@pytest.mark.parametrize("waits", [True, False])
def test_fail_fast_cancels_the_rest(waits):
    calls = []

    async def f(x):
        calls.append(x)
        if waits and x == 0:
            await asyncio.sleep(0)
        elif waits:
            await asyncio.Event().wait()
        raise LookupError(x)

    f = ol.vectorize(f, fail_fast=True, concurrency=4)
    with pytest.raises(RowErrors) as caught:
        within(lambda: f(range(1000)))
    assert len(calls) < 100
    assert isinstance(caught.value.errors[0,], LookupError)
    assert caught.value.partial[999] is None


def test_fail_fast_in_threads_starts_no_more_rows():
    def f(x):
        if x == 0:
            raise LookupError(x)
        released.wait(10)
        started.append(x)

    released, started = threading.Event(), []
    with pytest.raises(RowErrors):
        within(lambda: ol.vectorize(f, fail_fast=True, concurrency=4)(range(1000)))
    released.set()
    assert len(started) <= 4


def test_fail_fast_cancels_a_models_calls():
    log, closed = [], threading.Event()
    hanging = endless(log, closed)

    async def run(rows):
        if rows[0].text == "bad":
            yield [ol.Event(0, ol.Failure(LookupError("bad")))]
            return
        async for burst in hanging(rows):
            yield burst

    model = ol.models.Model("x", run, endpoint="x", defaults={}, layers=[ol.batched(1, concurrency=2)])
    with pytest.raises(RowErrors):
        within(lambda: ol.vectorize(model, fail_fast=True)(["a", "bad", *"cdefgh"]))
    assert closed.wait(5)
    assert len(log) <= 2


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize(
    "kind", [lambda fn: fn, asynchronous, lambda fn: lambda x: asynchronous(fn)(x)], ids=["sync", "async", "coroutine"]
)
@pytest.mark.parametrize("args", ["b", ["a", "b", "c"]], ids=["scalar", "array"])
def test_what_ends_the_program_in_user_code_ends_it(error, kind, args):
    """T18: it is no row's failure, and the library lives on."""
    with pytest.raises(error):
        within(lambda: ol.vectorize(kind(Picky("b", error=error)))(args))
    assert bridge.home().thread.is_alive()
    assert within(lambda: ol.vectorize(lambda x: x)(["a"])).tolist() == ["a"]


@pytest.mark.parametrize("kind", [lambda fn: fn, asynchronous], ids=["sync", "async"])
def test_what_ends_the_program_comes_through_streams_and_awaits(kind):
    f = ol.vectorize(kind(Picky("b", error=SystemExit)))
    with pytest.raises(SystemExit):
        within(lambda: list(f.stream(["b"])))
    with pytest.raises(SystemExit):
        within(lambda: asyncio.run(f.acall(["b"])))
    assert within(lambda: ol.vectorize(lambda x: x)("a")) == "a"


def test_a_model_in_the_arguments_is_one_element():
    loud, quiet = ol.models.fake(), ol.models.fake(lambda request: request.text.lower())
    assert ol.vectorize(lambda model, text: model(text))([loud, quiet], "Hey").tolist() == ["HEY", "hey"]


def test_a_blocking_call_on_the_librarys_loop_says_what_to_write():
    inner = ol.vectorize(lambda x: x)

    async def blocks(x):
        return inner(x)

    with pytest.raises(BlockingError, match=r"await f\.acall") as caught:
        within(lambda: ol.vectorize(blocks)("a"))
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises(RowErrors) as group:
        within(lambda: ol.vectorize(blocks)(["a", "b"]))
    assert {type(error) for error in group.value.errors.values()} == {BlockingError}

    async def iterates(x):
        return list(inner.stream(x))

    with pytest.raises(BlockingError):
        within(lambda: ol.vectorize(iterates)("a"))


def test_a_million_trivial_rows_are_cheap():
    """A thousandth of it, without a task or a thread a row."""
    before = threading.active_count()
    assert ol.vectorize(lambda x: x + 1)(range(10_000)).tolist() == list(range(1, 10_001))
    assert threading.active_count() <= before + 64


# through


def test_layers_wrap_functions_models_and_bare_backends():
    seen = []
    layer = ol.tapped(lambda burst: seen.extend(burst))
    assert ol.through(ol.vectorize(lambda x: x + "!"), layer)(["a"]).tolist() == ["a!"]
    assert ol.through(ol.models.fake(), layer)(["a"]).tolist() == ["A"]

    async def bare(rows):
        yield [ol.Event(i, row) for i, row in enumerate(rows)]

    async def read():
        return [burst async for burst in ol.through(bare, layer)(["a"])]

    assert asyncio.run(read()) == [[ol.Event(0, "a")]]
    assert [type(event.value).__name__ for event in seen] == ["str", "Completion", "str"]


def test_layers_come_innermost_first():
    order = []

    def named(name):
        def layer(run):
            async def named_run(rows):
                order.append(name)
                async for burst in run(rows):
                    yield burst

            return named_run

        return layer

    ol.through(ol.vectorize(lambda x: x), named("inner"), named("outer"))("a")
    assert order == ["outer", "inner"]


def test_a_plan_runs_nothing():
    calls, log = [], []
    assert ol.vectorize(calls.append).plan([["a", None]], samples=3) == ol.Plan(rows=6, cached=0, unique=3, calls=3)
    model = ol.models.fake(log=log)
    assert model.plan(["a", "b", "a", None], samples=2) == ol.Plan(rows=8, cached=0, unique=6, calls=3)
    assert model.plan(["a", "b", "a"], temperature=0) == ol.Plan(rows=3, cached=0, unique=2, calls=2)
    assert (calls, log) == ([], [])
    model("a", samples=3)
    assert model.plan(["a", "b"], samples=5) == ol.Plan(rows=10, cached=3, unique=10, calls=2)
    assert len(log) == 1
