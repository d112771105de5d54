"""The shape law and what is one element (section 1 of the cases)."""

import asyncio
import datetime
import functools
import random
import tracemalloc
from dataclasses import dataclass

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outlines_like as ol
from outlines_like.errors import ShapeError

from .backends import Drawn

SYSTEM, USER = {"role": "system", "content": "s"}, {"role": "user", "content": "u"}
TALK = [SYSTEM, USER]


def objects(shape, *values):
    array = np.empty(shape, dtype=object)
    for index, value in zip(np.ndindex(shape), values, strict=True):
        array[index] = value
    return array


def drawn(request):
    return f"{request.text}/{request.occurrence}/{request.sample}"


async def joined(*args):
    return "+".join(args)


def labels(k, shape):
    """An array whose cells say which argument they are of and where they stand."""
    return objects(shape, *(f"{k}{list(index)}" for index in np.ndindex(shape)))


# The law


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3).flatmap(lambda n: hnp.mutually_broadcastable_shapes(num_shapes=n, max_dims=3, min_side=0, max_side=3)),
    st.sampled_from([None, None, 0, 1, 3]),
    st.booleans(),
)
def test_the_shape_is_what_numpy_broadcasts_and_then_the_samples(shapes, samples, plain):
    columns = [labels(k, shape) for k, shape in enumerate(shapes.input_shapes)]
    fn = (lambda *args: "+".join(args)) if plain else joined
    out = ol.vectorize(fn, concurrency=4)(*columns, samples=samples)
    loop = np.broadcast_shapes(*shapes.input_shapes)
    wanted = objects(loop, *("+".join(cells) for cells in np.broadcast(*columns))) if len(columns) > 1 else None
    wanted = columns[0] if wanted is None else wanted
    if loop == () and samples is None:
        assert out == wanted[()]
        return
    assert out.dtype == object
    assert out.shape == loop + (() if samples is None else (samples,))
    assert out.tolist() == (wanted if samples is None else np.repeat(wanted[..., None], samples, -1)).tolist()


@settings(max_examples=40, deadline=None)
@given(
    hnp.mutually_broadcastable_shapes(signature="(i),(i,j)->(j,i)", max_dims=2, min_side=0, max_side=3),
    st.sampled_from([None, None, 0, 1, 3]),
)
def test_the_shape_is_loop_then_core_then_samples(shapes, samples):
    left, right = (labels(k, shape) for k, shape in enumerate(shapes.input_shapes))

    async def turned(x, y):
        out = np.empty(y.shape[::-1], dtype=object)
        for i, j in np.ndindex(y.shape):
            out[j, i] = x[i] + y[i, j]
        return out

    out = ol.vectorize(turned, signature="(i),(i,j)->(j,i)")(left, right, samples=samples)
    wanted = objects(
        np.broadcast_shapes(left[..., None].shape, right.shape), *(a + b for a, b in np.broadcast(left[..., None], right))
    )
    wanted = np.moveaxis(wanted, -1, -2)
    ran = 0 not in shapes.result_shape[:-2] and samples != 0
    core = shapes.result_shape if ran else (*shapes.result_shape[:-2], *wanted.shape[-2:])
    assert out.shape == core + (() if samples is None else (samples,))
    assert out.tolist() == (wanted if samples is None else np.repeat(wanted[..., None], samples, -1)).tolist()


@settings(max_examples=40, deadline=None)
@given(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3), st.sampled_from([None, 0, 1, 4]))
def test_a_model_answers_in_the_shape_of_the_prompts(shape, samples):
    prompts, log = labels("p", shape), []
    with ol.cache.disabled():
        out = ol.models.fake(drawn, log=log)(prompts, samples=samples)
    if shape == () and samples is None:
        assert out == "p[]/0/0"
        return
    assert out.shape == shape + (() if samples is None else (samples,))
    for index in np.ndindex(out.shape):
        place, sample = (index, 0) if samples is None else (index[:-1], index[-1])
        assert out[index] == f"p{list(place)}/0/{sample}"
    assert sum(map(len, log)) == out.size


# V: shapes that are kept


@pytest.mark.parametrize("shape", [(1,), (1, 3), (2, 1), (1, 1), (2, 2), (1, 2, 1)])
def test_axes_of_one_are_kept(shape):
    out = ol.models.fake(drawn)(labels("p", shape))
    assert out.shape == shape
    assert out[(0,) * len(shape)] == f"P{[0] * len(shape)}/0/0".lower()
    assert ol.models.fake(drawn)(labels("p", shape), samples=1).shape == (*shape, 1)


@pytest.mark.parametrize(
    "empty",
    [[], (), range(0), np.empty((0, 3), dtype=object), np.empty((2, 0)), [[], []]],
    ids=["list", "tuple", "range", "0x3", "2x0", "lists"],
)
def test_nothing_in_is_nothing_out_of_the_same_shape(empty):
    """S09."""
    calls, log = [], []
    shape = np.shape(empty)
    for f in (ol.vectorize(calls.append), ol.models.fake(log=log)):
        assert f(empty).shape == shape
        assert f(empty).dtype == object
        assert f(empty, samples=5).shape == (*shape, 5)
        assert list(f.stream(empty)) == []
        assert asyncio.run(f.acall(empty)).shape == shape
    assert calls == []
    assert log == []


def test_two_arguments_may_broadcast_to_nothing():
    calls = []
    f = ol.vectorize(lambda a, b: calls.append((a, b)))
    assert f([["a"], ["b"]], []).shape == (2, 0)
    assert f("a", []).shape == (0,)
    assert f(["a"], []).shape == (0,)
    assert calls == []


@pytest.mark.parametrize("fn", [lambda x: x, joined], ids=["sync", "async"])
def test_the_identity_gives_back_lists_and_grids(fn):
    f = ol.vectorize(fn)
    assert f(["one", "two", "three"]).tolist() == ["one", "two", "three"]
    assert f([["one", "two"], ["three", "four"]]).tolist() == [["one", "two"], ["three", "four"]]


def test_a_tuple_of_results_is_a_tuple_of_arrays():
    out = ol.vectorize(lambda x: (x, x + "!"))(["a", "b", "c"])
    assert type(out) is tuple
    assert [part.tolist() for part in out] == [["a", "b", "c"], ["a!", "b!", "c!"]]
    assert ol.vectorize(lambda x: (x, x))("a") == ("a", "a")


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (([["one", "two"], ["three", "four"]], ["1", "2"]), {}),
        (([["one", "two"], ["three", "four"]],), {"b": ["1", "2"]}),
        ((), {"b": ["1", "2"], "a": [["one", "two"], ["three", "four"]]}),
    ],
)
@pytest.mark.parametrize("signature", [None, "(),()->()"])
def test_arguments_broadcast_by_position_and_by_name(args, kwargs, signature):
    f = ol.vectorize(lambda a, b: a + b, signature=signature)
    assert f(*args, **kwargs).tolist() == [["one1", "two2"], ["three1", "four2"]]


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (("test", ""), "test"),
        ((["a", "b"], ["c", "d"]), ["ac", "bd"]),
        ((["a", "b"], "c"), ["ac", "bc"]),
        ((["a"], ["b", "c"]), ["ab", "ac"]),
        (([["a"], ["b"]], ["c", "d"]), [["ac", "ad"], ["bc", "bd"]]),
    ],
)
def test_elemwise_broadcasts_like_numpy(args, wanted):
    @ol.elemwise
    def join(a, b="b"):
        return a + b

    out = join(*args)
    assert (out.tolist() if isinstance(out, np.ndarray) else out) == wanted
    assert join(["a", "c"]).tolist() == ["ab", "cb"]


def test_shapes_that_do_not_broadcast_are_told_apart_by_name():
    calls = []
    with pytest.raises(ShapeError, match=r"a has shape \(2,\), b has shape \(3,\)") as caught:
        ol.vectorize(lambda a, b: calls.append(a))(["x", "y"], ["1", "2", "3"])
    assert isinstance(caught.value, ValueError)
    assert calls == []


# What is one element


def test_lists_of_equal_length_are_an_array_and_ragged_ones_are_refused():
    """S01."""
    log = []
    model = ol.models.fake(log=log)
    assert model([["a", "b"], ["c", "d"]]).tolist() == [["A", "B"], ["C", "D"]]
    assert sum(map(len, log)) == 4
    log.clear()
    for ragged, place in [
        ([["a", "b"], ["c"]], "(1,)"),
        ([["a"], "b"], "(1,)"),
        ([[["a"], ["b"]], [["c"], ["d", "e"]]], "(1, 1)"),
    ]:
        with pytest.raises(ShapeError, match="ragged") as caught:
            model(ragged)
        assert place in str(caught.value)
    assert log == []
    assert model([[["a"], ["b"]], [["c"], ["d"]]]).shape == (2, 2, 1)


def test_a_mix_of_lists_and_arrays_is_one_array():
    out = ol.vectorize(lambda x: x)([np.array(["a", "b"]), ("c", "d"), range(2)])
    assert out.tolist() == [["a", "b"], ["c", "d"], [0, 1]]


@pytest.mark.parametrize(
    "prompts",
    [["ab\0", "a\0b", "\0"], objects((3,), "ab\0", "a\0b", "\0"), ["ab ", " a", "\n"]],
    ids=["list", "object", "blank"],
)
def test_nul_and_blank_characters_stay(prompts):
    """S03."""
    log = []
    model = ol.models.fake(lambda request: request.text + "\0", log=log)
    assert model(prompts).tolist() == [prompt + "\0" for prompt in prompts]
    sent = [request for batch in log for request in batch]
    assert sorted(request.prompt for request in sent) == sorted(prompts)
    assert len({request.key for request in sent}) == 3
    assert model(prompts).tolist() == [prompt + "\0" for prompt in prompts]  # from the store
    assert len(log) == 3


def test_a_long_text_among_short_ones_costs_its_length_only():
    """S07."""
    prompts = ["a"] * 10_000 + ["b" * 200_000]
    f = ol.vectorize.batched(lambda texts: list(texts), size=1000)
    tracemalloc.start()
    out = f(prompts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert out.tolist() == prompts
    assert peak < 50e6


@pytest.mark.parametrize(
    "values",
    [
        ["a", "a" * 500],
        [1, 2.5],
        [None, "x"],
        [{"k": 1}, [1, 2]],
        [["p", "q"], ["r", "s"]],
        [np.arange(2), np.arange(2)],
        ["s", 1],
    ],
    ids=str,
)
def test_results_are_the_very_objects(values):
    """S08."""
    out = ol.vectorize(lambda i: values[i])(range(2))
    assert out.dtype == object
    assert out.shape == (2,)
    assert all(cell is value for cell, value in zip(out, values, strict=True))


def test_one_text_in_is_one_text_out():
    """S10."""
    log = []
    model = ol.models.fake(drawn, log=log)
    for one in ("hi", "", np.array("hi", dtype=object), np.str_("hi"), np.array("hi")):
        out = model(one)
        assert type(out) is str
        assert out == f"{one}/0/0"
        three = model(one, samples=3)
        assert three.tolist() == [f"{one}/0/{k}" for k in range(3)]
    assert {type(request.prompt) for batch in log for request in batch} == {str}


def test_numpy_scalars_arrive_as_pythons_own():
    """S11."""
    kinds = []
    ol.vectorize(lambda *args: kinds.extend(map(type, args)))(
        np.array(["a"]),
        np.int64(1),
        np.array([2.5], np.float32),
        [np.bool_(True)],
        np.str_("x"),
        np.array(["2020-01-01"], "M8[D]"),
    )
    assert kinds == [str, int, float, bool, str, datetime.date]


def test_numpy_settings_are_the_same_request():
    """S11."""
    log = []
    model = ol.models.fake(log=log)
    seed = np.random.default_rng(0).integers(9)
    model(np.array(["ARPANET"]), max_tokens=np.int64(5), temperature=np.float32(0.5), seed=seed)
    model("ARPANET", max_tokens=5, temperature=0.5, seed=int(seed))
    ol.models.fake(log=log, max_tokens=np.int64(5), temperature=np.float32(0.5), seed=seed)("ARPANET")
    [[request]] = log
    assert request.prompt == "ARPANET"
    assert request.params == {"max_tokens": 5, "temperature": 0.5, "seed": int(seed)}
    assert {type(value) for value in request.params.values()} == {int, float}


@pytest.mark.parametrize("nothing", [None, float("nan"), np.float32("nan"), np.datetime64("NaT")], ids=str)
def test_what_is_missing_is_never_sent(nothing):
    """S12."""
    log, calls = [], []
    model = ol.models.fake(log=log)
    f = ol.vectorize(lambda x: calls.append(x) or x)
    assert model(["a", nothing, "", " "]).tolist() == ["A", None, "", " "]
    assert sorted(request.prompt for batch in log for request in batch) == ["", " ", "a"]
    assert f(["a", nothing]).tolist() == ["a", None]
    assert model(nothing) is None
    assert model([nothing], samples=2).tolist() == [[None, None]]
    assert calls == ["a"]


def test_other_arguments_may_be_none():
    log = []
    model = ol.models.fake(log=log)
    assert model(["a"], stop=None, temperature=None).tolist() == ["A"]
    assert log[0][0].params == {}
    assert ol.vectorize(lambda a, b: f"{a}{b}")(["x"], None).tolist() == ["xNone"]


def test_a_list_of_messages_is_one_conversation():
    """S18."""
    log = []
    model = ol.models.fake(drawn, log=log, chat=True)
    assert model(TALK) == "u/0/0"
    assert sum(map(len, log)) == 1
    assert model([TALK, TALK]).tolist() == ["u/0/0", "u/1/0"]
    assert model(objects((2,), TALK, tuple(TALK))).tolist() == ["u/0/0", "u/1/0"]
    assert model([[TALK], [TALK]]).shape == (2, 1)
    assert model([ol.Message("user", "u")]) == "u/0/0"
    assert model([TALK, "u"]).tolist() == ["u/0/0", "u/0/0"]
    assert {
        tuple(turn.wire()["content"] for turn in r.prompt) for batch in log for r in batch if not isinstance(r.prompt, str)
    } == {
        ("s", "u"),
        ("u",),
    }


def test_a_message_alone_is_refused_as_a_prompt():
    """S18."""
    log = []
    model = ol.models.fake(log=log)
    for prompt in (USER, objects((1,), USER), ol.Message("user", "u")):
        with pytest.raises(TypeError, match="put it in a list"):
            model(prompt)
    for prompt in (5, {"a": 1}, [["a"], [5]], b"bytes"):
        with pytest.raises(TypeError, match=r"a prompt is (int|dict|bytes)"):
            model(prompt)
    assert log == []


@dataclass
class Point:
    x: int


@pytest.mark.parametrize(
    "one", ["ab", b"ab", 3, {"a": [1]}, {1, 2}, Point(1), TALK, tuple(TALK), print, ol.models.fake()], ids=repr
)
def test_one_element_is_decidable(one):
    kept = []
    ol.vectorize(lambda x: kept.append(x))(one)
    assert kept[0] is one
    out = ol.vectorize(lambda x: [x])([one, one])
    assert out.shape == (2,)
    assert out[0][0] is one


def test_a_leaf_is_one_element_whatever_it_looks_like():
    assert ol.vectorize(len)(ol.Leaf(["a", "b"])) == 2
    assert ol.vectorize(len)([ol.Leaf(["a", "b"]), ol.Leaf("abc")]).tolist() == [2, 3]
    assert ol.vectorize(len)(ol.Leaf(np.arange(3))) == 3
    assert ol.vectorize(len, excluded=["obj"])(ol.Leaf([1, 2, 3])) == 3
    assert ol.vectorize(lambda x, table: table[x], excluded=["table"])([0, 1], ["a", "b"]).tolist() == ["a", "b"]
    assert ol.vectorize(lambda x, table: table[x], excluded=[1])([0, 1], table=["a", "b"]).tolist() == ["a", "b"]


def test_cells_of_object_arrays_are_never_opened():
    out = ol.vectorize(lambda x: x)(objects((2,), ["a", "b"], np.arange(2)))
    assert out.shape == (2,)
    assert out[0] == ["a", "b"]
    assert out[1].tolist() == [0, 1]


# S17 and S20: each row its own answer


class Asynchronous:
    def __init__(self, fn):
        self.fn = fn

    async def __call__(self, p):
        return await self.fn(p)


@pytest.mark.parametrize("form", ["def", "async def", "partial", "object", "lambda", "method"])
def test_answers_stand_in_the_order_of_the_prompts_whatever_ends_first(form):
    """S17."""
    gate, count = Drawn(random.randrange(2**32)), []

    async def echo(p):
        count.append(p)
        await gate.turn()
        return p

    forms = {
        "def": lambda p: count.append(p) or p,
        "async def": echo,
        "partial": functools.partial(echo),
        "object": Asynchronous(echo),
        "lambda": lambda p: echo(p),
        "method": Asynchronous(echo).__call__,
    }
    prompts = [str(k) for k in range(10)]
    assert ol.vectorize(forms[form])(prompts).tolist() == prompts
    assert sorted(count) == prompts


def test_every_prompt_is_a_request_with_an_answer_of_its_own():
    """S20."""
    log = []
    assert ol.models.fake(drawn, log=log)(["a", "b", "c"]).tolist() == ["a/0/0", "b/0/0", "c/0/0"]
    assert [len(batch) for batch in log] == [1, 1, 1]


def test_a_column_can_be_mapped_over_parameters_too():
    """H30: a grid of prompts and settings."""
    model = ol.models.fake(lambda request: f"{request.text} {request.params['max_tokens']} {request.sample}")
    out = model([["p"], ["q"]], max_tokens=[4, 5, 6], samples=2)
    assert out.shape == (2, 3, 2)
    assert out[1, 2].tolist() == ["q 6 0", "q 6 1"]
