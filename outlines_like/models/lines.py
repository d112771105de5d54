"""The files of a Batch API: requests and answers, a JSON object on each line. Pure: values in, bytes out, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..errors import BatchError, ModelError
from ..requests import Usage, digest
from . import refusals, wire
from .refusals import Mask, Said

MOST_LINES, MOST_BYTES = 50_000, 200_000_000  # in one file, as the format has it
UNREACHED = ("batch_expired", "batch_cancelled")


class Ticket(NamedTuple):
    """Where a row's answer will be: which of the choices on which line of the answers to which file."""

    file: str
    line: str
    choice: int
    choices: int


class Line(NamedTuple):
    """A request for some rows, as it is written: the k-th choice of its answer is for the k-th row."""

    name: str
    rows: Sequence[int]
    data: bytes

    def tickets(self, file: str) -> dict[int, Ticket]:
        """Where the answers of its rows will be, once it is in ``file``."""
        return {row: Ticket(file, self.name, k, len(self.rows)) for k, row in enumerate(self.rows)}


def written(name: str, url: str, body: Mapping[str, Any]) -> bytes:
    """One request as a line."""
    return msgspec.json.encode({"custom_id": name, "method": "POST", "url": url, "body": body}) + b"\n"


def parcels(lines: Iterable[Line], most_lines: int = MOST_LINES, most_bytes: int = MOST_BYTES) -> Iterator[list[Line]]:
    """Lines by the file, none of which is larger than it may be.

    >>> [len(parcel) for parcel in parcels([Line("", [0], b"four")] * 5, 3, 8)]
    [2, 2, 1]
    """
    parcel: list[Line] = []
    size = 0
    for line in lines:
        if parcel and (len(parcel) == most_lines or size + len(line.data) > most_bytes):
            yield parcel
            parcel, size = [], 0
        parcel.append(line)
        size += len(line.data)
    if parcel:
        yield parcel


def form(parcel: Iterable[Line]) -> tuple[str, bytes]:
    """A file of lines as a form to be sent (RFC 7578): its content type and its bytes."""
    parts = [line.data for line in parcel]
    boundary = digest([len(parts), *map(len, parts[:9])])
    while any(boundary.encode() in part for part in parts):
        boundary = digest(boundary)
    purpose = f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    head = 'Content-Disposition: form-data; name="file"; filename="rows.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n'
    start, end = f"{purpose}--{boundary}\r\n{head}", f"\r\n--{boundary}--\r\n"
    return f"multipart/form-data; boundary={boundary}", b"".join([start.encode(), *parts, end.encode()])


class Splitter:
    """Cuts bytes that come in pieces into lines."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that ``piece`` completes."""
        *whole, last = piece.split(b"\n")
        if whole:
            whole[0], self._rest = b"".join([*self._rest, whole[0]]), []
        self._rest.append(last)
        if sum(map(len, self._rest)) > wire.LIMIT:
            raise wire.TooLargeError("a line of the batch's answers is larger than the limit for one answer")
        return whole

    def finish(self) -> list[bytes]:
        """A last line without its end."""
        return self.feed(b"\n")


class Reply(NamedTuple):
    """What one line of the answers says: the name of the request, and status, body and error of its answer."""

    name: str
    status: int = 0
    body: Any = None
    fault: Any = None
    headers: Mapping[str, str] = {}

    def outcomes(self, count: int, stops: Sequence[str], mask: Mask, now: float) -> list[wire.Outcome]:
        """The outcomes of ``count`` choices; a ModelError if there are none."""
        if self.status != 200 or self.fault:
            raise self._error(mask, now)

        def refuse(answer: Any) -> ModelError:
            return refusals.inner_refusal(answer, self.headers, mask=mask, now=now)

        return wire.answers(wire.decoded(msgspec.json.encode(self.body), mask=mask), count, stops, refuse)

    @property
    def usage(self) -> Usage:
        """The tokens that it says it took."""
        return wire.usage_of(self.body) if isinstance(self.body, dict) else Usage()

    @property
    def said(self) -> Said:
        """What it says is wrong."""
        return refusals.said_in(self.fault or self.body)

    def _error(self, mask: Mask, now: float) -> ModelError:
        if self.said.code in UNREACHED:
            return BatchError(f"the batch ended before this row was reached: {refusals.excerpt(self.said.text, mask)}")
        status = self.status if self.status >= 300 else refusals.inner_status(self.said)
        return refusals.refusal(status, self.headers, self.said, mask=mask, now=now)


def reply(line: bytes) -> Reply | None:
    """A line of the answers, if it is one.

    >>> reply(b'{"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": null}')
    Reply(name='a', status=200, body={}, fault=None, headers={})
    """
    try:
        told = msgspec.json.decode(line)
    except wire.BAD_JSON:
        return None
    if not isinstance(told, dict) or not isinstance(told.get("custom_id"), str):
        return None
    answered = told.get("response")
    response = answered if isinstance(answered, dict) else {}
    status, known = response.get("status_code"), response.get("request_id")
    headers = {"x-request-id": known} if isinstance(known, str) else {}
    return Reply(told["custom_id"], status if isinstance(status, int) else 0, response.get("body"), told.get("error"), headers)
