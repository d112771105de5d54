"""How fast a server is asked: the limit that finds itself, budgets, buckets and the breaker, on a clock of their own."""

from __future__ import annotations

import asyncio
import heapq
import random
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlines_like import Completion, Event, Failure, batched, limited, retried
from outlines_like.errors import AuthenticationError, ModelError, QuotaError, RateLimitError, ServerError, UnreachableError
from outlines_like.events import Bursts, Elementwise, last_values, stack
from outlines_like.layers import halted
from outlines_like.models import pacing
from outlines_like.models.counting import Counts
from outlines_like.models.pacing import Bucket, Budget, Pace, Speed, Window, given_up, speed
from outlines_like.models.refusals import Allowance, allowances

from .virtual import virtually

long = pytest.mark.long
MEAN = 1.046  # of the provider's times


class Provider:
    """A server in virtual time that bears ``most`` requests at once, ``later`` from the middle on, and takes about a second."""

    def __init__(self, most: float, *, later: float | None = None, calls: int = 0, seed: int = 0, fixed: bool = False) -> None:
        self.most, self.later, self.middle = most, later, calls // 2
        self.busy = self.peak = self.refused = self.served = 0
        self.random = random.Random(seed)
        self.times: list[float] = []

    async def serve(self) -> None:
        self.times.append(asyncio.get_running_loop().time())
        most = self.later if self.later is not None and self.served >= self.middle else self.most
        if self.busy >= most:
            self.refused += 1
            await asyncio.sleep(0.02)
            raise RateLimitError("slow down", status=429)
        self.busy += 1
        self.peak = max(self.peak, self.busy)
        try:
            await asyncio.sleep(self.random.lognormvariate(0, 0.3))
        finally:
            self.busy -= 1
        self.served += 1


def asking(pace: Pace, serve: Any, *, attempts: int = 50, most: int = 1024) -> Elementwise:
    """The layers of a remote model round a provider."""

    async def run(rows: Sequence[Any]) -> Bursts:
        try:
            async with pace.turn(0.0, Counts()):
                await serve()
            yield [Event(0, "answer")]
        except ModelError as error:
            yield [Event(0, Failure(error))]

    return stack(run, retried(attempts, wait=pace.rest), limited(pace.calls), batched(1, concurrency=most), halted)


def mapped(pace: Pace, serve: Any, calls: int, **settings: Any) -> tuple[list[Any], float]:
    """The answers to ``calls`` rows, and when the last was there."""

    async def work() -> tuple[list[Any], float]:
        values = await last_values(asking(pace, serve, **settings)(range(calls)), calls)
        return values, asyncio.get_running_loop().time()

    result: tuple[list[Any], float] = virtually(work())
    return result


# The window

SCENARIOS = {"8": (8, None, 30, 1.2), "64": (64, None, 2, 1.2), "256": (256, None, 2, 1.5), "256 to 32": (256, 32, 30, 1.5)}


@pytest.mark.parametrize(
    ("seed", "calls"), [(0, 2500), *(pytest.param(seed, 5000, marks=long) for seed in range(5))], ids=lambda value: str(value)
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_limit_of_a_server_is_found_and_few_requests_are_wasted(name: str, seed: int, calls: int) -> None:
    """R6: what is refused, in 100 calls; the time, against one who knew the limit; and nobody starves."""
    most, later, wasted, slower = SCENARIOS[name]
    random.seed(seed)
    provider = Provider(most, later=later, calls=calls, seed=seed)
    values, took = mapped(Pace(Speed(64, 1024)), provider.serve, calls)
    assert values == ["answer"] * calls
    assert provider.refused <= wasted * calls / 100
    ideal = calls * MEAN / most if later is None else calls / 2 * MEAN / most + calls / 2 * MEAN / later
    assert took <= slower * ideal * (1.25 if calls < 5000 else 1)  # the ramp weighs more in a short run


def test_the_limit_grows_only_while_it_is_used() -> None:
    provider, pace = Provider(1000), Pace(Speed(8, 64))
    mapped(pace, provider.serve, 200, most=4)
    assert (pace.window.size, provider.peak) == (8, 4)
    mapped(pace, provider.serve, 400, most=64)
    assert pace.window.size > 32


def test_a_window_that_was_cut_to_almost_nothing_opens_again() -> None:
    """Also from between one and two, where only one request is under way."""
    provider, pace = Provider(1000), Pace(Speed(8, 8))
    for era in range(6):
        pace.window.cut(era)
    assert 2 < pace.window.size < 3
    pace.window.cut(6)
    assert 1 < pace.window.size < 2
    mapped(pace, provider.serve, 200)
    assert pace.window.size == 8


def test_a_fixed_limit_is_never_passed() -> None:
    provider = Provider(1000)
    mapped(Pace(Speed(16, 16)), provider.serve, 200)
    assert provider.peak == 16


def test_a_window_is_cut_once_for_all_that_was_under_way() -> None:
    window = Window(64, 256)
    for _ in range(64):
        window.cut(0)
    assert window.size == pytest.approx(64 * pacing.CUT)
    window.grow(0)  # what was begun before says nothing
    assert window.size == pytest.approx(64 * pacing.CUT)
    window.cut(1)
    assert window.size == pytest.approx(64 * pacing.CUT**2)


def test_a_window_doubles_in_a_round_and_after_a_cut_grows_by_one() -> None:
    window = Window(8, 64)
    for _ in range(8):
        window.grow(0)
    assert window.size == 16
    window.cut(0)
    before = window.size
    for _ in range(round(before)):
        window.grow(1)
    assert window.size == pytest.approx(before + 1, abs=0.1)
    for _ in range(10_000):
        window.grow(1)
    assert window.size == 64


def test_a_window_never_closes_and_keeps_what_it_found() -> None:
    window = Window(4, 8)
    for era in range(100):
        window.cut(era)
    assert window.size == 1
    window.settle(16, 32)
    assert (window.size, window.most) == (1, 32)


@pytest.mark.parametrize("calls", [1000])
def test_a_long_tail_of_times_is_scheduled_as_well_as_can_be(calls: int) -> None:
    """1,000 requests at a lognormal 400 ms, 256 at a time, against the ideal schedule."""
    dice = random.Random(3)
    times = [0.4 * dice.lognormvariate(-0.125, 0.5) for _ in range(calls)]
    left = iter(times)

    async def serve() -> None:
        await asyncio.sleep(next(left))

    _, took = mapped(Pace(Speed(256, 256)), serve, calls)
    assert took <= 1.001 * schedule(times, 256)


def schedule(times: Sequence[float], places: int) -> float:
    """When the last of some jobs ends that are begun in order, each in the first free place."""
    ends = [0.0] * places
    for time in times:
        heapq.heapreplace(ends, ends[0] + time)
    return max(ends)


# Retries


def test_first_retries_are_spread_evenly() -> None:
    """R2: 1,000 clients that fail at once. Kolmogorov and Smirnov's bound for p = 0.01 is 1.63 over the root of n."""
    random.seed(5)
    waits = np.sort([Pace(Speed(1, 1)).rest(1, [ServerError("x")]) for _ in range(1000)])
    assert np.histogram(waits, 10, (0, pacing.FIRST))[0].max() <= 2 * 100
    steps = np.arange(1001) / 1000
    assert max(np.abs(waits - steps[1:]).max(), np.abs(waits - steps[:-1]).max()) < 1.63 / 1000**0.5


@pytest.mark.parametrize("attempt", range(1, 9))
def test_waits_double_up_to_a_ceiling(attempt: int) -> None:
    waits = [Pace(Speed(1, 1)).rest(attempt, [ServerError("x")]) for _ in range(200)]
    ceiling = min(pacing.CEILING, pacing.FIRST * 2 ** (attempt - 1))
    assert 0 <= min(waits) <= max(waits) <= ceiling
    assert max(waits) > 0.9 * ceiling


def test_a_wait_that_was_asked_for_is_kept_and_drawn_out_a_little() -> None:
    waits = [Pace(Speed(1, 1)).rest(1, [RateLimitError("x", retry_after=8.0), ServerError("y")]) for _ in range(200)]
    assert 8 <= min(waits) <= max(waits) <= 9
    assert max(waits) - min(waits) > 0.5


def test_an_empty_budget_slows_retries_and_fails_none() -> None:
    """R3: after 100 retries of rate limits, or 35 of other faults, the next wait longer, until there are successes."""
    for error, free in ((RateLimitError("x"), 100), (ServerError("x"), 35)):
        budget = Budget()
        assert [budget.stretch([error]) for _ in range(free + 5)] == [1.0] * free + [pacing.SLOWED] * 5
        for _ in range(pacing.FAILED):
            budget.earn()
        assert budget.stretch([error]) == 1.0


# The breaker


def dead(times: list[float], ok: Any = lambda now: False) -> Any:
    """A server that is out of order whenever not ``ok``."""

    async def serve() -> None:
        times.append(now := asyncio.get_running_loop().time())
        await asyncio.sleep(0.001)
        if not ok(now):
            raise UnreachableError("nothing listens")

    return serve


def test_a_dead_endpoint_costs_few_requests_and_half_a_minute_at_most() -> None:
    """R3: 10,000 calls, at most 100 requests, an error for each row in less than 30 s."""
    times: list[float] = []
    values, took = mapped(Pace(Speed(64, 256)), dead(times), 10_000, attempts=5)
    assert all(isinstance(value, Failure) and type(value.error) is UnreachableError for value in values)
    assert len(times) <= 100
    assert took < 30
    assert sum("not sent" in str(value.error) for value in values) > 9000


def test_a_call_after_an_outage_is_tried_at_once() -> None:
    async def story() -> tuple[list[Any], float, list[Any], float]:
        times: list[float] = []
        pace, loop = Pace(Speed(64, 256)), asyncio.get_running_loop()
        run = asking(pace, dead(times, lambda now: bool(mended)), attempts=5)
        mended: list[bool] = []
        await last_values(run(range(1000)), 1000)
        begun, sent = loop.time(), len(times)
        still = await last_values(run(range(1000)), 1000)
        between, more = loop.time() - begun, len(times) - sent
        mended.append(True)
        begun = loop.time()
        after = await last_values(run(range(1000)), 1000)
        assert more <= 5
        return still, between, after, loop.time() - begun

    still, between, after, took = virtually(story())
    assert all(isinstance(value, Failure) for value in still)
    assert between < 1
    assert after == ["answer"] * 1000
    assert took < 1


@pytest.mark.parametrize("outage", [3, 12])
def test_an_outage_in_the_middle_of_a_map_fails_no_row(outage: int) -> None:
    """A server that restarts: every row is answered, and it is tried gently meanwhile."""
    times: list[float] = []
    answer = dead(times, lambda now: not 1 <= now < 1 + outage)

    async def serve() -> None:
        await answer()
        await asyncio.sleep(0.1)

    values, _ = mapped(Pace(Speed(64, 64)), serve, 2000, attempts=5)
    assert values == ["answer"] * 2000
    assert sum(1 <= time < 1 + outage for time in times) <= 64 + 10


def test_one_who_leaves_while_trying_lets_another_try() -> None:
    async def story() -> list[Any]:
        pace, up = Pace(Speed(64, 64)), asyncio.Event()

        async def serve() -> None:
            if not up.is_set():
                raise UnreachableError("down")

        await last_values(asking(pace, serve, attempts=1)(range(40)), 40)

        async def hang() -> None:
            await asyncio.Event().wait()

        trying = asyncio.ensure_future(last_values(asking(pace, hang, attempts=1)(range(1)), 1))
        await asyncio.sleep(2)
        up.set()
        others = asyncio.ensure_future(last_values(asking(pace, serve, attempts=5)(range(5)), 5))
        await asyncio.sleep(1)
        assert not others.done()
        trying.cancel()
        return await others

    assert virtually(story()) == ["answer"] * 5


def test_what_is_told_of_a_server_given_up_says_what_it_was() -> None:
    error = given_up(ServerError("the server failed", status=500), 25)
    assert str(error) == "not sent, as 25 requests in a row failed; the last: the server failed (status 500)"
    assert (error.hopeless, error.retryable, type(error)) == (True, False, ServerError)


# Gates and buckets


def test_a_wait_that_a_server_asks_for_holds_for_all() -> None:
    """No other request goes out before, and they do not all come back in one moment, whatever the draws."""
    moments = []
    for seed in range(20):
        random.seed(seed)
        times: list[float] = []

        async def serve(times: list[float] = times) -> None:
            times.append(asyncio.get_running_loop().time())
            number = len(times)
            await asyncio.sleep(0.1)
            if number == 30:
                raise RateLimitError("wait", status=429, retry_after=4.0)

        values, _ = mapped(Pace(Speed(8, 8)), serve, 200)
        assert values == ["answer"] * 200
        gap = max(after - before for before, after in pairwise(times))
        assert gap >= 4.0 - 0.1
        back = [time for time in times if time > times[29] + 0.2]
        assert min(back) >= times[29] + 4.1
        moments.append(len({round(time, 2) for time in back[:8]}))
    assert min(moments) > 1
    assert statistics.median(moments) > 4


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), st.lists(st.floats(0, 20), min_size=1, max_size=200))
def test_in_any_minute_no_more_goes_out_than_the_rate(rate: int, gaps: list[float]) -> None:
    bucket, now, out = Bucket(rate), 0.0, []
    for gap in gaps:
        now += gap
        out.append(bucket.due(now, 1))
    assert all(after - before >= 60 - 1e-6 for before, after in zip(out, out[rate:], strict=False))
    assert all(before <= after for before, after in pairwise(out))


def test_a_rate_is_kept_to_by_all_who_share_it() -> None:
    times: list[float] = []
    mapped(Pace(Speed(64, 64, rpm=60)), dead(times, lambda now: True), 150)
    assert all(after - before >= 60 - 1e-6 for before, after in zip(times, times[60:], strict=False))
    assert times[-1] < 200


def test_what_a_server_says_is_left_is_what_goes_out() -> None:
    bucket = Bucket(1)
    bucket.learn(Allowance(100, 3, 60), now=1000)
    due = [bucket.due(1000, 1) for _ in range(5)]
    assert due[:3] == pytest.approx([1000] * 3)
    assert due[3] == pytest.approx(1000 + 60 / 97)
    assert due[4] == pytest.approx(1000 + 2 * 60 / 97)


def test_limits_that_are_hardly_used_slow_nobody() -> None:
    async def story() -> list[bool]:
        pace = Pace(Speed(4, 4))
        seen = []
        for left in (90, 10, 90):
            pace.hear({"requests": Allowance(100, left, 60)})
            seen.append(pace.held_up)
        return seen

    assert virtually(story()) == [False, True, False]


def test_headers_on_limits_are_read() -> None:
    told = {"x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "12", "x-ratelimit-reset-requests": "1m6s"}
    assert allowances(told, 0) == {"requests": Allowance(60, 12, 66)}
    tokens = {name.replace("requests", "tokens"): value for name, value in told.items()}
    assert set(allowances({**told, **tokens}, 0)) == {"requests", "tokens"}
    for name, nonsense in (("limit", "x"), ("limit", "-1"), ("remaining", "99"), ("remaining", "nan"), ("reset", "soon")):
        assert allowances({**told, f"x-ratelimit-{name}-requests": nonsense}, 0) == {}


def test_tokens_are_booked_as_they_were_used() -> None:
    async def story() -> float:
        pace = Pace(Speed(4, 4, tpm=6000))
        assert pace.weighs
        async with pace.turn(100, Counts()):
            pass
        pace.weigh(6000 - 100)
        await pace.cleared(100)
        return asyncio.get_running_loop().time()

    assert 50 < virtually(story()) < 70


@pytest.mark.parametrize(
    ("given", "words"),
    [((8, 4), "more than the most"), ((1, 2, 3), "a number, or two"), (0, "at least 1"), ("many", "whole number")],
)
def test_bounds_that_say_nothing_are_refused(given: Any, words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        speed(given, None, None)


@pytest.mark.parametrize("rates", [(0, None), (None, -5), (float("nan"), None)])
def test_rates_that_let_nothing_through_are_refused(rates: Any) -> None:
    with pytest.raises(ValueError, match=r"[rt]pm"):
        speed(4, *rates)


def test_other_bounds_hold_from_the_next_call_on() -> None:
    async def story() -> None:
        pace = Pace(Speed(4, 4))
        pace.settle(Speed(16, 32))
        assert (pace.calls.size, pace.wire.size) == (16, 16)
        pace.settle(Speed(2, 2, rpm=60))
        assert (pace.calls.size, pace.held_up) == (2, True)
        pace.settle(Speed(2, 2))
        assert not pace.held_up

    virtually(story())


# Halting


@pytest.mark.parametrize("error", [AuthenticationError("bad key", status=401), QuotaError("used up", status=429)])
def test_a_key_that_is_refused_or_used_up_ends_the_whole_call(error: ModelError) -> None:
    sent: list[int] = []

    async def serve() -> None:
        sent.append(1)
        await asyncio.sleep(0.01)
        raise error

    values, _ = mapped(Pace(Speed(16, 16)), serve, 10_000)
    assert len(sent) == 16
    assert {type(value.error) for value in values} == {type(error)}
    assert sum("not sent, as another request failed" in str(value.error) for value in values) >= 10_000 - 16
    assert {value.error.hint for value in values} == {error.hint}


def test_an_ordinary_failure_ends_nothing() -> None:
    async def run(rows: Sequence[Any]) -> Bursts:
        yield [Event(0, Failure(ServerError("x")))]
        yield [Event(1, Completion("B", "stop"))]

    values = virtually(last_values(halted(run)("ab"), 2))
    assert isinstance(values[0], Failure)
    assert values[1].text == "B"
