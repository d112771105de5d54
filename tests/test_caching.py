"""The caching layer: known rows are not paid for twice, and what is kept is worth keeping."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from outlines_like import bridge, cache
from outlines_like.errors import RateLimitError, StoreWarning
from outlines_like.events import Bursts, Elementwise, Event, Failure, last_values
from outlines_like.layers.caching import cached, known
from outlines_like.requests import Completion, Request, Terms
from outlines_like.store import Store, default_folder


class Row(NamedTuple):
    """A row of a lifted function."""

    key: str
    terms: Terms = Terms()


def request(prompt: str, sample: int = 0, **params: Any) -> Request:
    """A request made just now, on the terms of this place."""
    return Request("test:", "m", prompt, params, 0, sample, cache.terms())


def requests(n: int, **params: Any) -> list[Request]:
    """``n`` samples of one prompt."""
    return [request("p", k, **params) for k in range(n)]


class Counter:
    """A backend that answers the number of its row, counted over all calls. ``said`` holds other answers for some rows."""

    def __init__(self, said: Mapping[int, Any] = {}, live: bool = False) -> None:
        self.asked: list[Any] = []
        self.said, self.live = dict(said), live

    async def __call__(self, rows: Sequence[Any]) -> Bursts:
        for i, row in enumerate(rows):
            self.asked.append(row)
            if self.live:
                yield [Event(i, Completion("so f"), False)]
            yield [Event(i, self.said.get(len(self.asked), Completion(f"answer {len(self.asked)}", "stop")))]


def answers(run: Elementwise, rows: Sequence[Any]) -> list[Any]:
    """The answers of all rows."""
    return bridge.wait(last_values, run(rows), len(rows))


def texts(run: Elementwise, rows: Sequence[Any]) -> list[str]:
    """The texts of the answers."""
    return [value.text for value in answers(run, rows)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path) -> Iterator[Path]:
    """A default store for each test, let go of afterwards."""
    folder = tmp_path / "answers"
    with cache.at(folder):
        yield folder
    if store := bridge.disown(("store", str(folder))):
        bridge.wait(store.aclose)


STORES = ["default", "explicit", "mapping"]


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Each kind of store that the layer takes."""
    if request.param == "explicit":
        with_path = Store(tmp_path / "explicit")
        yield with_path
        with_path.close()
    else:
        yield {"default": None, "mapping": {}}[request.param]


def test_a_second_run_asks_nothing_and_gives_equal_answers(store: Any) -> None:
    backend = Counter()
    first = answers(cached(store)(backend), requests(20))
    second = answers(cached(store)(backend), requests(20))
    assert len(backend.asked) == 20
    assert [value.text for value in second] == [value.text for value in first] == [f"answer {i}" for i in range(1, 21)]
    assert {value.cached for value in first} == {False}
    assert {value.cached for value in second} == {True}


def test_more_samples_pay_only_for_the_new_ones(store: Any) -> None:
    backend = Counter()
    five = texts(cached(store)(backend), requests(5))
    eight = texts(cached(store)(backend), requests(8))
    assert eight[:5] == five
    assert [row.sample for row in backend.asked] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_known_rows_come_in_one_burst_before_the_others(store: Any) -> None:
    run = cached(store)(Counter())
    rows = requests(9)
    answers(run, rows[::2])

    async def bursts() -> list[list[int]]:
        async with aclosing(run(rows)) as stream:
            return [[event.row for event in burst] async for burst in stream]

    assert bridge.wait(bursts) == [[0, 2, 4, 6, 8], [1], [3], [5], [7]]


def test_values_of_plain_functions_come_back_as_they_were(store: Any) -> None:
    values = {1: (1, "two", [None]), 2: 2**80, 3: {"a": [1.5]}, 4: None}
    backend = Counter(values)
    rows = [Row(f"row {i}", cache.terms()) for i in range(4)]
    first, second = answers(cached(store)(backend), rows), answers(cached(store)(backend), rows)
    assert first == second == list(values.values())
    assert type(second[0]) is tuple
    assert len(backend.asked) == 4


def test_failures_and_partial_answers_are_not_kept(store: Any) -> None:
    """K05."""
    backend = Counter({2: Failure(RateLimitError("later"))}, live=True)
    run = cached(store)(backend)
    assert isinstance(answers(run, requests(3))[1], Failure)
    assert texts(run, requests(3)) == ["answer 1", "answer 4", "answer 3"]


@pytest.mark.parametrize(
    ("reason", "params", "kept"),
    [
        ("stop", {}, True),
        ("length", {}, False),
        ("length", {"max_tokens": 3}, True),
        ("content_filter", {"max_tokens": 3}, False),
        ("error", {}, False),
        (None, {}, False),
    ],
)
def test_only_whole_answers_are_kept(store: Any, reason: str | None, params: dict[str, Any], kept: bool) -> None:
    backend = Counter({1: Completion("first", reason)})
    run = cached(store)(backend)
    assert texts(run, requests(1, **params)) == ["first"]
    assert texts(run, requests(1, **params)) == ["first" if kept else "answer 2"]


def test_greedy_samples_share_one_entry(store: Any) -> None:
    run = cached(store)(Counter())
    answers(run, requests(1, temperature=0))
    assert len(set(texts(run, requests(4, temperature=0)))) == 1


def test_leaving_early_keeps_what_was_done(store: Any) -> None:
    backend = Counter()
    run = cached(store)(backend)

    async def leave() -> None:
        async with aclosing(run(requests(10))) as bursts:
            async for burst in bursts:
                if burst[0].row == 3:
                    return

    bridge.wait(leave)
    assert texts(run, requests(10))[:4] == ["answer 1", "answer 2", "answer 3", "answer 4"]
    assert len(backend.asked) == 10


def test_another_version_does_not_meet_old_values(store: Any) -> None:
    backend = Counter()
    assert texts(cached(store)(backend), requests(1)) == ["answer 1"]
    assert texts(cached(store, version="2")(backend), requests(1)) == ["answer 2"]
    assert texts(cached(store, version="2")(backend), requests(1)) == ["answer 2"]
    assert texts(cached(store)(backend), requests(1)) == ["answer 1"]


def test_disabled_neither_looks_up_nor_keeps(store: Any) -> None:
    run = cached(store)(Counter())
    with cache.disabled():
        assert texts(run, requests(1)) == ["answer 1"]
    assert texts(run, requests(1)) == ["answer 2"]
    with cache.disabled():
        assert texts(run, requests(1)) == ["answer 3"]
    assert texts(run, requests(1)) == ["answer 2"]


def test_refresh_asks_anew_and_keeps_the_new_answer(store: Any) -> None:
    run = cached(store)(Counter())
    assert texts(run, requests(1)) == ["answer 1"]
    with cache.refresh():
        assert texts(run, requests(1)) == ["answer 2"]
    assert texts(run, requests(1)) == ["answer 2"]


def test_settings_act_at_once_and_blocks_restore_what_was_before(tmp_path: Path, own_folder: Path) -> None:
    assert cache.terms() == Terms(str(own_folder), "use")
    with cache.disabled():
        cache.refresh()
        assert cache.terms().mode == "refresh"
        with cache.at(tmp_path / "b"), cache.disabled():
            assert cache.terms(live=True, scope="s") == Terms(str(tmp_path / "b"), "disabled", True, "s")
        assert cache.terms() == Terms(str(own_folder), "refresh")
    assert cache.terms() == Terms(str(own_folder), "use")


def test_a_task_of_its_own_has_settings_of_its_own() -> None:
    async def inner() -> str:
        cache.disabled()
        return cache.terms().mode

    async def outer() -> list[str]:
        return [await asyncio.create_task(inner()), cache.terms().mode]

    assert asyncio.run(outer()) == ["disabled", "use"]


def test_the_environment_names_the_folder_when_a_call_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "FOLDER", type(cache.FOLDER)("other", default=None))
    monkeypatch.setenv("OUTLINES_LIKE_CACHE", str(tmp_path / "one"))
    assert cache.terms().store == str(tmp_path / "one") == str(default_folder())
    monkeypatch.setenv("OUTLINES_LIKE_CACHE", str(tmp_path / "two"))
    assert cache.terms().store == str(tmp_path / "two")
    monkeypatch.delenv("OUTLINES_LIKE_CACHE")
    assert cache.terms().store is None
    assert default_folder().parts[-2:] == ("outlines_like", "answers")


def test_rows_of_one_call_may_name_stores_of_their_own(tmp_path: Path) -> None:
    backend = Counter()
    run = cached()(backend)
    rows = [Row("k", Terms(str(tmp_path / place), mode)) for place in "ab" for mode in ("use", "disabled", "refresh")]
    assert texts(run, rows) == [f"answer {i}" for i in range(1, 7)]
    assert texts(run, rows) == ["answer 3", "answer 7", "answer 8", "answer 6", "answer 9", "answer 10"]
    for place in "ab":
        bridge.wait(bridge.disown(("store", str(tmp_path / place))).aclose)


def test_clear_empties_the_store_of_this_place(tmp_path: Path) -> None:
    run = cached()(Counter())
    texts(run, requests(3))
    with cache.at(tmp_path / "other"):
        cache.clear()
    assert texts(run, requests(1)) == ["answer 1"]
    cache.clear()
    assert texts(run, requests(1)) == ["answer 4"]
    bridge.wait(bridge.disown(("store", str(tmp_path / "other"))).aclose)


def test_known_tells_which_rows_are_stored() -> None:
    rows = requests(5)
    answers(cached()(Counter()), rows[:2])
    assert known(rows) == {row.key for row in rows[:2]}
    with cache.refresh():
        assert known(requests(5)) == set()


def test_answers_outlive_the_store_object(own_folder: Path) -> None:
    texts(cached()(Counter()), requests(50))
    bridge.wait(bridge.disown(("store", str(own_folder))).aclose)
    store = Store(own_folder)
    assert {value.text for value in store.get_many([row.key for row in requests(50)]).values()} == {
        f"answer {i}" for i in range(1, 51)
    }
    store.close()


def test_a_store_that_can_not_be_used_costs_a_warning_and_no_answer(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run = cached()(Counter())
    with cache.at(tmp_path / "file" / "answers"):
        with pytest.warns(StoreWarning, match="can't be used"):
            assert texts(run, requests(2)) == ["answer 1", "answer 2"]
        assert texts(run, [request("q")]) == ["answer 3"]
    bridge.wait(bridge.disown(("store", str(tmp_path / "file" / "answers"))).aclose)


def test_looking_up_many_large_answers_does_not_hold_up_the_loop() -> None:
    """K17."""
    backend = Counter({i: Completion("x" * 100_000, "stop") for i in range(1, 501)})
    run, rows = cached()(backend), requests(500)
    answers(run, rows)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def work() -> list[Any]:
        turning = asyncio.create_task(turn())
        found = await last_values(run(rows), len(rows))
        turning.cancel()
        return found

    assert len(bridge.wait(work)) == len(backend.asked) == 500
    assert turns > 100  # a look-up on the loop would leave it a few


def test_an_answer_that_comes_while_it_is_looked_up_is_not_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there yet when the store was read, and is no longer under way when the look-up is over."""
    store, backend = Store(tmp_path / "own"), Counter()
    whole = store.get_many

    def slow(keys: Sequence[str]) -> dict[str, Any]:
        found = whole(keys)
        store.put(keys[0], Completion("just now", "stop"))
        return found

    monkeypatch.setattr(store, "get_many", slow)
    assert texts(cached(store)(backend), requests(2)) == ["just now", "answer 1"]
    store.close()
