"""The fake model: what it keeps of what real ones keep."""

import pytest

import outlines_like as ol
from outlines_like.errors import MalformedError, ServerError


def answering(*texts):
    """A fake that gives these answers in turn."""
    said = iter(texts)
    return ol.models.fake(lambda request: next(said))


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"choices": ["yes", "no"]}, "yes", "maybe"),
        ({"regex": "[0-9]+"}, "12", "12a"),
        ({"json_schema": {"type": "object"}}, '{"a": 1}', '{"a": '),
    ],
    ids=["choices", "regex", "json_schema"],
)
def test_an_answer_is_in_the_form_that_was_asked_for_or_an_error(form, right, wrong):
    assert answering(right)("?", **form) == right
    with pytest.raises(MalformedError, match=f"{wrong[:2]}.* (is none of|does not match|is not JSON)"):
        answering(wrong)("again?", **form)


def test_an_answer_is_read_as_in_a_program():
    assert answering(" yes\n")("?", choices=["yes", "no"]) == "yes"
    assert (answering(" yes\n") + ol.select(["yes", "no"], "x"))["x"] == "yes"
    assert answering("no, never")("?", choices=["no", "yes"], stop=",") == "no"
    assert answering("quite bad").complete("?", choices=["quite bad"], max_tokens=1).finish_reason == "length"


def test_a_row_out_of_form_fails_alone_and_is_not_asked_again():
    log = []
    model = ol.models.fake(log=log)
    first, second = ol.vectorize(model, on_error="return")(["yes", "maybe"], choices=["YES", "NO"])
    assert first == "YES"
    assert isinstance(second, MalformedError)
    assert len(log) == 2


@pytest.mark.parametrize(
    "given", [{"answer": "text"}, {"fail": ServerError("down")}, {"retries": -1}, {"delay": -0.5}], ids=str
)
def test_what_a_fake_can_t_be_made_of_is_said(given):
    [name] = given
    with pytest.raises((TypeError, ValueError), match=f"{name}=.*; it takes a"):
        ol.models.fake(**given)


def test_a_fake_tries_again_without_waiting():
    log = []
    down = iter([ServerError("down", retry_after=3600.0)] * 4)
    assert ol.models.fake(log=log, fail=lambda request: next(down, None))("hi") == "HI"
    assert len(log) == 5
