"""Scores of options: what a model would have said, without letting it speak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import outlines_like as ol
from outlines_like.worker.engine import Engine
from outlines_like.worker.packs import Pack, Piece
from outlines_like.worker.prompting import Reader
from outlines_like.worker.slots import packable
from outlines_like.worker.wire import Ask

from .models_for_tests import byte_level, tiny
from .test_prefixes import LONG, QUESTIONS
from .test_worker import Net, drain, engine_for, run

OPTIONS = ["one", " two", " three four five", " three four six", "é"]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def quiz(number: int, text: str, options: list[str]) -> Ask:
    return Ask(number, text, {"options": options, "temperature": 0}, str(number), False)


def scores(engine: Engine, *quizzes: Ask) -> list[tuple[float, ...]]:
    got = run(engine, quizzes)
    return [got[one.id].scores for one in quizzes]


def spelled_out(model: Any, tokenizer: Any, text: str, option: str) -> float:
    """The same from one plain pass over prompt and option."""
    ids = Reader(tokenizer).ids(text)
    more = tokenizer(option, add_special_tokens=False)["input_ids"]
    logs = model(torch.tensor([ids + more])).logits[0].log_softmax(-1)
    return float(sum(logs[len(ids) - 1 + k, token] for k, token in enumerate(more)))


@pytest.mark.parametrize(("kind", "fast"), [("llama", True), ("gpt2", True), ("llama", False), ("mistral", False)])
def test_scores_are_the_log_probabilities_of_all_tokens_of_an_option(kind: str, fast: bool) -> None:
    tokenizer, model = byte_level(), tiny(kind)
    engine = engine_for(tiny(kind), tokenizer, fast=fast)
    texts = ["the cat", "", *QUESTIONS]
    got = scores(engine, *(quiz(number, text, OPTIONS) for number, text in enumerate(texts)))
    want = [[spelled_out(model, tokenizer, text, option) for option in OPTIONS] for text in texts]
    assert torch.allclose(torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64), atol=1e-9)


def test_what_quizzes_share_is_read_once_and_kept() -> None:
    engine = engine_for(tiny(context=512), byte_level(), fast=True)
    first = scores(engine, *(quiz(number, text, ["a", "b"]) for number, text in enumerate(QUESTIONS)))
    total = sum(len(byte_level()(text)["input_ids"]) for text in QUESTIONS)
    assert engine.runner.prefilled < total / 2
    before = engine.runner.prefilled
    assert scores(engine, quiz(7, f"{LONG}one?", ["a", "b"]))[0] == pytest.approx(first[0], abs=1e-9)
    assert engine.runner.prefilled - before < 8


def test_quizzes_and_rows_run_side_by_side() -> None:
    engine = engine_for(tiny(), byte_level(), fast=True)
    row = Ask(1, "the cat", {"max_tokens": 5, "temperature": 0}, "1", False)
    apart = run(engine, [row]) | run(engine, [quiz(2, "a dog", OPTIONS)])
    together = run(engine, [row, quiz(2, "a dog", OPTIONS)])
    assert together[1] == apart[1]
    assert together[2].scores == pytest.approx(apart[2].scores, abs=1e-9)


def test_a_quiz_that_is_too_long_fails_alone_and_a_dropped_one_is_gone() -> None:
    engine = engine_for(tiny(context=64), byte_level(), fast=True)
    engine.take([quiz(0, "é" * 40, ["a"]), quiz(1, "the", ["a"]), quiz(2, "cat", ["a"])])
    engine.drop([2])
    news = drain(engine)
    assert [(fault.id, fault.kind) for fault in news.faults] == [(0, "ContextLengthError")]
    assert [answer.id for answer in news.answers] == [1]


def test_scores_of_a_bfloat16_model_come_from_float32_logits() -> None:
    net = packable(Net(tiny(initializer_range=0.5).to(torch.bfloat16)))
    assert net
    pack = Pack([Piece((5, 6, 7))], lambda *_: None)
    exact, rounded = net.exact(pack), net.read(pack)
    assert exact.dtype == torch.float32
    assert rounded.dtype == torch.bfloat16
    assert torch.allclose(exact, rounded.double().log_softmax(-1).float(), atol=0.5)
    centered = exact - exact.mean()
    assert (centered == centered.bfloat16().float()).float().mean() < 0.1


def test_smollm2_knows_which_option_is_right(smollm2: ol.models.Model) -> None:
    prompts = [["What is the capital of France?", "What is the capital of Italy?"], ["", None]]
    got = smollm2.scores(prompts, ["The capital of France is Paris.", "The capital of Italy is Rome.", "No"])
    assert got.shape == (2, 2, 3)
    assert got[0, 0, 0] > got[0, 0, 1]
    assert got[0, 1, 1] > got[0, 1, 0]
    assert got[0, 0, 0] == pytest.approx(smollm2.scores(prompts[0][0], ["The capital of France is Paris."])[0], abs=1e-3)
    assert list(got[1, 1]) == [None] * 3
    before = smollm2.prefilled_tokens
    again = smollm2.scores(prompts, ["The capital of France is Paris.", "The capital of Italy is Rome.", "No"])
    assert again.tolist() == got.tolist()
    assert smollm2.prefilled_tokens == before


def test_options_have_an_axis_of_their_own_and_are_checked(smollm2: ol.models.Model) -> None:
    assert smollm2.scores("x", []).shape == (0,)
    assert smollm2.scores([], ["a", "b"]).shape == (0, 2)
    for wrong in ([""], [1], ["\ud800"]):
        with pytest.raises(TypeError, match="options"):
            smollm2.scores("x", wrong)
    with pytest.raises(TypeError, match="samples"):
        smollm2.scores("x", ["a"], samples=2)
    with pytest.raises(TypeError, match="can't score"):
        ol.models.fake().scores  # noqa: B018
