"""Signatures in NumPy's gufunc notation: reading them, binding by them."""

import inspect
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outlines_like as ol
from outlines_like.errors import ShapeError, SignatureError
from outlines_like.signatures import Signature, Slot, bind, parse


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("->()", [], [(None, ())]),
        ("()->()", [(None, ())], [(None, ())]),
        ("(),(m)->(s)", [(None, ()), (None, ("m",))], [(None, ("s",))]),
        (" ( m , n ) , ( n ) -> ( m ) ", [(None, ("m", "n")), (None, ("n",))], [(None, ("m",))]),
        ("prompt:(), stop:(m) -> (s)", [("prompt", ()), ("stop", ("m",))], [(None, ("s",))]),
        ("(m?),(3)->(),(3)", [(None, ("m?",)), (None, ("3",))], [(None, ()), (None, ("3",))]),
    ],
)
def test_a_signature_says_which_axes_are_taken_whole(text, inputs, outputs):
    wanted = Signature(tuple(Slot(*slot) for slot in inputs), tuple(Slot(*slot) for slot in outputs))
    assert parse(text) == wanted


@pytest.mark.parametrize(
    "text", ["(m,)->()", "()", "()->()->()", "(m)(n)->()", "(),->()", "m->()", "((m))->()", "(m n)->()", "()->(", "(a-b)->()"]
)
def test_a_signature_that_says_nothing_is_refused(text):
    with pytest.raises(SignatureError) as caught:
        ol.vectorize(lambda x: x, signature=text)
    assert isinstance(caught.value, ValueError)
    assert text in str(caught.value)


names = st.from_regex(r"[a-z][a-z0-9_]{0,3}", fullmatch=True)
sides = st.lists(st.lists(names, max_size=3), min_size=1, max_size=3)


@given(sides, sides, st.sampled_from(["", " ", "  "]))
def test_every_signature_that_is_written_is_read_back(inputs, outputs, space):
    def side(slots):
        return f"{space},{space}".join(f"({space}{f'{space},{space}'.join(dims)}{space})" for dims in slots)

    read = parse(f"{side(inputs)}{space}->{space}{side(outputs)}")
    assert [list(slot.dims) for slot in read.inputs] == inputs
    assert [list(slot.dims) for slot in read.outputs] == outputs


def test_arguments_are_bound_like_python_binds_them():
    def fn(a, b=1, *rest, c, d=4, **more): ...

    form = inspect.signature(fn)
    bound = bind(form, (1, 2, 3), {"c": 5, "e": 6})
    assert [(argument.name, argument.value, argument.keyword) for argument in bound] == [
        ("a", 1, None),
        ("b", 2, None),
        ("rest", 3, None),
        ("c", 5, "c"),
        ("e", 6, "e"),
    ]
    with pytest.raises(TypeError, match="did you mean 'temperature'"):
        bind(inspect.signature(lambda *, temperature=1: 0), (), {"temprature": 1})


def test_two_arguments_for_a_signature_of_one_are_too_many():
    f = ol.vectorize(lambda x, y: x, signature="()->()")
    with pytest.raises(TypeError, match="wrong number of positional"):
        f(["one"], ["two"])


@pytest.mark.parametrize(
    ("fn", "signature", "wrong"),
    [
        (lambda x: x, "(),()->()", "has 2 inputs, but the function's arguments are x"),
        (lambda x, *, y=1: x, "(),(),(m)->()", "has 3 inputs, but the function's arguments are x, y"),
        (lambda x, y: x, "x:(), z:(m)->()", "names 'z', but the function's arguments are x, y"),
        (ol.models.fake(), "prompt:(), stpo:(m)->()", "names 'stpo', but the function's arguments are prompt, max_tokens"),
    ],
)
def test_a_signature_of_more_than_the_function_takes_is_refused_at_once(fn, signature, wrong):
    with pytest.raises(ol.errors.SignatureError, match=wrong):
        ol.vectorize(fn, signature=signature)


def test_a_signature_may_list_what_goes_into_stars():
    assert ol.vectorize(lambda *x: len(x), signature="(),(),()->()")(1, 2, 3) == 3
    assert ol.vectorize(lambda x, **more: len(more["y"]), signature="x:(), y:(m)->()")(1, y=["a", "b"]) == 2


def test_a_signature_is_text():
    with pytest.raises(TypeError, match="signature=3; it takes a text"):
        ol.vectorize(len, signature=3)


@pytest.mark.parametrize("option", [{"on_error": "return"}, {"concurrency": 3}, {"via": "batch"}, {"signature": "()->()"}])
def test_an_option_that_is_given_to_the_call_belongs_to_vectorize(option):
    [(name, value)] = option.items()
    for f in (ol.models.fake(), ol.vectorize(lambda x: x)):
        with pytest.raises(TypeError, match=re.escape(f"vectorize(..., {name}={value!r})(...)")):
            f("x", **option)


def test_two_results_where_the_signature_says_one_are_too_many():
    f = ol.vectorize(lambda x: (x, x), signature="()->()")
    with pytest.raises(ValueError, match="wrong number of outputs"):
        f(["one", "two"])


def test_one_result_where_the_signature_says_two_is_too_few():
    f = ol.vectorize(lambda x: x, signature="()->(),()")
    with pytest.raises(ValueError, match="wrong number of outputs"):
        f(["one", "two"])


GRID = [["one", "two", "three"], ["four", "five", "six"]]


def test_a_core_dimension_is_taken_whole():
    assert ol.vectorize(lambda x: x[0], signature="(m)->()")(GRID).tolist() == ["one", "four"]
    assert ol.vectorize(lambda x: x[0], signature="()->()")(GRID).tolist() == [["o", "t", "t"], ["f", "f", "s"]]


def test_a_core_argument_arrives_as_an_object_array():
    seen = ol.vectorize(lambda x: x, signature="(m)->(m)")
    kept = []
    ol.vectorize(lambda x: kept.append(x), signature="(m)->()")(["a", "b"])
    assert isinstance(kept[0], np.ndarray)
    assert kept[0].dtype == object
    assert kept[0].tolist() == ["a", "b"]
    assert seen(["a", "b"]).tolist() == ["a", "b"]


def test_an_output_dimension_comes_after_the_loop():
    copies = ol.vectorize(lambda x: [x, x, x], signature="()->(s)")
    assert copies(["one", "two"]).tolist() == [["one"] * 3, ["two"] * 3]
    assert copies("one").tolist() == ["one"] * 3


def test_core_dimensions_and_new_ones_mix():
    f = ol.vectorize(lambda x: [[f"{cell}{k}" for k in range(3)] for cell in x], signature="(m)->(m,s)")
    out = f([["a", "b"], ["c", "d"]])
    assert out.shape == (2, 2, 3)
    assert out[0, 1].tolist() == ["b0", "b1", "b2"]
    assert out[1, 0].tolist() == ["c0", "c1", "c2"]


def test_samples_come_after_the_core():
    numbers = iter(range(100))
    f = ol.vectorize(lambda x: [f"{x}{k}" for k in "pq"] + [str(next(numbers))], signature="()->(s)", concurrency=1)
    out = f(["a", "b"], samples=2)
    assert out.shape == (2, 3, 2)
    assert out[:, :2, :].tolist() == [[["ap", "ap"], ["aq", "aq"]], [["bp", "bp"], ["bq", "bq"]]]
    assert out[:, 2, :].tolist() == [["0", "1"], ["2", "3"]]


def test_outputs_may_have_dimensions_of_their_own():
    f = ol.vectorize(lambda x: (x[0], list(x)), signature="(m)->(),(m)")
    first, whole = f([["a", "b"], ["c", "d"]])
    assert first.tolist() == ["a", "c"]
    assert whole.tolist() == [["a", "b"], ["c", "d"]]


def test_names_bind_whatever_the_order():
    f = ol.vectorize(lambda prompt, stop: f"{prompt}:{'/'.join(stop)}", signature="prompt:(), stop:(m) -> ()")
    wanted = ["a:x/y", "b:x/y"]
    assert f(["a", "b"], ["x", "y"]).tolist() == wanted
    assert f(["a", "b"], stop=["x", "y"]).tolist() == wanted
    assert f(stop=["x", "y"], prompt=["a", "b"]).tolist() == wanted
    assert ol.vectorize(f.fn, signature="stop:(m) -> ()")(["a", "b"], ["x", "y"]).tolist() == wanted


def test_a_keyword_may_carry_a_core_dimension():
    f = ol.vectorize(lambda a, b=(): f"{a}{'+'.join(b)}", signature="(),(m)->()")
    assert f(["x", "y"], b=[["1", "2"], ["3", "4"]]).tolist() == ["x1+2", "y3+4"]
    assert f(b=["1", "2"], a="x") == "x1+2"


def test_a_default_left_out_does_not_shift_the_others():
    f = ol.vectorize(lambda a, b="B", c=None: f"{a}{b}{'+'.join(c)}", signature="(),(),(m)->()")
    assert f(["x"], c=["1", "2"]).tolist() == ["xB1+2"]


def test_an_optional_dimension_takes_a_scalar_as_it_is():
    f = ol.vectorize(lambda a, b: f"{a}{b if isinstance(b, str) else '+'.join(b)}", signature="(),(m?)->()")
    assert f(["x", "y"], "1").tolist() == ["x1", "y1"]
    assert f(["x", "y"], ["1", "2"]).tolist() == ["x1+2", "y1+2"]


@pytest.mark.parametrize(
    ("signature", "args"),
    [
        ("(m)->()", ("scalar",)),
        ("(m),(m)->()", (["a", "b"], ["a", "b", "c"])),
        ("(2)->()", (["a", "b", "c"],)),
        ("(m,n)->()", (["a"],)),
    ],
)
def test_arguments_that_do_not_fit_the_core_are_refused_before_anything_runs(signature, args):
    calls = []
    with pytest.raises(ShapeError, match=r"core dimension|takes \d dimensions"):
        ol.vectorize(lambda *args: calls.append(args), signature=signature)(*args)
    assert calls == []


@pytest.mark.parametrize(
    ("signature", "result"),
    [
        ("()->(s)", lambda x: "text"),
        ("(m)->(m)", lambda x: ["one"]),
        ("()->(s)", lambda x: ["a"] * len(x)),
        ("()->(2)", lambda x: [1, 2, 3]),
    ],
)
def test_results_that_do_not_fit_the_core_are_errors(signature, result):
    argument = [["a", "b"]] if signature.startswith("(m)") else ["a", "bb"]
    with pytest.raises(SignatureError, match="the function returned"):
        ol.vectorize(result, signature=signature)(argument)


def test_an_error_fills_the_core_of_its_cell():
    def f(x):
        if x == "b":
            raise LookupError(x)
        return [x, x]

    out = ol.vectorize(f, signature="()->(s)", on_error="return")(["a", "b"])
    assert out[0].tolist() == ["a", "a"]
    assert [type(cell) for cell in out[1]] == [LookupError, LookupError]
    assert ol.vectorize(f, signature="()->(s)", on_error="missing")(["a", "b"]).tolist() == [["a", "a"], [None, None]]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"fail_fast": "no"}, "fail_fast='no'; it is True or False"),
        ({"partial": 1}, "partial=1; it is True or False"),
        ({"excluded": 1.5}, "excluded=1.5 is no argument of the function, which takes obj"),
        ({"on_eror": "raise"}, "vectorize has no option 'on_eror'; it takes signature, excluded, concurrency, via"),
    ],
)
def test_an_option_that_means_nothing_is_refused(option, said):
    with pytest.raises((TypeError, ValueError), match=said):
        ol.vectorize(len, **option)
