"""What a newcomer tripped over once: each mistake now says what to do, each natural use works."""

import numpy as np
import pandas as pd
import polars as pl
import pytest

import outlines_like as ol


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ({"role": "user", "contents": "Hi"}, "'content'"),
        ({"role": "user"}, "no content"),
        ({"role": "user", "content": 5}, "content is int"),
        ({"role": "user", "text": "Hi"}, "'text'"),
    ],
)
def test_a_message_that_says_nothing_is_refused_before_anything_is_sent(message, word):
    log = []
    with pytest.raises(TypeError, match=word):
        ol.models.fake(log=log)([message])
    assert log == []


def test_a_message_that_calls_a_tool_needs_no_content():
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "3"},
    ]
    assert ol.models.fake()(talk) == "3"


def test_excluded_takes_one_name_and_knows_the_function():
    join = ol.vectorize(lambda text, opts: f"{text}{opts}", excluded="opts")
    assert join(["ab", "c"], opts=[1, 2]).tolist() == ["ab[1, 2]", "c[1, 2]"]
    for wrong in (["optz"], [5], "tex"):
        with pytest.raises(ValueError, match="is no argument of the function"):
            ol.vectorize(lambda text, opts: text, excluded=wrong)


@pytest.mark.parametrize("make", [pd.Series, pl.Series])
def test_columns_get_the_type_that_holds_their_values(make):
    texts = make(["1", "2"])
    assert ol.vectorize(float)(texts).mean() == 1.5
    kept = ol.vectorize(lambda text: text == "1")(texts)
    assert list(texts.filter(kept) if make is pl.Series else texts[~kept]) == (["1"] if make is pl.Series else ["2"])
    assert ol.vectorize(int)(texts).sum() == 3
    mixed = ol.vectorize(lambda text: 1 if text == "1" else 2.5)(texts)
    assert [(type(value), value) for value in mixed] == [(int, 1), (float, 2.5)]
    big = ol.vectorize(lambda text: 10**30)(texts)
    assert list(big) == [10**30] * 2


async def backwards(requests):
    """A backend that knows no stop strings."""
    for row, request in enumerate(requests):
        text = request.text[::-1]
        yield [ol.Event(row, ol.Completion(text[:k]), False) for k in range(1, len(text))]
        yield [ol.Event(row, ol.Completion(text, "stop"))]


def test_stop_strings_hold_for_ones_own_backend():
    reverse = ol.models.Model("reverse", backwards, endpoint="reverse")
    assert reverse("abcde", stop="cb") == "ed"
    shown = [text for _, text, _ in reverse.stream("abcde", stop="cb")]
    assert shown[-1] == "ed"
    assert all("ed".startswith(text) for text in shown)


def test_an_empty_base_url_is_no_address(monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:1/v1")
    with pytest.raises(ValueError, match="base_url"):
        ol.models.openai("m", base_url="")
    for name in ("", None):
        with pytest.raises(ValueError, match="name"):
            ol.models.openai(name)
    assert "127.0.0.1:1/v1/chat/completions" in repr(ol.models.openai("m", base_url="http://127.0.0.1:1/v1/chat/completions"))
    for bad in ({"timeout": -1}, {"concurrency": 0}, {"retries": -1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ol.models.openai("m", **bad)
    with pytest.raises(TypeError, match="api_key"):
        ol.models.openai("m", api_key=5)


def test_settings_of_the_store_can_be_taken_back():
    model = ol.models.fake()
    try:
        ol.cache.disabled()
        model("a")
        ol.cache.enabled()
        assert model.plan("a").cached == 0
        model("a")
        assert model.plan("a").cached == 1
    finally:
        ol.cache.enabled()


def test_a_batch_function_may_return_an_array():
    lengths = ol.vectorize.batched(lambda words: np.array([len(word) for word in words]))(["a", "bb"])
    assert [(type(n), n) for n in lengths] == [(int, 1), (int, 2)]
    vectors = ol.vectorize.batched(lambda words: np.eye(2))(["a", "b"])
    assert [vector.tolist() for vector in vectors] == [[1, 0], [0, 1]]
    with pytest.raises(ol.RowErrors, match="3 values for 2 rows"):
        ol.vectorize.batched(lambda words: np.zeros(3))(["a", "b"])


def test_through_takes_functions_and_refuses_what_is_no_layer():
    assert ol.through(len, ol.cached({}))(["a", "bb"]).tolist() == [1, 2]
    with pytest.raises(TypeError, match="call it"):
        ol.through(ol.models.fake(), ol.cached)("a")
    with pytest.raises(TypeError, match="the function or model first"):
        ol.through(ol.deduped(), ol.models.fake())


@pytest.mark.parametrize("on", [OSError, (OSError, KeyError), lambda error: isinstance(error, OSError)])
def test_retried_takes_types_of_errors(on):
    tries = []

    def flaky(text):
        tries.append(text)
        if len(tries) < 3:
            raise OSError("not yet")
        return text

    assert ol.through(ol.vectorize(flaky), ol.retried(3, on=on, wait=lambda *_: 0))("a") == "a"
    assert tries == ["a"] * 3


def test_what_is_no_backend_is_told_apart_when_the_model_is_made():
    for wrong in (lambda requests: [], None):
        with pytest.raises(TypeError, match="async generator"):
            ol.models.Model("m", wrong, endpoint="m")

    async def texts(requests):
        yield [ol.Event(0, "text")]

    with pytest.raises(TypeError, match="Completions or Failures, not str"):
        ol.models.Model("m", texts, endpoint="m")("a")


def test_progress_may_be_a_line_on_stderr(capsys):
    ol.vectorize(str.upper, progress=True)(["a", "b"])
    assert capsys.readouterr().err.endswith("2 of 2 rows\n")
    with pytest.raises(TypeError, match="progress=3"):
        ol.vectorize(str.upper, progress=3)


@pytest.mark.parametrize(
    ("keyword", "word"), [({"n": 3}, "samples="), ({"on_error": "return"}, "vectorize"), ({"temprature": 1}, "'temperature'")]
)
def test_keywords_in_the_wrong_place_are_shown_the_right_one(keyword, word):
    with pytest.raises(TypeError, match=word):
        ol.models.fake()("a", **keyword)


def test_vectorize_with_options_decorates():
    @ol.vectorize(on_error="missing")
    def number(text):
        return int(text)

    assert number(["1", "x"]).tolist() == [1, None]


@pytest.mark.parametrize("prompts", [(text for text in "ab"), {"a"}, map(str, "ab"), {"a": 1}.keys()])
def test_what_could_be_a_list_should_be_one(prompts):
    with pytest.raises(TypeError, match="make it a list"):
        ol.models.fake()(prompts)


def test_a_data_frame_is_no_column():
    with pytest.raises(TypeError, match="pick a column") as caught:
        ol.models.fake()(pd.DataFrame({"a": ["x"] * 100}))
    assert len(str(caught.value)) < 200


def test_a_name_close_to_the_boxed_model_is_not_looked_for_elsewhere():
    with pytest.raises(ol.errors.NotFoundError, match="smollm2-135m"):
        ol.models.transformers("smollm2-136m")
    with pytest.raises(ValueError, match="device='gpu'"):
        ol.models.transformers("smollm2-135m", device="gpu")


def test_names_to_complete_are_the_public_ones():
    assert dir(ol) == ol.__all__
    assert dir(ol.cache) == ["at", "clear", "disabled", "enabled", "refresh"]
