"""Streams of the fake, of SmolLM2 in a worker, and of SmolLM2 behind a real server."""

import asyncio
import time
from collections import defaultdict

import pytest

import outlines_like as ol
from outlines_like import bridge
from outlines_like.models.pools import Pool

QUESTIONS = ["Name a color.", "Count to five.", "Say hello."]


@pytest.fixture(params=["fake", "smollm2", "server"])
def model(request):
    """Each backend, greedy."""
    if request.param == "fake":
        return ol.models.fake(lambda asked: f"{asked.text} And so on.", temperature=0)
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    base_url, name = request.getfixturevalue("serve")
    return ol.models.openai(name, base_url=base_url, concurrency=2)


@pytest.fixture
def ask(model):
    return lambda prompts, **more: model.stream(prompts, max_tokens=8, temperature=0, **more)


def test_deltas_join_to_the_answers_and_a_stored_answer_streams(ask, model):
    joined = defaultdict(str)
    for index, text in ask(QUESTIONS) | ol.deltas:
        joined[index] += text
    answers = model(QUESTIONS, max_tokens=8, temperature=0)
    assert dict(joined) == {(i,): answer for i, answer in enumerate(answers)}
    assert all(answers)
    again = list(ask(QUESTIONS))
    assert sorted(again) == [((i,), answer, True) for i, answer in enumerate(answers)]


def test_pieces_come_one_by_one(ask):
    with ol.cache.disabled():
        pieces = list(ask(QUESTIONS[1]) | ol.deltas)
    assert len(pieces) > 2


def test_samples_are_told_apart(model):
    with ol.cache.disabled():
        stream = (
            model.stream(QUESTIONS[:2], samples=2, max_tokens=4, temperature=1.0, seed=3) if "fake" not in repr(model) else None
        )
        if stream is None:
            stream = model.stream(QUESTIONS[:2], samples=2)
        latest = {}
        for index, text, _ in stream:
            assert text.startswith(latest.get(index, ""))
            latest[index] = text
    assert sorted(latest) == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_rows_end_early_and_the_others_go_on(ask):
    with ol.cache.disabled():
        made = ask(QUESTIONS) | ol.stop_when(lambda text: len(text) > 3) | ol.collect
    assert all(len(text) > 2 for text in made)


def test_a_pipe_streams(model):
    f = ol.pipe(str.strip, model, ol.vectorize(len, partial=True))
    with ol.cache.disabled():
        values = [value for _, value, _ in f.stream(QUESTIONS[1])]
    assert values == sorted(values)
    assert values[-1] > 0


def test_async_for_reads_the_same(ask):
    async def read():
        return [text async for _, text in ask(QUESTIONS[0]) | ol.deltas]

    async def through_collect():
        return await ol.acollect(ask(QUESTIONS[0]))

    assert "".join(asyncio.run(read())) == asyncio.run(through_collect())


def test_the_first_token_of_many_rows_comes_before_any_row_is_done(smollm2):
    with ol.cache.disabled():
        for _, _, done in smollm2.stream([f"Count to {k}." for k in range(64)], max_tokens=6):
            assert not done
            break


@pytest.mark.parametrize("operator", [None, ol.deltas, ol.stop_when(lambda text: False)], ids=["plain", "deltas", "stop_when"])
def test_leaving_frees_the_worker_s_rows_within_a_second(smollm2, operator):
    with ol.cache.disabled():
        stream = smollm2.stream(["Tell a long story.", "Tell another."], max_tokens=400)
        for _ in stream if operator is None else stream | operator:
            break
    until = time.monotonic() + 1
    while held():
        assert time.monotonic() < until
        time.sleep(0.01)


def held():
    """The rows that any worker holds."""
    pools = [thing for thing in bridge.home().owned.values() if isinstance(thing, Pool)]
    return [job for pool in pools for worker in pool._workers for job in worker.jobs]


def test_a_dead_server_s_stream_ends_in_an_error(replay):
    """T08, T11, T22: what came before is seen."""
    for case in ("T08", "T11"):
        seen = []
        with pytest.raises(ol.OutlinesError):
            (
                ol.models.openai("m", base_url=replay.replay(case, f"{case}-ops"), api_key="k").stream("hi")
                | ol.deltas
                | ol.peek(seen.append)
                | list
            )
        assert seen
