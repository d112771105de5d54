"""Answers held to choices, patterns and schemas: the law holds for them too, and what can't be kept is said before."""

from __future__ import annotations

import doctest
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outlines_like.requests import Completion
from outlines_like.worker import constraints, slots
from outlines_like.worker import engine as engines
from outlines_like.worker.constraints import Grammars, forbidding
from outlines_like.worker.engine import Engine
from outlines_like.worker.packs import Pack

from .models_for_tests import byte_level, sentence_piece, tiny
from .test_worker import TEXTS, WAYS, ask, drain, engine_for, run

SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 30))]

ANIMAL = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}
STRING = re.compile(r'"(\\.|[^"\\])*"')
FORMS: list[dict[str, Any]] = [
    {"choices": ["the cat", "the dog", "a mat", "a"]},
    {"regex": r"[0-9]{2}-(one|two) [a-d]+"},
    {"json_schema": ANIMAL},
    {},
]


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def keeps(text: str, params: dict[str, Any]) -> bool:
    """Whether a whole answer is as it was wished."""
    if "json_schema" in params:
        read = json.loads(text)
        return len(read["name"]) <= 6 and STRING.sub('""', text) == f'{{"": "", "": {read["legs"]}}}'
    return text in params["choices"] if "choices" in params else bool(re.fullmatch(params["regex"], text))


def requests_at_random(seed: int) -> list[Any]:
    dice = random.Random(seed)
    asks = []
    for number in range(16):
        params: dict[str, Any] = {"temperature": dice.choice([0, 0.7, 1.5]), "max_tokens": dice.choice([5, 60])}
        params |= dice.choice([{}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.3}, {"logit_bias": {"40": 5}}])
        params |= dice.choice([{}, {}, {"logprobs": True}, {"stop": ["o"]}]) | FORMS[number % 4]
        asks.append(ask(number, " ".join(dice.choices(TEXTS, k=2)), **params))
    return asks


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "fast"), WAYS)
def test_held_rows_have_the_same_answers_alone_in_company_and_in_any_order(
    kind: str, fast: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots, "PREFILL", 40)
    monkeypatch.setattr(engines, "ROWS", 6)
    engine, asks = engine_for(tiny(kind), byte_level(), fast=fast), requests_at_random(seed)
    alone: dict[int, Completion] = {}
    for one in asks:
        alone |= run(engine, [one])
    assert alike(run(engine, asks), alone)
    assert alike(run(engine, random.Random(seed).sample(asks, len(asks))), alone)
    for one in asks:
        if one.id % 4 < 3 and alone[one.id].finish_reason == "stop" and "stop" not in one.params:
            assert keeps(alone[one.id].text, one.params)


def alike(got: dict[int, Completion], want: dict[int, Completion]) -> bool:
    """Whether answers are the same, log-probabilities up to rounding."""
    assert {number: (a.text, a.finish_reason, a.usage) for number, a in got.items()} == {
        number: (a.text, a.finish_reason, a.usage) for number, a in want.items()
    }
    return all(got[number].logprobs == pytest.approx(want[number].logprobs, abs=1e-9) for number in want)


@pytest.mark.parametrize("seed", SEEDS)
def test_both_ways_of_running_held_rows_give_the_same_answers(seed: int) -> None:
    asks = requests_at_random(seed)
    fast, general = engine_for(tiny(), byte_level(), fast=True), engine_for(tiny(), byte_level())
    assert alike(run(fast, asks), run(general, asks))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("params", FORMS[:3])
def test_a_whole_answer_ends_with_stop_and_keeps_to_the_form(params: dict[str, Any], fast: bool) -> None:
    engine = engine_for(tiny(), byte_level(), fast=fast)
    got = run(engine, [ask(number, "the cat", temperature=1, max_tokens=200, **params) for number in range(8)])
    assert {one.finish_reason for one in got.values()} == {"stop"}
    assert all(keeps(one.text, params) for one in got.values())
    assert len({one.text for one in got.values()}) > 2


def test_what_a_schema_forces_is_not_decoded_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, passes = engine_for(tiny(), byte_level(), fast=True), list[int]()
    real = Pack.__init__
    monkeypatch.setattr(Pack, "__init__", lambda self, *given, **named: passes.append(1) or real(self, *given, **named))  # type: ignore[func-returns-value]
    got = run(engine, [ask(0, "the cat", temperature=0, max_tokens=200, json_schema=ANIMAL)])[0]
    assert got.usage.completion_tokens > len(passes) + 10
    passes.clear()
    only = run(engine, [ask(1, "the cat", choices=["one two three"])])[1]
    assert (only.text, only.finish_reason, passes) == ("one two three", "stop", [])


SCHEMAS: dict[str, dict[str, Any]] = {
    "J01": {
        "$defs": {"Leg": {"type": "object", "properties": {"side": {"enum": ["l", "r"]}}, "required": ["side"]}},
        "type": "object",
        "properties": {"legs": {"type": "array", "items": {"$ref": "#/$defs/Leg"}, "minItems": 1, "maxItems": 2}},
        "required": ["legs"],
        "additionalProperties": False,
    },
    "J04": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "J05": {
        "type": "object",
        "properties": {"test": {"$ref": "#/properties/test2"}, "test2": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["test", "test2"],
        "additionalProperties": False,
    },
    "J07": {"enum": ["开心", "难过", "é", "👍🏽"]},
    "J08": {"type": "integer", "minimum": 2**53 - 1, "maximum": 2**53},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_that_made_trouble_elsewhere_are_kept(name: str) -> None:
    checker = pytest.importorskip("jsonschema")
    schema = SCHEMAS[name]
    schema["$defs"] = {key: {**value, "additionalProperties": False} for key, value in schema.get("$defs", {}).items()}
    engine = engine_for(tiny(), byte_level(), fast=True)
    got = run(engine, [ask(number, "the cat", temperature=1.5, max_tokens=200, json_schema=schema) for number in range(6)])
    for one in got.values():
        checker.validate(json.loads(one.text), schema)
        assert one.finish_reason == "stop"
        assert "  " not in one.text
        assert "\n" not in one.text


def test_an_answer_that_is_whole_at_its_limit_is_whole() -> None:
    tokenizer = byte_level()
    count = len(tokenizer("the dog", add_special_tokens=False)["input_ids"])
    engine = engine_for(tiny(), tokenizer)
    whole, short = (ask(number, "a", choices=["the dog"], max_tokens=count - number) for number in (0, 1))
    got = run(engine, [whole, short])
    assert [got[number].finish_reason for number in (0, 1)] == ["stop", "length"]


def test_a_stop_string_ends_a_held_answer_before_its_form_does() -> None:
    engine = engine_for(tiny(), byte_level(), fast=True)
    got = run(engine, [ask(0, "the cat", regex="one two (three|four)", stop=["tw"], temperature=0)])[0]
    assert (got.text, got.finish_reason) == ("one ", "stop")


@pytest.mark.parametrize("make", [byte_level, sentence_piece])
@pytest.mark.parametrize("choices", [["a", "and a long sequence", "with\n line break"], ['"q"', "\\d", "é 你好 🤗🏽", "<s>"]])
def test_choices_are_taken_as_they_are(make: Any, choices: list[str]) -> None:
    engine = engine_for(tiny(vocab_size=400), make())
    got = run(engine, [ask(number, "the cat", choices=choices, temperature=1.5, max_tokens=60) for number in range(12)])
    assert {one.text.lstrip() for one in got.values()} <= {choice.lstrip() for choice in choices}
    assert len({one.text for one in got.values()}) > 1


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences"),
        ({"regex": r"[^\s\S]"}, "nothing that the model can write meets it"),
        ({"json_schema": {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}}, '"not"'),
        ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 2}}, "minimum"),
        ({"json_schema": {"allOf": [{"type": "string"}, {"type": "integer"}]}}, "Unsatisfiable"),
        ({"json_schema": {"$ref": "#/properties/x"}}, "does not exist"),
        ({"json_schema": {"enum": [1, 2**53 + 1]}}, "9007199254740993"),
        ({"regex": "a", "choices": ["a"]}, "choices and regex"),
        ({"logit_bias": {"4000": 1}}, "token 4000"),
    ],
)
def test_what_cannot_be_kept_fails_alone_and_before_anything_is_written(params: dict[str, Any], words: str) -> None:
    engine = engine_for(tiny(), byte_level(), fast=True)
    engine.take([ask(0, "the cat", **params), ask(1, "the cat", max_tokens=3)])
    assert len(engine._waiting) == 1
    news = drain(engine)
    assert [(fault.id, fault.kind) for fault in news.faults] == [(0, "BadRequestError")]
    assert words in news.faults[0].message
    assert [answer.id for answer in news.answers] == [1]


def test_a_form_that_the_vocabulary_cannot_spell_to_its_end_fails_alone() -> None:
    engine = engine_for(tiny(), byte_level(), fast=True)
    row = ask(0, "the cat", regex="[ab]{3}", temperature=0)
    engine.take([row, ask(1, "the cat", max_tokens=3)])
    engine._waiting[0].constraint.fault = lambda: "a limit was met"  # type: ignore[union-attr, method-assign]
    news = drain(engine)
    assert [(fault.id, fault.message) for fault in news.faults] == [(0, "a limit was met")]
    assert [answer.id for answer in news.answers] == [1]


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constraints, "KEPT", 2)
    made = Grammars(byte_level(), [1])
    first = made._compiled("regex", "a")
    assert made._compiled("regex", "a") is first
    made._compiled("regex", "b"), made._compiled("regex", "c")
    assert list(made._known) == ['["regex", "b"]', '["regex", "c"]']


def test_masks_are_read_bit_by_bit() -> None:
    dice = random.Random(0)
    masks = [dice.randbytes(8) for _ in range(5)]
    got = forbidding(masks, 70, torch.float64) == 0
    want = [[token < 64 and bool(mask[token // 8] >> token % 8 & 1) for token in range(70)] for mask in masks]
    assert got.tolist() == want


# Penalties, biases, log-probabilities


@pytest.mark.parametrize(("kind", "fast"), [("llama", False), ("gpt2", True)])
def test_a_penalty_is_that_of_generate(kind: str, fast: bool) -> None:
    model, tokenizer = tiny(kind), byte_level()
    engine = engine_for(tiny(kind), tokenizer, fast=fast)
    texts = [text for text in TEXTS if text]
    got = run(engine, [ask(k, text, temperature=0, max_tokens=15, repetition_penalty=1.5) for k, text in enumerate(texts)])
    plain = run(engine, [ask(k, text, temperature=0, max_tokens=15) for k, text in enumerate(texts)])
    for k, text in enumerate(texts):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        given = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0}
        out = model.generate(ids, max_new_tokens=15, do_sample=False, repetition_penalty=1.5, **given)
        assert got[k].text == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert got != plain


def test_a_bias_makes_a_token_certain_or_impossible() -> None:
    tokenizer = byte_level()
    (token,) = tokenizer("!", add_special_tokens=False)["input_ids"]
    engine = engine_for(tiny(), tokenizer)
    always, never = ({str(token): value} for value in (1000, -1000))
    got = run(
        engine, [ask(0, "a", logit_bias=always, max_tokens=4), ask(1, "a", logit_bias=never, max_tokens=4, temperature=0)]
    )
    assert got[0].text == "!!!!"
    assert "!" not in got[1].text


@pytest.mark.parametrize("fast", [False, True])
def test_log_probabilities_of_tokens_are_those_that_scores_are_made_of(fast: bool) -> None:
    engine = engine_for(tiny(), byte_level(), fast=fast)
    params: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1.3, "top_k": 9}, {"choices": ["one two three four"]}]
    asks = [ask(k, "the cat", max_tokens=9, logprobs=True, **more) for k, more in enumerate(params)]
    got = run(engine, asks)
    for one in got.values():
        assert one.logprobs is not None
        assert len(one.logprobs) == one.usage.completion_tokens
    fields = {"options": [got[2].text], "temperature": 0}
    scored = run(engine, [ask(9, "the cat", **fields)])[9].scores
    assert got[2].log_prob == pytest.approx(scored[0], abs=1e-9)
    assert run(engine, [ask(5, "the cat", max_tokens=3)])[5].logprobs is None


def test_log_probabilities_are_those_of_the_text_that_is_left() -> None:
    engine = engine_for(tiny(), byte_level())
    whole = run(engine, [ask(0, "the cat", regex="[a-z]{3}[.][a-z]{9}", temperature=0, logprobs=True)])[0]
    cut = run(engine, [ask(1, "the cat", regex="[a-z]{3}[.][a-z]{9}", temperature=0, logprobs=True, stop=["."])])[1]
    assert whole.logprobs is not None
    assert cut.logprobs is not None
    assert cut.text == whole.text.partition(".")[0]
    assert cut.logprobs == whole.logprobs[: len(cut.logprobs)]
    assert len(cut.logprobs) < len(whole.logprobs)


def unheld(engine: Engine) -> bool:
    """Whether no row of an engine was held to anything."""
    return engine._grammars._vocabulary is None


def test_the_examples_in_docstrings_are_true() -> None:
    assert doctest.testmod(constraints).failed == 0
    assert doctest.testmod(constraints).attempted > 0


def test_rows_that_are_held_to_nothing_never_load_the_parser() -> None:
    engine = engine_for(tiny(), byte_level(), fast=True)
    run(engine, [ask(number, text, max_tokens=3) for number, text in enumerate(TEXTS)])
    assert unheld(engine)
