"""Columns of data frames in, columns out, under the same labels."""

import numpy as np
import pandas as pd
import polars as pl
import pytest

import outlines_like as ol
from outlines_like import RowErrors
from outlines_like.errors import ShapeError


@pytest.fixture
def log():
    return []


@pytest.fixture
def model(log):
    return ol.models.fake(log=log)


def sent(log):
    return sorted(request.prompt for batch in log for request in batch)


def gone(cell):
    return cell is None or cell is pd.NA or cell != cell


# pandas


FRAMES = {
    "filtered": lambda: pd.DataFrame({"x": list("abc")}).query("x != 'b'").copy(),
    "repeated": lambda: pd.DataFrame({"x": list("abc")}, index=[5, 5, 7]),
    "sorted": lambda: pd.DataFrame({"x": list("abc")}, index=[2, 0, 1]).sort_values("x", ascending=False),
    "shuffled and repeated": lambda: pd.DataFrame({"x": list("abc")}, index=[7, 5, 7]),
    "labelled": lambda: pd.DataFrame({"x": list("abc")}, index=pd.MultiIndex.from_tuples([("p", 1), ("p", 2), ("q", 1)])),
}


@pytest.mark.parametrize("frame", FRAMES)
def test_results_stand_in_the_rows_of_their_prompts(frame, model):
    """S14."""
    frame = FRAMES[frame]()
    out = model(frame.x)
    assert isinstance(out, pd.Series)
    assert out.index.equals(frame.index)
    assert out.name == "x"
    frame["y"] = out
    assert [row.y for row in frame.itertuples()] == [row.x.upper() for row in frame.itertuples()]


@pytest.mark.parametrize(
    "column",
    [
        pd.Series(["a", None, float("nan"), "b"]),
        pd.Series(["a", pd.NA, pd.NaT, "b"], dtype=object),
        pd.Series(["a", None, pd.NA, "b"], dtype="string"),
    ],
    ids=["default", "object", "string"],
)
def test_missing_cells_are_not_sent_and_stay_missing(column, model, log):
    """S12."""
    out = model(column)
    assert [bool(gone(cell)) for cell in out] == [False, True, True, False]
    assert [out.iloc[0], out.iloc[3]] == ["A", "B"]
    assert sent(log) == ["a", "b"]
    assert out.isna().tolist() == [False, True, True, False]


def test_an_empty_column_gives_an_empty_column(model, log):
    """S09."""
    for column in (pd.Series([], dtype=object, name="n"), pd.DataFrame({"n": []}).n, pd.Series(["a"], name="n")[:0]):
        out = model(column)
        assert isinstance(out, pd.Series)
        assert (len(out), out.name) == (0, "n")
        assert model(column, samples=5).shape == (0, 5)
    assert log == []


def test_a_column_with_samples_is_an_array_of_rows_and_samples(model):
    out = model(pd.Series(["a", None], index=[4, 4]), samples=3)
    assert isinstance(out, np.ndarray)
    assert out.dtype == object
    assert out.tolist() == [["A"] * 3, [None] * 3]


def test_columns_match_by_position_only_under_equal_labels(model, log):
    f = ol.vectorize(lambda a, b: a + b)
    left = pd.Series(["a", "b"], index=[1, 2])
    assert f(left, pd.Series(["x", "y"], index=[1, 2])).tolist() == ["ax", "by"]
    for other in ([2, 1], [1, 3]):
        with pytest.raises(ShapeError, match="different indexes"):
            f(left, pd.Series(["x", "y"], index=other))
        with pytest.raises(ShapeError, match="different indexes"):
            model(left, max_tokens=pd.Series([1, 2], index=other))
    assert f(left, ["x", "y"]).index.tolist() == [1, 2]
    assert f(["x", "y"], left).index.tolist() == [1, 2]
    assert f(left, "!").tolist() == ["a!", "b!"]
    assert log == []


def test_a_column_that_does_not_give_the_rows_gives_no_labels():
    join = ol.vectorize(lambda a, b: f"{a}{len(b) if isinstance(b, (pd.Series, np.ndarray)) else b}")
    assert list(join(pd.Series(["a"], index=[9]), ["x", "y"])) == ["ax", "ay"]
    assert list(ol.vectorize(join.fn, excluded=["b"])(["a", "b", "c"], pd.Series([1, 2]))) == ["a2", "b2", "c2"]
    assert list(ol.vectorize(join.fn, signature="(),(m)->()")(["a", "b", "c"], pd.Series([1, 2]))) == ["a2", "b2", "c2"]
    assert join(pd.Series(["a", "b"]), [["x"], ["y"], ["z"]]).tolist() == [["ax", "bx"], ["ay", "by"], ["az", "bz"]]


def test_values_of_any_kind_come_back_as_they_are():
    column = pd.Series(["a", "b"], index=[3, 1])
    values = {"a": {"k": 1}, "b": [1, 2]}
    out = ol.vectorize(values.get)(column)
    assert out.index.tolist() == [3, 1]
    assert all(out.iloc[k] is values[name] for k, name in enumerate("ab"))
    kinds = []
    ol.vectorize(lambda x: kinds.append(type(x)))(pd.Series([1, 2]))
    assert kinds == [int, int]
    assert ol.vectorize(lambda x: x)(pd.Series([1, None], dtype="Int64")).tolist()[0] == 1
    first, second = ol.vectorize(lambda x: (x, len(x)))(column)
    assert (first.tolist(), second.tolist()) == (["a", "b"], [1, 1])
    assert second.index.tolist() == [3, 1]


def test_cells_that_are_lists_are_not_opened():
    assert ol.vectorize(len)(pd.Series([["a", "b"], ["c"]])).tolist() == [2, 1]


def test_failures_stand_in_their_rows():
    def f(x):
        if x == "b":
            raise LookupError(x)
        return x

    column = pd.Series(["a", "b"], index=[8, 8])
    with pytest.raises(RowErrors) as caught:
        ol.vectorize(f)(column)
    assert list(caught.value.errors) == [(1,)]
    assert caught.value.partial.iloc[0] == "a"
    out = ol.vectorize(f, on_error="return")(column)
    assert out.index.tolist() == [8, 8]
    assert isinstance(out.iloc[1], LookupError)
    assert gone(ol.vectorize(f, on_error="missing")(column).iloc[1])


async def test_a_column_can_be_awaited_and_streamed(model):
    column = pd.Series(["a", "b"], index=[3, 1])
    assert (await model.acall(column)).index.tolist() == [3, 1]
    assert sorted(index for index, _, _ in model.stream(column)) == [(0,), (1,)]


# polars


def test_a_polars_column_gives_a_polars_column(model, log):
    out = model(pl.Series("n", ["a", None, "b"]))
    assert isinstance(out, pl.Series)
    assert (out.name, out.to_list(), out.dtype) == ("n", ["A", None, "B"], pl.String)
    assert sent(log) == ["a", "b"]
    frame = pl.DataFrame({"x": ["c", "d"]}).with_columns(y=model(pl.Series(["c", "d"])))
    assert frame.rows() == [("c", "C"), ("d", "D")]


def test_an_empty_polars_column_gives_an_empty_polars_column(model, log):
    out = model(pl.Series("n", [], dtype=pl.String))
    assert isinstance(out, pl.Series)
    assert (out.name, len(out)) == ("n", 0)
    assert model(pl.Series("n", [], dtype=pl.String), samples=2).shape == (0, 2)
    assert log == []


def test_polars_values_of_any_kind_come_back_as_they_are():
    assert ol.vectorize(lambda x: x + 1)(pl.Series([1, None, 3])).to_list() == [2, None, 4]
    assert ol.vectorize(lambda x: {"k": x})(pl.Series(["a"])).to_list() == [{"k": "a"}]


def test_polars_columns_have_no_labels_to_differ():
    assert ol.vectorize(lambda a, b: a + b)(pl.Series(["a", "b"]), pl.Series(["x", "y"])).to_list() == ["ax", "by"]
    assert ol.vectorize(lambda a, b: a + b)(pl.Series(["a", "b"]), pd.Series(["x", "y"], index=[5, 6])).to_list() == [
        "ax",
        "by",
    ]
    assert list(ol.vectorize(lambda a, b: a + b)(pl.Series(["a"]), ["x", "y"])) == ["ax", "ay"]
