"""How fast one server is asked: as fast as it bears, which is found by trying and by its own word."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection
from typing import Any, NamedTuple

from ..checks import count
from ..errors import ModelError, RateLimitError, TimedOutError, UnreachableError
from ..layers import Limit
from .counting import Counts
from .parameters import number
from .refusals import Allowance

CUT = 0.8  # what is left of a window after a sign of overload
BUSY = 0.8  # the share of a window that must be in use for it to grow
FIRST = 1.0  # seconds: the ceiling of the first wait before a retry, which doubles with every further one
CEILING = 20.0  # seconds: where the doubling ends
CREDIT = 500  # what retries may spend before they have to wait longer
THROTTLED, FAILED = 5, 14  # what a retry costs after a rate limit, and after anything else
SLOWED = 4.0  # how many times longer a retry waits that can't be paid
TRIP = 20  # failures in a row after which a server counts as out of order
REST = 1.0  # seconds before the first request that tries a server out of order; doubles up to LONGEST
LONGEST = 4.0
OUTAGE, THROTTLE = 20.0, 120.0  # seconds that a server may be out of order, or refuse by its rate limit, before all is given up
STALE = 60.0  # seconds after which a failure says nothing about the present
SPREAD = 0.25  # a wait that the server asked for is drawn out by up to this share of it, so that not all come back at once


class CrowdedError(UnreachableError):
    """This process may not open more connections."""


class Speed(NamedTuple):
    """How much may be asked: requests under way at the start and at most; requests and tokens a minute."""

    start: int
    most: int
    rpm: float | None = None
    tpm: float | None = None


class Window:
    """How many requests a server bears at once: doubles at first, then grows by one a round, and is cut once a round.

    Sources: V. Jacobson, "Congestion Avoidance and Control", 1988; D. Chiu and R. Jain, "Analysis of the Increase and
    Decrease Algorithms for Congestion Avoidance", 1989.
    """

    def __init__(self, start: int, most: int) -> None:
        self.size, self.most = float(start), most
        self.era = 0  # what was begun before the last cut says nothing about the window after it

    def grow(self, era: int) -> None:
        """Hear that a request of ``era`` was borne while the window was in use."""
        if era == self.era:
            self.size = min(self.most, self.size + (1 / self.size if self.era else 1))

    def cut(self, era: int) -> None:
        """Hear that a request of ``era`` was too much."""
        if era == self.era:
            self.era, self.size = self.era + 1, max(1.0, self.size * CUT)

    def settle(self, start: int, most: int) -> None:
        """Take other bounds. What was found by a cut holds on."""
        self.most = most
        self.size = min(self.size, most) if self.era else float(start)


class Budget:
    """What retries may spend. Every success adds to it; if it is empty they wait longer, and none fails for it."""

    def __init__(self) -> None:
        self.left = CREDIT

    def earn(self) -> None:
        """Hear of a success."""
        self.left = min(CREDIT, self.left + 1)

    def stretch(self, errors: Collection[Exception]) -> float:
        """How many times longer than otherwise a retry after ``errors`` has to wait."""
        cost = THROTTLED if all(isinstance(error, RateLimitError) for error in errors) else FAILED
        if self.left < cost:
            return SLOWED
        self.left -= cost
        return 1.0


class Bucket:
    """Lets ``rate`` units through in any minute, a tenth of them at once (the generic cell rate algorithm, ITU-T I.371)."""

    def __init__(self, rate: float) -> None:
        burst = max(1.0, rate // 10)
        self._each = 60 / (rate - burst + 1)
        self._slack = (burst - 1) * self._each
        self._booked = 0.0

    def due(self, now: float, cost: float) -> float:
        """When ``cost`` more units may go. They are booked."""
        at = max(now, self._booked - self._slack)
        self._booked = max(now, self._booked) + cost * self._each
        return at

    def book(self, cost: float) -> None:
        """Count ``cost`` units that went by."""
        self._booked += cost * self._each

    def learn(self, allowance: Allowance, now: float) -> None:
        """Take the server's word on what is left."""
        used = max(1.0, allowance.limit - allowance.left)
        self._each = allowance.reset / used
        self._slack = (allowance.limit - 1) * self._each
        self._booked = now + allowance.reset


class Breaker:
    """Spares a server that only fails: one request at a time tries it, and if all of those fail too, who waits is told.

    Where it refuses for good, as for a key, who would have to wait is told at once.
    """

    def __init__(self) -> None:
        self.streak = 0  # failures in a row
        self._since = self._next = self._last = 0.0
        self._rest, self._trying = REST, False
        self._news: asyncio.Future[ModelError | None] | None = None
        self._verdict: ModelError | None = None

    @property
    def closed(self) -> bool:
        """Whether requests go out as ever."""
        return self.streak < TRIP

    async def admit(self) -> bool:
        """Wait for leave to send; whether it is given for trying the server. Raises when all is given up."""
        loop = asyncio.get_running_loop()
        if loop.time() > self._last + STALE and not self._trying:
            self.streak = 0
        while not self.closed:
            if not self._trying and loop.time() >= self._next:
                self._trying = True
                return True
            if self._verdict is not None:
                raise given_up(self._verdict, self.streak)
            await self._heard(None if self._trying else self._next - loop.time())
        return False

    async def _heard(self, seconds: float | None) -> None:
        """Wait for news, or for some seconds."""
        self._news = self._news or asyncio.get_running_loop().create_future()
        news, _ = await asyncio.wait([self._news], timeout=seconds)
        if news and (error := news.pop().result()) is not None:
            raise error

    def succeed(self) -> None:
        """Hear that the server answered."""
        if not self.closed:
            self._tell(None)
        self.streak, self._trying = 0, False

    def fail(self, error: ModelError, trying: bool, now: float) -> None:
        """Hear that it failed. When it has for too long, all who wait are told."""
        self.streak, self._last = self.streak + 1, now
        self._verdict = error if error.hopeless else None
        if self.streak == TRIP:
            self._since, self._next, self._rest = now, now + REST, REST
        if not trying:
            return
        self._trying, self._rest = False, min(LONGEST, 2 * self._rest)
        over = now - self._since >= (THROTTLE if isinstance(error, RateLimitError) else OUTAGE)
        self._next = now if over else now + self._rest
        self._tell(given_up(error, self.streak) if over else None)

    def leave(self, trying: bool) -> None:
        """Hear that a request was cancelled, and says nothing."""
        if trying:
            self._trying = False
            self._tell(None)

    def _tell(self, error: ModelError | None) -> None:
        news, self._news = self._news, None
        if news is not None:
            news.set_result(error)


def given_up(error: ModelError, streak: int) -> ModelError:
    """What those are told who wait for a server that has failed for too long."""
    words = f"not sent, as {streak} requests in a row failed; the last: {error.args[0]}"
    told = type(error)(words, status=error.status, retry_after=error.retry_after, retryable=False, hint=error.hint)
    told.hopeless = True
    return told


def overloaded(error: ModelError) -> bool:
    """Whether an error is a sign that too much was asked at once."""
    return isinstance(error, (RateLimitError, TimedOutError, CrowdedError)) or error.status in (503, 529)


class Turn:
    """A request's leave to go out, as a context. How it ends is counted, and what the pace learns from."""

    __slots__ = ("_counts", "_era", "_pace", "_trying", "_weight")

    def __init__(self, pace: Pace, weight: float, counts: Counts) -> None:
        self._pace, self._weight, self._counts = pace, weight, counts

    async def __aenter__(self) -> None:
        pace = self._pace
        await pace.wire.__aenter__()
        try:
            self._trying = await pace.cleared(self._weight) if pace.held_up else False
        except BaseException:
            pace.wire.leave()
            raise
        self._era = pace.window.era

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        pace = self._pace
        pace.wire.leave()
        self._counts.end(error)
        if kind is None or (isinstance(error, ModelError) and not error.retryable and not error.hopeless):
            pace.succeeded(self._era)
        elif isinstance(error, ModelError):
            pace.failed(error, self._era, self._trying)
        else:
            pace.breaker.leave(self._trying)


class Pace:
    """How fast one model is asked, over all calls of the process that ask it as one customer. The library's loop owns it.

    ``calls`` bounds the calls under way, those that wait for a retry included; ``wire`` the requests really sent, as a
    call may need several.
    """

    def __init__(self, speed: Speed) -> None:
        self.window, self.budget, self.breaker = Window(speed.start, speed.most), Budget(), Breaker()
        self.calls, self.wire = Limit(speed.start), Limit(speed.start)
        self._gate = 0.0  # when the server lets us come back
        self._speed = speed
        self._given: dict[tuple[str, float], Bucket] = {}  # kept by rate: one given again is no new one
        self._buckets: dict[str, Bucket] = {}
        self._fill()

    def settle(self, speed: Speed) -> None:
        """Take other bounds: those that were given last hold."""
        if speed != self._speed:
            self._speed = speed
            self.window.settle(speed.start, speed.most)
            self._fill()
            self._resize()

    def _fill(self) -> None:
        rates = {"rpm": self._speed.rpm, "tpm": self._speed.tpm}
        given = {name: (name, rate) for name, rate in rates.items() if rate is not None}
        self._buckets = {name: self._given.setdefault(key, Bucket(key[1])) for name, key in given.items()}

    @property
    def held_up(self) -> bool:
        """Whether a request may have to wait."""
        return bool(self._buckets) or not self.breaker.closed or self._gate > 0

    @property
    def weighs(self) -> bool:
        """Whether it matters how many tokens a request has."""
        return "tpm" in self._buckets or "tokens" in self._buckets

    def turn(self, weight: float, counts: Counts) -> Turn:
        """Leave for one request of ``weight`` tokens. Waits as long as the server wants, and for its place."""
        return Turn(self, weight, counts)

    async def cleared(self, weight: float) -> bool:
        """Wait until nothing speaks against sending; whether the request tries a server that is out of order."""
        trying = await self.breaker.admit()
        try:
            for name, bucket in list(self._buckets.items()):
                due = bucket.due(asyncio.get_running_loop().time(), 1 if name in ("rpm", "requests") else weight)
                await asyncio.sleep(due - asyncio.get_running_loop().time())
            await self._opened()
        except BaseException:
            self.breaker.leave(trying)
            raise
        return trying

    async def _opened(self) -> None:
        """Wait until the server lets us come back; not everyone at once."""
        loop = asyncio.get_running_loop()
        while (wait := self._gate - loop.time()) > 0:
            await asyncio.sleep(drawn_out(wait))
        self._gate = 0.0

    def succeeded(self, era: int) -> None:
        """Hear that a request begun in ``era`` was answered."""
        self.breaker.succeed()
        self.budget.earn()
        if self.window.size < self.window.most and self.calls.held >= BUSY * self.calls.size:
            self.window.grow(era)
            self._resize()

    def failed(self, error: ModelError, era: int, trying: bool) -> None:
        """Hear that it failed in a way that may pass, or that no other would be spared."""
        now = asyncio.get_running_loop().time()
        self.breaker.fail(error, trying, now)
        if error.retryable and error.retry_after is not None:
            self._gate = max(self._gate, now + error.retry_after)
        if overloaded(error):
            self.window.cut(era)
            self._resize()

    def _resize(self) -> None:
        size = int(self.window.size)
        if size != self.calls.size:
            self.calls.resize(size)
            self.wire.resize(size)

    def hear(self, allowances: dict[str, Allowance]) -> None:
        """Take the server's word on what is left of its limits; only what is mostly used up slows us."""
        for name, allowance in allowances.items():
            if allowance.ample:
                self._buckets.pop(name, None)
            else:
                self._buckets.setdefault(name, Bucket(60.0)).learn(allowance, asyncio.get_running_loop().time())

    def weigh(self, more: float) -> None:
        """Count tokens beyond the weight that was said when a request went out."""
        for name in {"tpm", "tokens"} & set(self._buckets):
            self._buckets[name].book(more)

    def rest(self, attempt: int, errors: Collection[Exception]) -> float:
        """Seconds before the next try: what a server asked for, or full jitter under a ceiling that doubles.

        Source: M. Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015.
        """
        stretch = self.budget.stretch(errors)
        asked = [error.retry_after for error in errors if isinstance(error, ModelError) and error.retry_after is not None]
        return drawn_out(max(asked)) if asked else random.uniform(0, min(CEILING, stretch * FIRST * 2 ** (attempt - 1)))

    async def aclose(self) -> None:
        """Nothing is held beyond the process."""


def drawn_out(seconds: float) -> float:
    """A wait that the server asked for, made a little longer by lot."""
    return seconds + random.uniform(0, min(1.0, SPREAD * seconds))


def sockets() -> int:
    """How many connections this process may open: half of the files it may have open."""
    try:
        import resource
    except ImportError:
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, soft // 2) if soft > 0 else 2**20


def speed(concurrency: Any, rpm: float | None, tpm: float | None) -> Speed:
    """The bounds that a user gave, checked."""
    pair = concurrency if isinstance(concurrency, tuple) else (concurrency, concurrency)
    if len(pair) != 2:
        raise ValueError(f"concurrency={concurrency!r}; it takes a number, or two: at the start, and at most")
    start, most = (min(count("concurrency", size), sockets()) for size in pair)
    if start > most:
        raise ValueError(f"concurrency={concurrency!r}; it starts with {start}, which is more than the most, {most}")
    for name, rate in (("rpm", rpm), ("tpm", tpm)):
        if rate is not None:
            number(1)(name, rate)
    return Speed(start, most, rpm, tpm)
