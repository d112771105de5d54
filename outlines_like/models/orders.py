"""Work that a provider does in its own time, at half the price: the Batch API of OpenAI, and of those who speak it.

A row's ticket says where its answer will be. It is stored before the batch begins, so that whoever asks for the row again
fetches what was paid for, whatever became of those who asked first.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from ..errors import BadRequestError, BatchError, MalformedError, ModelError, NotFoundError, TimedOutError
from ..events import Burst, Bursts, Event, Failure, subset
from ..layers.batching import plan
from ..layers.caching import opened
from ..layers.retrying import backoff
from ..requests import Request, digest
from ..store import Store
from ..streams import interleave
from . import lines, quirks, refusals, wire
from .lines import Line, Reply, Splitter, Ticket
from .masking import bare
from .quirks import Dialect

if TYPE_CHECKING:
    from .remote import Remote

T = TypeVar("T")
FIRST, GROWTH, MOST = 1.0, 1.5, 60.0  # seconds between two looks at a batch: at first, times what, at most
LOST = 3600.0  # seconds without a sensible answer before we give up looking
WINDOW = 48 * 3600.0  # seconds: a batch is to end within 24 hours, one way or another
PAGES = 20  # of a hundred batches each, in which one that may have been made is looked for
OVER = ("completed", "failed", "expired", "cancelled")
UNREADY = ("pending", "running")  # a file that Azure has not read yet
NAME = re.compile(r"[\w.:=-]{1,200}")
ANSWERS = 2**33  # bytes of a file of answers


class Book:
    """The tickets of rows, in the store that the terms of each row name."""

    def __init__(self, requests: Sequence[Request], place: str) -> None:
        self._requests, self._place = requests, place
        self._stores: dict[str | None, Store] = {}

    async def open(self) -> Book:
        """The same, ready to be read and written."""
        folders = {request.terms.store for request in self._requests if request.terms.mode != "disabled"}
        self._stores = {folder: await opened(folder) for folder in folders}
        return self

    def _of(self, rows: Collection[int]) -> Iterator[tuple[Store, list[int]]]:
        """The stores of ``rows``, each with its rows."""
        for folder, store in self._stores.items():
            if chosen := [row for row in rows if self._requests[row].terms.store == folder and self._kept(row)]:
                yield store, chosen

    def _kept(self, row: int) -> bool:
        return self._requests[row].terms.mode != "disabled"

    def _name(self, row: int) -> str:
        return f"{self._requests[row].key}-ticket"

    def find(self) -> dict[int, Ticket]:
        """The tickets of all rows that have one. Blocks."""
        rows = [row for row, request in enumerate(self._requests) if request.terms.mode == "use"]
        found: dict[int, Ticket] = {}
        for store, chosen in self._of(rows):
            known = store.get_many([self._name(row) for row in chosen])
            found |= {row: Ticket(*known[self._name(row)]) for row in chosen if self._name(row) in known}
        return found

    def note(self, tickets: Mapping[int, Ticket]) -> None:
        """Have tickets on disk. Blocks."""
        for store, chosen in self._of(tickets):
            store.put_many((self._name(row), tuple(tickets[row])) for row in chosen)
            store.flush()

    def settle(self, tickets: Mapping[int, Ticket]) -> None:
        """Forget tickets whose rows have come to something."""
        for store, chosen in self._of(tickets):
            store.drop_many([*map(self._name, chosen), *{self._file(tickets[row].file) for row in chosen}])

    def _file(self, file: str) -> str:
        return digest(["batch", self._place, file])

    def batch(self, file: str) -> str | None:
        """The batch that was made of a file, if that is known. Blocks."""
        known = (store.get_many([self._file(file)]) for store in self._stores.values())
        return next((name for found in known for name in found.values()), None)

    def note_batch(self, file: str, batch: str) -> None:
        """Have it known that a batch was made. Blocks."""
        for store in self._stores.values():
            store.put(self._file(file), batch)
            store.flush()


class Bureau:
    """The files and batches of one account, by the wire that all its requests take."""

    def __init__(self, remote: Remote, retries: int) -> None:
        self._remote, self._retries = remote, retries

    async def _told(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> dict[str, Any]:
        """The JSON object that is answered."""
        pieces: list[bytes] = []
        await self._remote.exchange(method, path, pieces.append, body=body, kind=kind)
        return wire.decoded(b"".join(pieces), mask=self._remote.account.mask)

    async def _insisted(self, work: Callable[[], Awaitable[T]]) -> T:
        """What ``work`` gives, tried again where that may help."""
        for attempt in range(1, self._retries + 1):
            try:
                return await work()
            except ModelError as error:
                if not error.retryable:
                    raise
                self._remote.counts.retried += 1
                await asyncio.sleep(backoff(attempt, [error]))
        return await work()

    async def upload(self, kind: str, body: bytes) -> str:
        """Send a file; its name, once it may be used."""
        told = await self._insisted(lambda: self._told("POST", "/files", body, kind))
        if told.get("status") in UNREADY:
            await self._waited(f"/files/{named(told)}", lambda status: status not in UNREADY)
        return named(told)

    async def batch(self, file: str, *, fresh: bool) -> str:
        """Have a batch made of ``file``, unless that was done before; its name."""
        doubts = [] if fresh else [True]

        async def made() -> str:
            if doubts and (found := await self._search(file)):
                return found
            doubts.append(True)  # an error may come after the deed
            sent = {"input_file_id": file, "endpoint": self._remote.account.route, "completion_window": "24h"}
            return named(await self._told("POST", "/batches", msgspec.json.encode(sent)))

        return await self._insisted(made)

    async def _search(self, file: str) -> str | None:
        """The batch that was made of ``file``."""
        after = ""
        for _ in range(PAGES):
            try:
                page = await self._told("GET", f"/batches?limit=100{after}")
            except NotFoundError:
                return None  # a server that keeps no list
            told = page.get("data")
            batches = [batch for batch in told if isinstance(batch, dict)] if isinstance(told, list) else []
            if found := next((batch for batch in batches if batch.get("input_file_id") == file), None):
                return named(found)
            if not batches or not page.get("has_more"):
                return None
            after = f"&after={named(batches[-1])}"
        return None

    async def ended(self, batch: str) -> dict[str, Any]:
        """What became of a batch, when it is over."""
        return await self._waited(f"/batches/{batch}", OVER.__contains__)

    async def _waited(self, path: str, over: Callable[[object], bool]) -> dict[str, Any]:
        """What is told of a thing once its status is ``over``. Looked for ever less often."""
        clock, pause = asyncio.get_running_loop().time, FIRST
        begun = heard = clock()
        while clock() < begun + WINDOW:
            try:
                told, heard = await self._told("GET", path), clock()
                if over(told.get("status")):
                    return told
            except ModelError as error:
                if not error.retryable or clock() > heard + LOST:
                    raise
                pause = max(pause, error.retry_after or 0.0)
            await asyncio.sleep(pause * random.uniform(0.8, 1.0))
            pause = min(MOST, pause * GROWTH)
        raise TimedOutError(f"{path[1:]} did not end within {WINDOW / 3600:.0f} hours")

    async def read(self, file: str, hear: Callable[[Reply], object]) -> None:
        """Let ``hear`` have what the lines of a file of answers say; some of them twice if the connection breaks."""

        async def reading() -> None:
            splitter = Splitter()

            def feed(found: list[bytes]) -> None:
                for line in found:
                    if told := lines.reply(line):
                        hear(told)

            path = f"/files/{file}/content"
            await self._remote.exchange("GET", path, lambda piece: feed(splitter.feed(piece)), limit=ANSWERS)
            feed(splitter.finish())

        await self._insisted(reading)


def named(thing: Mapping[str, Any], field: str = "id") -> str:
    """The name that a server gave a thing."""
    name = thing.get(field)
    if isinstance(name, str) and NAME.fullmatch(name):
        return name
    raise MalformedError(f"the server made a {thing.get('object', 'thing')!r:.20} without a usable {field}", retryable=False)


class Hearing:
    """What the files of a batch hold for some rows."""

    def __init__(self, trip: Trip, tickets: Mapping[int, Ticket]) -> None:
        self._trip = trip
        self._lines: dict[str, list[tuple[int, Ticket]]] = {}
        self.outcomes: dict[int, wire.Outcome] = {}
        self.spoken: set[int] = set()  # rows on whose line there was an answer, if not for all of them
        for row, ticket in tickets.items():
            self._lines.setdefault(ticket.line, []).append((row, ticket))

    def hear(self, told: Reply) -> None:
        """Take what is said about some of the rows."""
        if asked := self._lines.pop(told.name, None):
            rows = [row for row, _ in asked]
            try:
                found = self._trip.outcomes(told, rows, asked[0][1].choices)
            except ModelError as error:
                found = [Failure(error)] * asked[0][1].choices
            self.spoken.update(rows)
            self.outcomes |= {row: found[ticket.choice] for row, ticket in asked if ticket.choice < len(found)}


class Trip:
    """The rows of one call: those that were ordered before are fetched, the others ordered and fetched."""

    def __init__(self, remote: Remote, bureau: Bureau, requests: Sequence[Request], book: Book) -> None:
        self._remote, self._bureau, self._requests, self._book = remote, bureau, requests, book
        self._dialect = remote.dialect(requests[0].model)
        self._orders: dict[str, dict[int, Ticket]] = {}  # by file
        self._batches: dict[str, str] = {}  # by file
        self._old: set[str] = set()
        self.left: set[int] = set()  # rows that need another batch

    async def run(self) -> Bursts:
        """The answers, batch by batch as they end."""
        for row, ticket in (await asyncio.to_thread(self._book.find)).items():
            self._orders.setdefault(ticket.file, {})[row] = ticket
        self._old = set(self._orders)
        ordered = {row for tickets in self._orders.values() for row in tickets}
        async for burst in self._order([row for row in range(len(self._requests)) if row not in ordered]):
            yield burst
        files = list(self._orders)
        async with aclosing(interleave(self._fetched, files, max(1, len(files)))) as bursts:
            async for burst in bursts:
                yield burst

    async def _order(self, rows: Sequence[int]) -> AsyncIterator[Burst]:
        """Order ``rows``; the failures of those for which that was not to be."""
        parcels = lines.parcels(self._lines(rows))
        while parcel := await asyncio.to_thread(next, parcels, None):
            tickets: dict[int, Ticket] = {}
            try:
                file = await self._bureau.upload(*await asyncio.to_thread(lines.form, parcel))
                tickets = {row: ticket for line in parcel for row, ticket in line.tickets(file).items()}
                await asyncio.to_thread(self._book.note, tickets)
                await self._batch(file)
                self._orders[file] = tickets
            except ModelError as error:
                yield self._failed([row for line in parcel for row in line.rows], tickets, error)

    async def _batch(self, file: str) -> str:
        """The batch made of a file: now, or before."""
        if known := self._batches.get(file) or await asyncio.to_thread(self._book.batch, file):
            return known
        batch = await self._bureau.batch(file, fresh=file not in self._old)
        self._batches[file] = batch
        await asyncio.to_thread(self._book.note_batch, file, batch)
        return batch

    def _failed(self, rows: Iterable[int], tickets: Mapping[int, Ticket], error: ModelError) -> Burst:
        """The failure of ``rows``. Their tickets are kept unless there is nothing that they could lead to."""
        if isinstance(error, (NotFoundError, BadRequestError)):
            self._book.settle(tickets)
        return [Event(row, bare(Failure(error))) for row in rows]

    def _lines(self, rows: Sequence[int]) -> Iterator[Line]:
        """What is written for ``rows``: those that differ in the sample number alone share a line."""
        requests, url = [self._requests[row] for row in rows], self._remote.account.route
        for group in plan(requests, None, self._remote.company):
            first = requests[group[0]]
            name = digest(first.key)
            yield Line(name, [rows[k] for k in group], lines.written(name, url, self._body(first, len(group))))

    def _body(self, request: Request, choices: int) -> dict[str, Any]:
        endpoint, prefill = self._remote.endpoint, self._remote.settings.prefill
        return quirks.body(request, choices, self._dialect, endpoint=endpoint, live=False, prefill=prefill)

    async def _fetched(self, file: str) -> Bursts:
        """The answers to one file. What was ordered long ago and is gone since is ordered again."""
        tickets, old = self._orders[file], file in self._old
        try:
            outcomes = await self._outcomes(file, tickets)
        except ModelError as error:
            failed = self._failed(tickets, tickets, error)
            if isinstance(error, NotFoundError) and old:
                self.left |= set(tickets)
            else:
                yield failed
            return
        yield [Event(row, bare(outcome)) for row, outcome in outcomes.items() if row not in self.left]
        self._book.settle(tickets)  # after the answers, which are on their way into the store by now

    async def _outcomes(self, file: str, tickets: Mapping[int, Ticket]) -> dict[int, wire.Outcome]:
        """What became of the rows of one file."""
        end = await self._bureau.ended(await self._batch(file))
        hearing = Hearing(self, tickets)
        for field in ("output_file_id", "error_file_id"):
            if end.get(field):
                await self._bureau.read(named(end, field), hearing.hear)
        self.left |= hearing.spoken - set(hearing.outcomes)
        why = Failure(unanswered(end, self._remote.account.mask))
        return {row: hearing.outcomes.get(row, why) for row in tickets}

    def outcomes(self, told: Reply, rows: Sequence[int], choices: int) -> list[wire.Outcome]:
        """What the choices on a line came to. What teaches how to write a request is learnt, and nothing said yet."""
        request, dialect, mask = self._requests[rows[0]], self._dialect, self._remote.account.mask
        if told.status in (400, 422):
            known = quirks.learnt(dialect, told.said, self._body(request, choices))
            if known != dialect:
                self._remote.learn(request.model, known)
                return []
        self._remote.counts.spend(told.usage)
        found = told.outcomes(choices, request.params.get("stop", ()), mask, time.time())
        if len(found) < choices:
            self._remote.learn(request.model, Dialect(choices=max(1, len(found))))
        return found


def unanswered(end: Mapping[str, Any], mask: refusals.Mask) -> ModelError:
    """Why a batch that is over holds no answer for a row."""
    name, status = end.get("id"), end.get("status")
    if status == "failed":
        return BatchError(f"batch {name} was refused: {refusals.excerpt(reasons(end), mask) or 'no reason was given'}")
    if status == "completed":
        return BatchError(f"batch {name} is completed but holds no answer for this row")
    return BatchError(f"batch {name} was {status} before this row was reached")


def reasons(end: Mapping[str, Any]) -> str:
    """What a server says of a batch that it did not take."""
    errors = end.get("errors")
    told = errors.get("data") if isinstance(errors, dict) else errors
    return "; ".join(dict.fromkeys(refusals.said_in(error).text for error in told[:9])) if isinstance(told, list) else ""


class Orders:
    """An OpenAI-compatible endpoint as a backend that is asked by batches."""

    def __init__(self, remote: Remote, retries: int) -> None:
        self._remote, self._bureau = remote, Bureau(remote, retries)

    async def run(self, requests: Sequence[Request]) -> Bursts:
        """Answer ``requests``. Who leaves early leaves the batches to go on: they are paid for, and found when asked again."""
        book = await Book(requests, self._remote.account.place).open()
        trip = Trip(self._remote, self._bureau, requests, book)
        async with aclosing(trip.run()) as bursts:
            async for burst in bursts:
                yield burst
        if trip.left:
            async with aclosing(subset(self.run, requests, sorted(trip.left))) as bursts:
                async for burst in bursts:
                    yield burst
