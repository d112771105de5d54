"""The law: a layer changes when, how often and in what company a backend runs, never what the caller sees."""

import asyncio
from contextlib import aclosing
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outlines_like as ol
from outlines_like import Completion, Failure, bridge
from outlines_like.errors import ServerError
from outlines_like.events import last_values, stack
from outlines_like.layers import halted

from .backends import Drawn, Shuffled, reply, requests_of, within

SOON = {"wait": lambda *_: 0}

layer = st.one_of(
    st.builds(lambda size: (f"batched({size})", lambda: ol.batched(size)), st.sampled_from([None, 1, 2, 3])),
    st.builds(
        lambda size: (f"batched({size}, by=family)", lambda: ol.batched(size, by=lambda row: row.family)),
        st.sampled_from([None, 2]),
    ),
    st.builds(lambda size: (f"batched(1, concurrency={size})", lambda: ol.batched(1, concurrency=size)), st.integers(1, 3)),
    st.just(("cached", lambda: ol.cached({}))),
    st.just(("deduped", ol.deduped)),
    st.just(("guarded", lambda: ol.guarded)),
    st.just(("halted", lambda: halted)),
    st.builds(lambda size: (f"limited({size})", lambda: ol.limited(size)), st.integers(1, 3)),
    st.just(("retried", lambda: ol.retried(3, **SOON))),
    st.just(("tapped", lambda: ol.tapped(lambda burst: None))),
)
stacks = st.lists(layer, max_size=6).map(lambda layers: ([name for name, _ in layers], [make for _, make in layers]))
texts = st.lists(st.sampled_from(["a", "b", "c", "d", "a longer prompt"]), max_size=8)
seeds = st.integers(0, 2**32)
LAW = settings(max_examples=120, deadline=None)


def stacked(backend, layers):
    return stack(backend, *(make() for make in layers))


LIMIT = 3  # seconds: a hang must not cost minutes while Hypothesis looks for a smaller one


def watched(run, rows):
    """All events of a run on the library's loop, after which nothing of it is left there."""

    async def watch():
        before = asyncio.all_tasks()
        async with aclosing(run(rows)) as bursts:
            events = [event async for burst in bursts for event in burst]
        assert asyncio.all_tasks() == before
        return events

    return within(lambda: bridge.wait(watch), LIMIT)


def shown(value):
    """What the caller sees of a value: the store's mark on it aside."""
    return (value.text, value.finish_reason) if isinstance(value, Completion) else value


def check_events(events, rows):
    """Exactly one answer a row, the last of its events; before it, its beginnings."""
    for i in range(len(rows)):
        mine = [event for event in events if event.row == i]
        assert [event.done for event in mine] == [False] * (len(mine) - 1) + [True]
        said = [event.value.text for event in mine if isinstance(event.value, Completion)]
        assert all(after.startswith(before) for before, after in pairwise(said))
    assert {event.row for event in events} == set(range(len(rows)))


@LAW
@given(stacks, texts, seeds, st.booleans(), st.sampled_from([{}, {"temperature": 0}]))
def test_any_stack_of_layers_gives_the_answers_of_the_bare_backend(layers, texts, seed, live, params):
    rows = requests_of(texts, live=live, **params)
    if params:
        rows = [row.draw(0, 0) for row in rows]  # at temperature 0 equal prompts are one call: all get its answer
    bare = {event.row: event.value for event in watched(Shuffled(seed), rows) if event.done}
    backend = Shuffled(seed + 1)
    run = stacked(backend, layers[1])
    for _ in range(2):  # the second time a store may know them
        events = watched(run, rows)
        check_events(events, rows)
        assert {event.row: shown(event.value) for event in events if event.done} == {
            i: shown(value) for i, value in bare.items()
        }
    assert backend.opened == backend.closed


@LAW
@given(stacks, texts, seeds, st.data())
def test_rows_that_fail_and_are_tried_again_keep_to_their_own_cells(layers, texts, seed, data):
    rows = requests_of(texts)
    counts = {text: data.draw(st.integers(0, 4), label=f"faults of {text!r}") for text in set(texts)}
    backend = Shuffled(seed, {text: [ServerError(text)] * count for text, count in counts.items()})
    events = watched(stacked(backend, layers[1]), rows)
    check_events(events, rows)
    tries = 3 ** layers[0].count("retried")
    for event in events:
        request = rows[event.row]
        if isinstance(event.value, Failure):
            assert event.value.error.args == (request.text,)
            assert tries <= sum(counts.values()) + 1
        elif event.done:
            assert event.value.text == reply(request)
        else:
            assert reply(request).startswith(event.value.text)
    failed = sum(isinstance(event.value, Failure) for event in events)
    assert failed <= sum(counts.values())


@LAW
@given(stacks, st.lists(st.sampled_from("abcd"), min_size=1, max_size=8), seeds, st.integers(0, 12))
def test_leaving_at_any_event_closes_everything(layers, texts, seed, stay):
    backend = Shuffled(seed)
    run = stacked(backend, layers[1])

    async def leave():
        before = asyncio.all_tasks()
        async with aclosing(run(requests_of(texts))) as bursts:
            seen = 0
            async for burst in bursts:
                seen += len(burst)
                if seen >= stay:
                    break
        assert backend.opened == backend.closed
        assert asyncio.all_tasks() == before

    within(lambda: bridge.wait(leave), LIMIT)


@LAW
@given(stacks, st.lists(st.sampled_from("abcd"), min_size=1, max_size=8), seeds, st.integers(0, 12))
def test_cancelling_at_any_step_closes_everything(layers, texts, seed, steps):
    backend = Shuffled(seed)
    run = stacked(backend, layers[1])

    async def cancel():
        before = asyncio.all_tasks()
        task = asyncio.ensure_future(last_values(run(requests_of(texts)), len(texts)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert backend.opened == backend.closed
        assert asyncio.all_tasks() == before

    within(lambda: bridge.wait(cancel), LIMIT)


@settings(max_examples=40, deadline=None)
@given(stacks, st.integers(0, 20), seeds, st.integers(1, 8))
def test_no_delay_puts_an_answer_into_another_cell(layers, n, seed, concurrency):
    gate = Drawn(seed)

    async def f(x):
        await gate.turn()
        return f"answer to {x}"

    f = ol.through(
        ol.vectorize(f, concurrency=concurrency), *(make() for name, make in zip(*layers, strict=True) if name not in KEYED)
    )
    assert within(lambda: f(range(n))).tolist() == [f"answer to {x}" for x in range(n)]
    assert gate.most <= concurrency * max(n, 1)


KEYED = ("cached", "deduped", "batched(None, by=family)", "batched(2, by=family)")  # they ask for a stable name


@settings(max_examples=40, deadline=None)
@given(stacks, texts, seeds)
def test_two_readers_of_one_stack_do_not_mix(layers, texts, seed):
    run = stacked(Shuffled(seed), layers[1])
    rows = requests_of(texts)

    async def both():
        return await asyncio.gather(last_values(run(rows), len(rows)), last_values(run(rows[::-1]), len(rows)))

    one, other = within(lambda: bridge.wait(both), LIMIT)
    assert [value.text for value in one] == [reply(row) for row in rows]
    assert [value.text for value in other] == [reply(row) for row in rows[::-1]]


@settings(max_examples=30, deadline=None)
@given(stacks, texts, seeds, st.sampled_from([None, 1, 3]))
def test_a_stream_ends_in_what_the_eager_call_gives(layers, texts, seed, samples):
    with ol.cache.disabled():
        model = ol.models.Model("m", Shuffled(seed), endpoint=f"e{seed}", defaults={}, layers=[make() for make in layers[1]])
        eager = within(lambda: model(texts, samples=samples))
        snapshots = within(lambda: list(model.stream(texts, samples=samples)))
    last = {index: value for index, value, done in snapshots if done}
    assert len(last) == sum(done for _, _, done in snapshots) == eager.size
    assert all(eager[index] == value for index, value in last.items())


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_deep_stacks_of_one_layer_are_that_layer(depth):
    layers = [ol.batched(2), ol.cached({}), ol.deduped(), ol.retried(2, **SOON), ol.limited(2)] * depth
    rows = requests_of("abcabc")
    events = watched(stack(Shuffled(0), *layers), rows)
    check_events(events, rows)
    assert {event.row: event.value.text for event in events if event.done} == {i: reply(row) for i, row in enumerate(rows)}
