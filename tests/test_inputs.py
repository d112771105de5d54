"""Bad input is told at once, by name, before anything is sent; and nothing else is lost."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outlines_like as ol
from outlines_like.errors import PromptError
from outlines_like.requests import Message, Request, digest


@pytest.fixture
def log():
    return []


@pytest.fixture
def model(log):
    return ol.models.fake(log=log)


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize(
    "bad", ["bad \ud83d end", "\udfff", [{"role": "user", "content": "x \ud83d"}]], ids=["middle", "alone", "message"]
)
def test_a_lone_surrogate_fails_its_row_alone(model, log, bad, stored):
    """S04."""
    with nullcontext() if stored else ol.cache.disabled(), pytest.raises(ol.RowErrors) as caught:
        model(["fine", bad, "fine too"])
    assert list(caught.value.errors) == [(1,)]
    error = caught.value.errors[1,]
    assert isinstance(error, PromptError)
    assert isinstance(error, ValueError)
    assert "position" in str(error)
    assert caught.value.partial[[0, 2]].tolist() == ["FINE", "FINE TOO"]
    assert sorted(request.text for batch in log for request in batch) == ["fine", "fine too"]
    with pytest.raises(PromptError):
        model(bad)


@pytest.mark.parametrize(
    "content",
    [[{"type": "text", "text": "\ud83d"}], [{"type": "text", "text": "ok"}, {"type": "x", "deep": {"er": ["\ud83d"]}}]],
    ids=["text", "deep"],
)
def test_a_lone_surrogate_inside_a_part_fails_its_row_alone(model, content):
    out = ol.vectorize(model, on_error="return")([[{"role": "user", "content": content}], "fine"])
    assert isinstance(out[0], PromptError)
    assert out[1] == "FINE"


def test_a_speaker_that_no_model_knows_fails_his_row_alone(model, log):
    said = [{"role": "system", "content": "be brief"}, {"role": "usr", "content": "hi"}]
    error, fine = ol.vectorize(model, on_error="return")([said, "fine"])
    assert isinstance(error, PromptError)
    assert "message 1 has the role 'usr', which is none of system, developer, user, assistant" in str(error)
    assert str(error).endswith("did you mean 'user'?")
    assert fine == "FINE"
    with pytest.raises(PromptError, match="message 0 has the role 'None'"):
        model([{"role": None, "content": "hi"}])
    assert [request.text for batch in log for request in batch] == ["fine"]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_every_speaker_that_a_model_may_know_is_heard(model, role):
    assert model([{"role": role, "content": "hi"}]) == "HI"


def test_valid_text_outside_ascii_is_sent_as_it_is(model, log):
    texts = ["é", "e\u0301", "开心", "👍🏽", "\ufffd", "\u2028", "a\r\nb"]
    assert model(texts).tolist() == [text.upper() for text in texts]
    assert sorted(request.prompt for batch in log for request in batch) == sorted(texts)
    assert len({request.key for batch in log for request in batch}) == len(texts)


def test_numpy_strings_inside_a_message_are_strings(model, log):
    assert model([{"role": np.str_("user"), "content": np.str_("hi")}]) == "HI"
    assert model([{"role": "user", "content": "hi"}]) == "HI"
    assert sum(map(len, log)) == 1


@pytest.mark.parametrize(
    ("name", "near"),
    [("temprature", "temperature"), ("max_token", "max_tokens"), ("stops", "stop"), ("sample", "samples"), ("topp", "top_p")],
)
def test_a_misspelt_parameter_names_the_nearest(model, log, name, near):
    for call in (
        lambda: model("hi", **{name: 1}),
        lambda: model.stream("hi", **{name: 1}).__iter__().__next__(),
        lambda: model.plan("hi", **{name: 1}),
    ):
        with pytest.raises(TypeError, match=f"did you mean '{near}'"):
            call()
    if name != "sample":
        with pytest.raises(TypeError, match=f"did you mean '{near}'"):
            ol.models.fake(**{name: 1})
    assert log == []


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (ol.models.fake, {"dealy": 1}, "did you mean 'delay'"),
        (ol.models.transformers, {"devise": "cpu"}, "did you mean 'device'"),
        (ol.models.openai, {"base_ulr": "x"}, "did you mean 'base_url'"),
        (ol.models.openai, {"zzz": 1}, "it takes max_tokens, .*, extra_body, model, base_url, api_key"),
        (ol.models.openai, {"choices": ["a"]}, r"on vLLM extra_body={'structured_outputs': {'choice': \['a'\]}}"),
    ],
    ids=str,
)
def test_what_a_model_is_not_made_with_is_named(tmp_path, make, given, said):
    place = {"base_url": "http://localhost:1"} if make is ol.models.openai else {}
    (tmp_path / "config.json").touch()
    (tmp_path / "tokenizer.json").touch()
    with pytest.raises(TypeError, match=said):
        make(*([] if make is ol.models.fake else [str(tmp_path)]), **place, **given)


@pytest.mark.parametrize("name", ["timeout", "idle_timeout"])
@pytest.mark.parametrize("value", [0, -1, float("inf"), None], ids=str)
def test_a_server_is_waited_for_some_time(name, value):
    with pytest.raises(ValueError, match=f"{name}={value}; it takes a finite number of seconds above 0"):
        ol.models.openai("x", base_url="http://localhost:1", **{name: value})


@pytest.mark.parametrize("form", [{"choices": ["a", "b"]}, {"regex": "a|b"}], ids=str)
def test_a_form_that_servers_take_each_in_its_own_way_is_explained(form):
    model = ol.models.openai("x", base_url="http://localhost:1")
    with pytest.raises(TypeError, match=r"json_schema=, or on vLLM extra_body=.*; in a program, (select|regex)\(\.\.\.\)"):
        model("x", **form)


@pytest.mark.parametrize(
    "setting",
    [
        {"stop": ""},
        {"stop": ["a", ""]},
        {"stop": [1]},
        {"stop": 5},
        {"stop": b"x"},
        {"stop": "\ud83d"},
        {"max_tokens": 0},
        {"max_tokens": -1},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"max_tokens": "5"},
        {"temperature": -0.1},
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": True},
        {"top_p": 1.1},
        {"top_k": 0},
        {"seed": "x"},
        {"seed": 0.5},
    ],
    ids=str,
)
def test_a_setting_that_means_nothing_is_refused_by_name(model, log, setting):
    [name] = setting
    with pytest.raises((ValueError, TypeError), match=name):
        model(["a", "b"], **setting)
    with pytest.raises((ValueError, TypeError), match=name):
        ol.models.fake(**setting)
    assert log == []


def test_one_bad_setting_in_a_column_is_refused_before_anything_is_sent(model, log):
    with pytest.raises(ValueError, match="max_tokens"):
        model(["a", "b"], max_tokens=[5, 0])
    assert log == []


def test_a_prompt_is_needed(model):
    with pytest.raises(TypeError, match="prompt"):
        model()
    with pytest.raises(TypeError, match="positional"):
        model("a", "b")


@pytest.mark.parametrize("turn", [{"content": "no role"}, "text", 5], ids=str)
def test_a_conversation_with_something_else_in_it_is_refused(model, log, turn):
    with pytest.raises((TypeError, ValueError)):
        model([ol.Leaf([{"role": "user", "content": "u"}, turn])])
    with pytest.raises((TypeError, ValueError)):
        model([{"role": "user", "content": "u"}, turn])
    assert log == []


def test_big_seeds_are_numbers_too(model, log):
    assert model("hi", seed=2**40) == "HI"
    assert log[0][0].params == {"seed": 2**40}


# Keys

valid = st.characters(exclude_categories=["Cs"])
plain_json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(valid),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(valid, max_size=3), inner, max_size=3),
    max_leaves=8,
)


def shuffled(value):
    """The same value with the keys of its dicts in another order."""
    if isinstance(value, dict):
        return {name: shuffled(value[name]) for name in reversed(value)}
    return [shuffled(cell) for cell in value] if isinstance(value, list) else value


@given(plain_json)
def test_a_digest_does_not_depend_on_the_order_of_keys(value):
    assert digest(value) == digest(shuffled(value))


words = st.text(valid, max_size=5)
asks = st.builds(
    Request,
    words,
    words,
    words | st.lists(st.builds(Message, words, words), max_size=3).map(tuple),
    st.dictionaries(words, st.integers() | words, max_size=2),
    st.integers(0, 3),
    st.integers(0, 3),
)


@given(asks, asks)
def test_requests_have_one_key_exactly_if_they_are_the_same_call(one, other):
    def facts(request):
        return (request.endpoint, request.model, request.prompt, request.params, request.occurrence, request.sample)

    assert (one.key == other.key) == (facts(one) == facts(other))
    assert one.draw(one.occurrence, one.sample) == one
    assert one.draw(7, 1).key == Request(one.endpoint, one.model, one.prompt, one.params, 7, 1).key
    assert one.draw(7, 1).family == one.draw(7, 2).family != one.draw(6, 1).family


def test_a_text_and_the_conversation_of_it_are_not_the_same_call():
    assert Request("e", "m", "x").key != Request("e", "m", (Message("user", "x"),)).key
    assert Request("e", "m", "[]").key != Request("e", "m", ()).key


GOLDEN = "e1afd6a65a93a2068bb1f50fcfcc3f17--1-2"


def test_keys_stay_what_they_were():
    """Whoever changes them throws away every answer that users have paid for: raise VERSION and say so."""
    request = Request(
        "https://api.openai.com/v1:chat", "gpt-4o-mini", (Message("user", "hé"),), {"temperature": 0.5, "stop": ["a"]}, 1, 2
    )
    assert request.key == GOLDEN


def test_nothing_of_the_terms_is_in_the_key_but_the_scope():
    from outlines_like.requests import Terms

    bare = Request("e", "m", "x")
    assert Request("e", "m", "x", terms=Terms("/folder", "refresh", True)).key == bare.key
    assert Request("e", "m", "x", terms=Terms(scope="row 1")).key != bare.key
