"""What rows have in common is read once, and kept: seen in the counts of tokens that were read."""

from __future__ import annotations

import doctest
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from outlines_like.worker import engine as engines
from outlines_like.worker import prefixes, slots
from outlines_like.worker.engine import Engine
from outlines_like.worker.packs import Pack, Piece, Prefix, Share, attention, spelled_out
from outlines_like.worker.prefixes import Prefixes, common, worthwhile
from outlines_like.worker.slots import Slots, moves, packable
from outlines_like.worker.wire import Ask

from .models_for_tests import byte_level, tiny
from .test_worker import Net, drain, engine_for, run


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def engine(room: int = 10**8) -> Engine:
    return engine_for(tiny(context=512), byte_level(), fast=True, room=room)


def asks(texts: Sequence[str], samples: int = 1, **params: Any) -> list[Ask]:
    """Rows for texts, each with its own random stream."""
    given = {"max_tokens": 8, "temperature": 1, **params}
    return [Ask(n * samples + k, text, given, f"{text}{k}", False) for n, text in enumerate(texts) for k in range(samples)]


def read(engine: Engine, rows: Sequence[Ask]) -> int:
    """How many tokens of prompts the engine reads to answer rows."""
    before = engine.runner.prefilled
    run(engine, rows)
    return engine.runner.prefilled - before


def size(text: str) -> int:
    return len(byte_level()(text)["input_ids"])


LONG = "the cat sat on a mat, and the dog ran off. " * 4
QUESTIONS = [f"{LONG}{word}?" for word in ("one", "two", "three", "four", "five")]


def shared() -> int:
    ids = [byte_level()(text)["input_ids"] for text in QUESTIONS]
    return common(tuple(min(ids)), tuple(max(ids)))


def test_a_prefix_that_rows_share_is_read_once_and_each_text_once() -> None:
    own = sum(size(text) - shared() for text in QUESTIONS)
    assert shared() > 40
    assert read(engine(), asks(QUESTIONS, samples=4)) == shared() + own


def test_a_later_call_reads_none_of_a_prefix_that_was_read() -> None:
    one = engine()
    read(one, asks(QUESTIONS))
    assert read(one, asks([f"{LONG}is it six?"])) <= size("is it six?") + 1
    assert read(one, asks(QUESTIONS[:1])) == size(QUESTIONS[0]) - shared()


def test_samples_that_come_while_others_run_read_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    one, rows = engine(), asks(["hello world, what is it?"], samples=12)
    one.take(rows[:4])
    one.step()
    before = one.runner.prefilled
    one.take(rows[4:])
    one.step()
    assert one.runner.prefilled - before == 8
    drain(one)


def test_without_room_nothing_is_kept_and_answers_are_the_same() -> None:
    roomy, narrow = engine(), engine(room=0)
    rows = asks(QUESTIONS, samples=3)
    assert run(roomy, rows) == run(narrow, rows) == run(roomy, rows)
    assert read(narrow, rows) > read(roomy, rows)


def test_a_short_prefix_or_one_of_two_rows_is_not_read_apart() -> None:
    one = engine()
    assert read(one, asks(["the cat sat", "the cat ran", "the cat is"])) == sum(
        map(size, ("the cat sat", "the cat ran", "the cat is"))
    )
    assert read(one, asks(QUESTIONS[:2])) == sum(map(size, QUESTIONS[:2]))


def test_two_families_of_prompts_each_have_their_prefix() -> None:
    other = "hello world, one two three four five six seven eight. " * 3
    texts = [*QUESTIONS[:4], *(f"{other}{word}" for word in ("sat", "ran", "off"))]
    ids = [tuple(byte_level()(text)["input_ids"]) for text in texts]
    saved = sum((len(family) - 1) * common(min(family), max(family)) for family in (ids[:4], ids[4:]))
    mixed = random.Random(0).sample(texts, len(texts))
    assert read(engine(), asks(mixed)) == sum(map(len, ids)) - saved


def test_finished_rows_are_replaced_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "ROWS", 4)
    one, passes = engine(), list[int]()
    real = slots.PackedNet.read
    monkeypatch.setattr(slots.PackedNet, "read", lambda net, pack: passes.append(len(pack.lasts)) or real(net, pack))
    lengths = [2 + n % 3 * 4 for n in range(12)]
    run(one, [Ask(n, "abcdefghijkl"[n], {"max_tokens": lengths[n], "seed": 1}, str(n), False) for n in range(12)])
    full = next(n for n, count in enumerate(passes) if count < 4)
    assert sum(passes) <= sum(lengths)
    assert full >= (sum(passes) - 3 * max(lengths)) // 4


@pytest.mark.parametrize("seed", range(5))
def test_the_prefix_chosen_for_a_text_saves_the_most(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST", 2)
    dice = random.Random(seed)
    texts = [tuple(dice.choices((1, 2), k=dice.randint(1, 7))) for _ in range(25)]
    for text, length in worthwhile(texts).items():
        savings = {0: 0}
        for n in range(2, len(text)):
            others = sum(other[:n] == text[:n] for other in texts) - 1
            if others + 1 >= prefixes.FEW:
                savings[n] = others * n
        assert savings[length] == max(savings.values())


def test_the_least_recently_used_prefix_is_forgotten_first() -> None:
    memory = torch.zeros(1, 2, 1, 20, 1)
    kept = Prefixes(room=2 * memory.nbytes)
    texts = [(number, *range(100, 119)) for number in range(3)]
    kept.keep(Prefix(texts[0], memory))
    kept.keep(Prefix(texts[1], memory))
    assert kept.find((*texts[0], 1)).length == 20
    kept.keep(Prefix(texts[2], memory))
    assert [kept.find((*text, 1)).length for text in texts] == [20, 0, 20]


def test_a_prefix_takes_the_place_of_its_own_beginning() -> None:
    kept = Prefixes(room=10**6)
    kept.keep(Prefix(tuple(range(20)), torch.zeros(1, 2, 1, 20, 1)))
    longer = Prefix(tuple(range(30)), torch.zeros(1, 2, 1, 30, 1))
    kept.keep(longer)
    assert kept.find(tuple(range(25))) == Share(longer, 24)
    assert len(kept._kept) == 1


@pytest.mark.parametrize(("ordered", "masked"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("heads", [6, 3, 2, 1])
def test_attention_without_the_fused_kernel_is_the_same(ordered: bool, masked: bool, heads: int) -> None:
    """Also where several heads' queries share keys."""
    query = torch.randn(2, 6, 5, 8, dtype=torch.float64)
    key, value = (torch.randn(2, heads, 5, 8, dtype=torch.float64) for _ in range(2))
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.float64)
    mask[0, ..., 3:] = float("-inf")
    given: Any = {"mask": mask if masked else None, "ordered": ordered}
    fused = attention(query, key, value, 0.3, **given)
    plain = spelled_out(query, key, value, 0.3, **given)
    assert all(torch.allclose(one, other) for one, other in zip(fused, plain, strict=True))


def test_a_model_whose_attention_is_of_another_kind_takes_the_general_way() -> None:
    assert packable(Net(tiny("mistral"))) is None
    assert packable(Net(tiny("gpt2"))) is not None


def test_a_model_whose_packed_answers_differ_takes_the_general_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots.Pack, "attend", lambda self, layer, query, *rest: torch.zeros_like(query).transpose(0, 1))
    model = tiny()
    before = model.config._attn_implementation
    assert packable(Net(model)) is None
    assert model.config._attn_implementation == before


def test_slots_are_filled_from_the_end() -> None:
    assert moves([0, 1, 2]) == {}
    assert moves([]) == {}
    assert moves([3]) == {3: 0}


def test_common_beginnings_are_counted() -> None:
    assert [common((1, 2, 3), other) for other in ((), (1,), (1, 2, 3), (1, 2, 3, 4), (2,), (1, 3, 3))] == [0, 1, 3, 3, 0, 1]


def test_a_pack_lays_pieces_end_to_end() -> None:
    prefix = Prefix((7, 7), torch.zeros(1, 2, 1, 2, 1))
    pack = Pack([Piece((5,), 0, 3), Piece((6, 8), 2, 0, Share(prefix, 2))], lambda *_: None, going=1)
    assert [pack.ids.tolist(), pack.positions.tolist(), pack.lasts.tolist()] == [[5, 6, 8], [3, 2, 3], [0, 2]]


@pytest.mark.parametrize("module", [prefixes, slots])
def test_the_examples_in_docstrings_are_true(module: Any) -> None:
    assert doctest.testmod(module).failed == 0
    assert doctest.testmod(module).attempted > 0


def test_an_idle_runner_holds_no_slots() -> None:
    one = engine()
    run(one, asks(QUESTIONS))
    assert isinstance(one.runner, Slots)
    assert one.runner._memory.numel() == 0
