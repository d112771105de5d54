"""Votes over samples."""

import asyncio

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import outlines_like as ol
from outlines_like import Vote, vote


@pytest.mark.parametrize(
    ("samples", "answer", "share", "counts"),
    [
        (["18", "26", "18"], "18", 2 / 3, {"18": 2, "26": 1}),
        (["b", "a", "a", "b"], "b", 0.5, {"b": 2, "a": 2}),
        (["z", "a"], "z", 0.5, {"z": 1, "a": 1}),
        ([3, 2, 2], 2, 2 / 3, {2: 2, 3: 1}),
        ([None, float("nan"), "a", None], "a", 1.0, {"a": 1}),
        ([ValueError("x"), "a", "b", "b"], "b", 2 / 3, {"b": 2, "a": 1}),
        ([None, None], None, 0.0, {}),
        ([], None, 0.0, {}),
        (["", "", "a"], "", 2 / 3, {"": 2, "a": 1}),
        ((True, False, True), True, 2 / 3, {True: 2, False: 1}),
        (np.array(["a", "a", "b"]), "a", 2 / 3, {"a": 2, "b": 1}),
        (pd.Series(["b", "a", "a"]), "a", 2 / 3, {"a": 2, "b": 1}),
    ],
    ids=repr,
)
def test_the_answer_is_what_most_samples_say(samples, answer, share, counts):
    out = vote(samples)
    assert out == Vote(answer, pytest.approx(share), counts)
    assert list(out.counts.values()) == sorted(counts.values(), reverse=True)


@pytest.mark.parametrize("shape", [(2,), (2, 3), (1, 1), (0,), (2, 0)])
def test_votes_have_the_shape_of_the_other_axes(shape):
    samples = np.empty((*shape, 5), dtype=object)
    for index in np.ndindex(shape):
        samples[index] = [str(index)] * 3 + ["other"] * 2
    out = vote(samples)
    assert out.shape == shape
    assert out.dtype == object
    for index in np.ndindex(shape):
        assert out[index] == Vote(str(index), 0.6, {str(index): 3, "other": 2})


def test_no_samples_are_no_answer():
    out = vote(np.empty((2, 0), dtype=object))
    assert out.tolist() == [Vote(None, 0.0, {})] * 2


@pytest.mark.parametrize("one", ["abc", 5, None, np.array("a", dtype=object)], ids=repr)
def test_a_single_answer_is_no_vote(one):
    with pytest.raises(ValueError, match="last axis"):
        vote(one)


def test_answers_that_have_no_hash_can_vote_or_are_refused_in_our_words():
    try:
        said = vote([{"a": 1}, {"a": 2}, {"a": 1}]).answer
    except TypeError as error:
        said = str(error)
    assert said == {"a": 1} or "vote" in said


def test_a_models_samples_can_vote():
    model = ol.models.fake(lambda request: f"The answer is {'18' if request.sample % 3 else '26'}.")
    answer = ol.vectorize(lambda text: text.split()[-1].rstrip("."))
    out = vote(answer(model(["q", "r"], samples=6)))
    assert out.tolist() == [Vote("18", 4 / 6, {"18": 4, "26": 2})] * 2


@given(st.lists(st.integers(0, 4) | st.none(), max_size=12))
def test_a_vote_counts_what_was_said(samples):
    out = vote(samples)
    said = [sample for sample in samples if sample is not None]
    assert out.counts == {answer: said.count(answer) for answer in set(said)}
    if said:
        most = max(map(said.count, said))
        assert out.answer == next(answer for answer in said if said.count(answer) == most)
        assert out.share == most / len(said)


def test_samples_are_asked_for_until_the_vote_is_decided():
    """Four equal answers of seven can't be outvoted: what is still under way is cancelled."""
    begun, cancelled = [], []

    async def answer(question):
        begun.append(question)
        try:
            if len(begun) > 4:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(question)
            raise
        return "18"

    stream = ol.vectorize(answer).stream("?", samples=7)
    answers = stream | ol.until_decided | ol.collect
    assert answers.tolist().count("18") == 4
    assert vote(answers).answer == "18"
    assert len(cancelled) == 3


def test_each_row_has_a_vote_of_its_own_and_ties_go_on():
    texts = {"a": ["1", "1", "1", "2", "2"], "b": ["1", "2", "1", "2", "3"]}

    def answer(row):
        return texts[row.text][row.sample]

    model = ol.models.fake(answer, concurrency=1)
    answers = model.stream(["a", "b"], samples=5) | ol.until_decided(int) | ol.collect
    assert answers.shape == (2, 5)
    assert [x for x in answers[0] if x][:3] == ["1", "1", "1"]
    assert answers[1].tolist() == texts["b"]
    with pytest.raises(ValueError, match="samples="):
        model.stream("a") | ol.until_decided
