"""The OpenAI-compatible backend against a real server, ``transformers serve`` with SmolLM2."""

from __future__ import annotations

from itertools import pairwise

import pytest

import outlines_like as ol

Served = tuple[str, str]
PROMPTS = [["The capital of France is", "Two plus two is"], ["A cat is", "Once upon a time"]]


@pytest.fixture
def chat(serve: Served) -> ol.models.Model:
    return ol.models.openai(serve[1], base_url=serve[0], api_key="", concurrency=2, max_tokens=8, temperature=0)


@pytest.fixture
def text(serve: Served) -> ol.models.Model:
    return ol.models.openai(serve[1], base_url=serve[0], endpoint="completions", concurrency=2, max_tokens=8, temperature=0)


def test_answers_equal_the_local_ones(chat: ol.models.Model, text: ol.models.Model, serve: Served) -> None:
    local = ol.models.transformers(serve[1], max_tokens=8, temperature=0, deterministic=True)
    raw = ol.models.transformers(serve[1], raw=True, max_tokens=8, temperature=0, deterministic=True)
    assert chat(PROMPTS).tolist() == local(PROMPTS).tolist()
    assert text(PROMPTS).tolist() == raw(PROMPTS).tolist()


def test_a_stop_string_is_not_part_of_the_answer(text: ol.models.Model, serve: Served) -> None:
    raw = ol.models.transformers(serve[1], raw=True, max_tokens=8, temperature=0, deterministic=True)
    assert text("The capital of France is", stop=".") == raw("The capital of France is", stop=".") == " Paris"


def test_a_stream_ends_in_the_answer(chat: ol.models.Model) -> None:
    with ol.cache.disabled():
        shown = list(chat.stream("Name a color."))
        assert len(shown) > 2
        texts = [text for _, text, _ in shown]
        assert all(after.startswith(before) for before, after in pairwise(texts))
        assert [done for _, _, done in shown] == [False] * (len(shown) - 1) + [True]
        assert texts[-1] == chat("Name a color.")


def test_samples_are_topped_up_and_kept(chat: ol.models.Model) -> None:
    got = chat(["Hi.", "Ho."], samples=2, temperature=1.0, max_tokens=4)
    assert got.shape == (2, 2)
    assert all(isinstance(text, str) and text for text in got.ravel())
    assert chat(["Hi.", "Ho."], samples=2, temperature=1.0, max_tokens=4).tolist() == got.tolist()


def test_limits_and_counts_are_told(chat: ol.models.Model) -> None:
    completion = chat.complete("Tell a long story.", max_tokens=3)
    assert completion.finish_reason == "length"
    assert completion.usage.completion_tokens == 3
    assert completion.usage.prompt_tokens > 3


def test_a_model_that_is_not_served_is_an_error_of_ours(serve: Served) -> None:
    model = ol.models.openai("no/such-model", base_url=serve[0], retries=0)
    with pytest.raises(ol.errors.ModelError):
        model("hi")
