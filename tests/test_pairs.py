"""Encoder-decoder models: the law holds for them as for others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from outlines_like.requests import Completion
from outlines_like.worker import cohorts
from outlines_like.worker import engine as engines
from outlines_like.worker.cohorts import Cohorts
from outlines_like.worker.engine import Engine
from outlines_like.worker.loading import habits, load
from outlines_like.worker.pairs import Pair
from outlines_like.worker.prompting import Reader
from outlines_like.worker.wire import Setup

from .models_for_tests import byte_level, saved, sentence_piece, tiny_pair
from .test_constraints import alike, requests_at_random
from .test_worker import TEXTS, ask, drain, run


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def engine_for(kind: str, tokenizer: Any) -> Engine:
    model = tiny_pair(kind)
    said = habits(model, tokenizer)
    return Engine(Cohorts(Pair(model, said.starts)), Reader(tokenizer), tokenizer, said, room=100_000)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_greedy_answers_are_those_of_generate(kind: str) -> None:
    model, tokenizer, texts = tiny_pair(kind), byte_level(), [text for text in TEXTS if text]
    got = run(engine_for(kind, tokenizer), [ask(k, text, temperature=0, max_tokens=12) for k, text in enumerate(texts)])
    for k, text in enumerate(texts):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        most = 13 if kind == "bart" else 12  # generate counts the token that it is told to begin with
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False)
        assert got[k].text == tokenizer.decode(out[0], skip_special_tokens=True)
    assert len({one.text for one in got.values()}) > 3


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_a_row_has_the_same_answer_alone_in_company_and_in_any_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cohorts, "PREFILL", 60)
    monkeypatch.setattr(engines, "ROWS", 6)
    engine, asks = engine_for(kind, byte_level()), requests_at_random(2)
    alone: dict[int, Completion] = {}
    for one in asks:
        alone |= run(engine, [one])
    assert alike(run(engine, asks), alone)
    assert alike(run(engine, random.Random(1).sample(asks, len(asks))), alone)


def test_where_memory_runs_out_in_the_middle_a_row_goes_on_from_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for("t5", byte_level())
    asks = [ask(number, text, max_tokens=15, temperature=1) for number, text in enumerate(TEXTS)]
    want = run(engine, asks)
    engine.take(asks)
    for _ in range(5):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(Cohorts, "advance", Mock(side_effect=MemoryError))
        engine.step()
    assert {answer.id: answer.completion for answer in drain(engine).answers} == want


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_options_are_scored_as_the_model_has_them(kind: str) -> None:
    model, tokenizer = tiny_pair(kind), byte_level()
    options = ["one", " two", " three four"]
    got = run(engine_for(kind, tokenizer), [ask(0, "the cat", options=options)])[0].scores
    starts = habits(model, tokenizer).starts
    for option, score in zip(options, got, strict=True):
        ids = tokenizer(option, add_special_tokens=False)["input_ids"]
        given = torch.tensor([[*starts, *ids]])
        logs = model(torch.tensor([tokenizer("the cat")["input_ids"]]), decoder_input_ids=given).logits[0].log_softmax(-1)
        want = sum(logs[len(starts) - 1 + k, token] for k, token in enumerate(ids))
        assert score == pytest.approx(float(want), abs=1e-9)


def test_a_folder_with_such_a_model_is_loaded_and_its_prompt_may_fill_the_context(tmp_path: Path) -> None:
    engine = load(Setup(str(saved(tmp_path, tiny_pair("bart"), sentence_piece())), "cpu", "float64", False, 1))
    torch.set_grad_enabled(True)
    engine.take([ask(0, "é" * 127, max_tokens=3), ask(1, "é" * 200, max_tokens=3)])
    news = drain(engine)
    assert [answer.id for answer in news.answers] == [0]
    assert [(fault.id, fault.kind) for fault in news.faults] == [(1, "ContextLengthError")]
