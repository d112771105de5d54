"""Draws: samples, occurrences, what is replayed and what is asked again."""

import asyncio
import functools
import itertools
import os
import subprocess
import sys
from datetime import date
from decimal import Decimal

import pytest

import outlines_like as ol
from outlines_like import Completion, Event

COUNTER = itertools.count()


def numbered(request):
    """A new answer for every request that is really sent."""
    return f"{request.text}#{next(COUNTER)}"


def counting(log, **options):
    return ol.models.fake(numbered, log=log, **options)


def asked(log):
    return sum(map(len, log))


def test_ten_equal_prompts_are_ten_draws():
    log = []
    out = counting(log)(["hi"] * 10)
    assert len(set(out)) == 10
    assert sorted(request.occurrence for batch in log for request in batch) == list(range(10))


def test_more_samples_pay_only_for_the_new_ones():
    log = []
    model = counting(log)
    five = model("hi", samples=5)
    eight = model("hi", samples=8)
    assert [len(batch) for batch in log] == [5, 3]
    assert eight[:5].tolist() == five.tolist()
    assert len(set(eight)) == 8
    assert model("hi", samples=2).tolist() == five[:2].tolist()
    assert model("hi") == five[0]
    assert asked(log) == 8


def test_more_samples_do_not_shift_equal_prompts():
    log = []
    model = counting(log)
    two = model(["hi", "hi"], samples=2)
    three = model(["hi", "hi", "hi"], samples=3)
    assert three[:2, :2].tolist() == two.tolist()
    assert asked(log) == 9


def test_draws_are_told_apart_and_replayed():
    """K03: five samples of three equal prompts, twice."""
    log, again = [], []
    first = counting(log, temperature=1)(["hi"] * 3, samples=5)
    second = counting(again, temperature=1)(["hi"] * 3, samples=5)
    assert len(set(first.flat)) == 15
    assert second.tolist() == first.tolist()
    assert (asked(log), again) == (15, [])


def test_at_temperature_zero_equal_prompts_share_one_call():
    log = []
    model = counting(log)
    for zero in (0, 0.0):
        out = model([["hi", "hi"], ["hi", "ho"]], samples=3, temperature=zero)
        assert len(set(out.flat)) == 2
    assert asked(log) == 2
    assert len(set(model(["hi", "hi"], temperature=0.1))) == 2


def test_a_default_of_the_model_is_the_same_as_a_setting_of_the_call():
    log = []
    assert counting(log, temperature=0, max_tokens=5)("hi") == counting(log)("hi", max_tokens=5, temperature=0.0)
    assert counting(log, max_tokens=9)("hi", max_tokens=5, temperature=0) == counting(log)("hi", max_tokens=5, temperature=0)
    assert asked(log) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"temperature": 0.5, "max_tokens": 5}, {"max_tokens": 5, "temperature": 0.5}),
        ({}, {"temperature": None, "stop": None}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stop": frozenset(["b", "a", "c"])}, {"stop": {"c", "a", "b"}}),
        ({"stop": "a"}, {"stop": ["a"]}),
        ({"stop": []}, {}),
        ({"temperature": 1}, {"temperature": 1.0}),
    ],
    ids=str,
)
def test_settings_that_mean_the_same_are_one_request(one, other):
    """K06."""
    log = []
    model = counting(log)
    assert model("hi", **one) == model("hi", **other)
    assert model(prompt="hi", **one) == model("hi", **one)
    assert asked(log) == 1


@pytest.mark.parametrize(
    "other", [{"temperature": 0.5}, {"max_tokens": 7}, {"seed": 1}, {"stop": ["b", "a"]}, {"top_p": 0.5}, {"top_k": 3}], ids=str
)
def test_every_setting_that_changes_the_answer_is_another_request(other):
    log = []
    model = counting(log, stop=["a", "b"])
    assert model("hi") != model("hi", **other)
    assert asked(log) == 2


def test_two_models_two_endpoints_and_two_kinds_do_not_collide():
    log = []

    def elsewhere(name, endpoint):
        async def run(rows):
            log.append(len(rows))
            yield [Event(i, Completion(f"{endpoint} {name}", "stop")) for i in range(len(rows))]

        return ol.models.Model(name, run, endpoint=endpoint, defaults={}, layers=[ol.deduped(), ol.cached()])

    names = [("m", "here"), ("m", "there"), ("n", "here")]
    assert [elsewhere(*pair)("hi") for pair in names] == ["here m", "there m", "here n"]
    assert [elsewhere(*pair)("hi") for pair in names] == ["here m", "there m", "here n"]
    assert log == [1, 1, 1]
    talk = [{"role": "user", "content": "hi"}]
    two = counting([])
    assert len({two("hi"), two(talk), two([{"role": "system", "content": "hi"}]), two([*talk, *talk])}) == 4


def test_completions_say_where_they_come_from():
    model = counting([])
    first, second = model.complete("one two"), model.complete("one two")
    assert (first.cached, second.cached) == (False, True)
    assert first.text == second.text
    assert second.finish_reason == "stop"
    assert second.usage == first.usage == ol.Usage(2, 2)
    assert model.complete(["a"], samples=2).shape == (1, 2)


def test_an_answer_cut_by_the_users_own_limit_is_seen():
    model = ol.models.fake()
    cut = model.complete("one two three", max_tokens=2)
    assert (cut.text, cut.finish_reason, cut.usage.completion_tokens) == ("ONE TWO", "length", 2)


@pytest.mark.parametrize(
    ("stop", "wanted"), [("two", "one "), (["three", "two"], "one "), ("o", ""), ([" ", "\n"], "one"), ("x", "one two three")]
)
def test_the_earliest_stop_string_ends_the_answer(stop, wanted):
    """H."""
    model = ol.models.fake(lambda request: request.text)
    assert model("one two three", stop=stop) == wanted
    assert [value for _, value, _ in model.stream("one two three", stop=stop, seed=1)][-1] == wanted


def test_the_cache_can_be_left_out_renewed_and_emptied(tmp_path):
    log = []
    model = counting(log)
    first = model("hi")
    with ol.cache.disabled():
        inside = model("hi")
        assert model("hi") not in (inside, first)
    assert model("hi") == first
    with ol.cache.refresh():
        fresh = model("hi")
    assert model("hi") == fresh != first
    with ol.cache.at(tmp_path / "other"):
        assert model("hi") not in (first, fresh)
    assert model("hi") == fresh
    ol.cache.clear()
    assert model("hi") != fresh
    assert asked(log) == 6


def test_the_choice_is_read_when_the_stream_is_read_and_carried_along():
    log = []
    model = counting(log)
    f = ol.vectorize(lambda x: model(x))
    first = f(["hi"])[0]
    with ol.cache.disabled():
        assert f(["hi"])[0] != first
    assert f(["hi"])[0] == first


# Draws inside lifted functions


MODEL_LOG = []
INNER = ol.models.fake(numbered, log=MODEL_LOG)


def ask(topic):
    return INNER("same words") + "|" + INNER("same words") + "|" + INNER("same words", samples=2)[1]


async def ask_async(topic):
    return await INNER.acall("same words") + "|" + await INNER.acall("same words")


def twice(topic):
    """Lifted functions inside lifted functions."""
    return "&".join(ol.vectorize(ask)(["x", "x"]))


@pytest.mark.parametrize("fn", [ask, ask_async])
@pytest.mark.parametrize(
    "rows", [["a", "b", "c"], ["a", "a", "a"], [object(), object(), object()]], ids=["other", "equal", "nameless"]
)
def test_equal_calls_in_one_row_share_a_draw_and_other_rows_have_their_own(fn, rows):
    MODEL_LOG.clear()
    first = ol.vectorize(fn)(rows)
    draws = [answer.split("|") for answer in first]
    assert all(parts[0] == parts[1] for parts in draws)
    assert len({parts[0] for parts in draws}) == 3
    if fn is ask:
        assert len({parts[2] for parts in draws} | {parts[0] for parts in draws}) == 6
    asked_first = asked(MODEL_LOG)
    assert asked_first == (6 if fn is ask else 3)
    assert ol.vectorize(fn)(rows).tolist() == first.tolist()
    assert asyncio.run(ol.vectorize(fn).acall(rows)).tolist() == first.tolist()
    assert asked(MODEL_LOG) == asked_first


def test_samples_of_a_function_are_draws_of_their_own():
    MODEL_LOG.clear()
    two = ol.vectorize(ask)("a", samples=2)
    three = ol.vectorize(ask)("a", samples=3)
    assert three[:2].tolist() == two.tolist()
    assert len(set(three)) == 3
    assert asked(MODEL_LOG) == 6


def test_rows_two_levels_down_have_draws_of_their_own():
    MODEL_LOG.clear()
    first = ol.vectorize(twice)(["a", "a", "b"])
    parts = [part.split("|")[0] for answer in first for part in answer.split("&")]
    assert len(set(parts)) == 6
    count = asked(MODEL_LOG)
    assert ol.vectorize(twice)(["a", "a", "b"]).tolist() == first.tolist()
    assert asked(MODEL_LOG) == count


def test_a_row_has_the_same_draws_in_any_company():
    alone = ol.vectorize(ask)(["b"])[0]
    assert ol.vectorize(ask)(["a", "b", "c"])[1] == alone


# Functions in a store


CALLS = []


def stored(x, k=2, *, mode="m"):
    CALLS.append((x, k, mode))
    return f"{x}{k}{mode}#{len(CALLS)}"


async def stored_async(x):
    CALLS.append(x)
    return f"{x}#{len(CALLS)}"


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def test_a_stored_function_runs_once_for_each_argument():
    f = ol.through(ol.vectorize(stored), ol.cached({}))
    first = f(["a", "b"])
    assert f(["b", "a", "c"])[:2].tolist() == first[::-1].tolist()
    assert len(CALLS) == 3


def test_a_stored_async_function_is_kept_by_its_value():
    """K01."""
    store = {}
    f = ol.through(ol.vectorize(stored_async), ol.cached(store))
    assert f("a") == f("a") == asyncio.run(f.acall("a")) == "a#1"
    assert CALLS == ["a"]
    assert list(store.values()) == ["a#1"]


def test_samples_and_equal_rows_of_a_stored_function_are_its_draws():
    f = ol.through(ol.vectorize(stored), ol.cached({}))
    first = f(["a", "a"], samples=2)
    assert len(set(first.flat)) == 4
    assert f(["a", "a"], samples=3)[:, :2].tolist() == first.tolist()
    assert len(CALLS) == 6


def test_however_the_arguments_are_written_it_is_the_same_call():
    """K06: also a default that is left out."""
    f = ol.through(ol.vectorize(stored), ol.cached({}))
    ways = [f("a"), f("a", 2), f(x="a"), f("a", k=2), f(k=2, x="a"), f("a", mode="m"), f(mode="m", x="a", k=2)]
    assert len(set(ways)) == 1
    assert len(CALLS) == 1
    assert f("a", 3) != f("a", 2)


def test_a_version_tells_old_answers_from_new_ones():
    store = {}
    one = ol.through(ol.vectorize(stored), ol.cached(store, version="1"))
    other = ol.through(ol.vectorize(stored), ol.cached(store, version="2"))
    assert one("a") != other("a")
    assert one("a") == "a2m#1"
    assert len(CALLS) == 2


def makers():
    def plus(x):
        return x + "+"

    def minus(x):
        return x + "-"

    yield plus
    yield minus
    yield functools.partial(lambda sign, x: x + sign, "*")
    yield functools.partial(lambda sign, x: x + sign, "/")
    for sign in "%=":
        yield lambda x: x + sign  # noqa: B023 (each is used before the next is made)
    yield from [lambda x, sign=sign: x + sign for sign in "<>"]

    def again(x):
        return x + "1"

    yield again

    def again(x):
        return x + "2"

    yield again


def test_two_functions_do_not_collide():
    store = {}
    assert [ol.through(ol.vectorize(fn), ol.cached(store))("a") for fn in makers()] == [f"a{sign}" for sign in "+-*/%=<>12"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (b"a", "YQ=="),
        (Decimal("1"), "1"),
        (date(2020, 1, 1), "2020-01-01"),
        (float("inf"), None),
        (float("nan"), None),
        (1, True),
        (1, "1"),
        ("", None),
    ],
    ids=repr,
)
def test_arguments_that_differ_do_not_collide_in_a_store(one, other):
    """They have names of their own, or are refused; never each other's answers."""
    f = ol.through(ol.vectorize(lambda p, x: f"{type(x).__name__} {x!r}"), ol.cached({}))
    for value in (one, other, one):
        try:
            out = f("p", value)
        except TypeError as error:
            out = str(error)
        assert out == f"{type(value).__name__} {value!r}" or "no stable text" in out


def test_what_has_no_stable_name_is_refused_not_keyed_by_its_address():
    """K07."""

    class Asker:
        def __call__(self, x):
            return x

    f = ol.through(ol.vectorize(stored), ol.cached({}))
    with pytest.raises(TypeError, match="no stable text"):
        f(object())
    with pytest.raises(TypeError, match="no stable name"):
        ol.through(ol.vectorize(Asker()), ol.cached({}))("a")


SCRIPT = """
import functools
import outlines_like as ol
log = []
model = ol.models.fake(lambda request: request.text + "!", log=log)
model(["a", "b"], stop={"alpha", "beta", "gamma", "delta"}, seed=3)
model.complete([[{"role": "user", "content": "hi", "name": "n", "b": {"y": 1, "x": 2}}]], max_tokens=5, temperature=0.5)
ran = []
def shout(x, tags=()):
    ran.append(x)
    return x
ol.through(ol.vectorize(shout, excluded=["tags"]), ol.cached())(["a", "b"], tags=["x"])
ol.through(ol.vectorize(functools.partial(shout, tags=["y"])), ol.cached())(["a", "b"])
def outer(x):
    return model("inside")
ol.vectorize(outer)(["a", "b"])
print(len(log), len(ran))
"""


def test_another_process_finds_every_answer(store_folder):
    """K07: whatever PYTHONHASHSEED is."""
    counts = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=30
        )
        assert done.stderr == ""
        counts.append(done.stdout.split())
    assert counts == [["5", "4"], ["0", "0"]]
