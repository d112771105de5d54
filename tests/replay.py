"""A server on loopback that replays raw HTTP answers, so that a client can be tried on every fault that bytes can hold.

Each case is a path of its own: ``replay.url("A01")`` is the base_url of case A01, whose k-th request gets the k-th step
(the last one for ever after). A rule whose text occurs in the body of the request goes first.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data" / "http"


@dataclass(frozen=True)
class Step:
    """One answer: its bytes, how they are cut, and what happens to the connection.

    ``end``: "keep" the connection, "close" it, "reset" it, "hang" until the client goes, "abort" before answering.
    """

    data: bytes = b""
    every: int = 0
    delay: float = 0.0
    wait: float = 0.0
    end: str = "keep"

    def pieces(self) -> list[bytes]:
        size = self.every or len(self.data) or 1
        return [self.data[i : i + size] for i in range(0, len(self.data), size)]


@dataclass
class Arrival:
    """A request as it came, and what became of it."""

    time: float
    head: str
    body: bytes
    gone: threading.Event = field(default_factory=threading.Event)  # set when the client closed the connection first
    gone_at: float = 0.0
    sent_at: float = 0.0  # when all of the answer was written

    @cached_property
    def json(self) -> Any:
        return json.loads(self.body)

    @cached_property
    def headers(self) -> dict[str, str]:
        lines = [line.partition(":") for line in self.head.split("\r\n")[1:] if line]
        return {name.lower(): value.strip() for name, _, value in lines}

    @property
    def path(self) -> str:
        return self.head.split(" ")[1]


Answer = Callable[[Arrival], Step]


@dataclass
class Case:
    steps: Sequence[Step | Answer]
    rules: Sequence[tuple[bytes, Sequence[Step]]] = ()
    counts: dict[Any, int] = field(default_factory=dict)
    log: list[Arrival] = field(default_factory=list)

    def pick(self, arrival: Arrival) -> Step:
        key, steps = next(((text, steps) for text, steps in self.rules if text in arrival.body), (b"", self.steps))
        k = self.counts[key] = self.counts.get(key, -1) + 1
        step = steps[min(k, len(steps) - 1)]
        return step if isinstance(step, Step) else step(arrival)


def respond(body: bytes | str | dict[str, Any], status: str = "200 OK", *headers: str, **step: Any) -> Step:
    """A whole answer. A dict is written as JSON."""
    content = json.dumps(body).encode() if isinstance(body, dict) else body.encode() if isinstance(body, str) else body
    head = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(content)}"]
    head.insert(1, "Content-Type: application/json") if not any(h.lower().startswith("content-type") for h in headers) else None
    return Step("\r\n".join(head).encode() + b"\r\n\r\n" + content, **step)


def choices(*texts: str | None, finish: str = "stop", **more: Any) -> dict[str, Any]:
    """The JSON of a chat completion."""
    told = [
        {"index": i, "message": {"role": "assistant", "content": text}, "finish_reason": finish} for i, text in enumerate(texts)
    ]
    return {"id": "x", "choices": told, "usage": {"prompt_tokens": 3, "completion_tokens": 2}, **more}


def events(*datas: dict[str, Any] | str, end: str = "\n\n") -> bytes:
    """Server-sent events."""
    return "".join(
        f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}{end}" for data in datas
    ).encode()


def piece(text: str | None, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    """The JSON of one chunk of a streamed chat completion."""
    return {"choices": [{"index": index, "delta": {} if text is None else {"content": text}, "finish_reason": finish}]}


def streamed(body: bytes, *, chunked: bool = True, **step: Any) -> Step:
    """A streamed answer, which ends with a last chunk or with the connection."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    if not chunked:
        return Step(head + b"Connection: close\r\n\r\n" + body, **{"end": "close", **step})
    parts = [body[i : i + 100] for i in range(0, len(body), 100)]
    framed = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in [*parts, b""])
    return Step(head + b"Transfer-Encoding: chunked\r\n\r\n" + framed, **step)


class Replay:
    """The server, in a thread with a loop of its own."""

    def __init__(self) -> None:
        self.cases: dict[str, Case] = {}
        self.open_now = self.open_max = self.opened = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**26), self._loop
        ).result(10)
        self.port = self._server.sockets[0].getsockname()[1]

    def url(self, case: str) -> str:
        return f"http://127.0.0.1:{self.port}/{case}/v1"

    def play(self, name: str, *steps: Step | Answer, rules: dict[str, Sequence[Step]] | None = None) -> str:
        """Set up a case, afresh, and give its base_url."""
        self.cases[name] = Case(steps, [(text.encode(), answers) for text, answers in (rules or {}).items()])
        return self.url(name)

    def replay(self, name: str, alias: str = "") -> str:
        """Set up a case of the manifest, afresh; under another name, as a server of which nothing was learnt yet."""
        told = next(case for case in manifest() if case["id"] == name)
        rules = {rule["if_contains"]: [read(step) for step in rule["steps"]] for rule in told.get("rules", [])}
        return self.play(alias or name, *(read(step) for step in told["steps"]), rules=rules)

    def log(self, name: str) -> list[Arrival]:
        return self.cases[name].log

    def bodies(self, name: str) -> list[Any]:
        return [arrival.json for arrival in self.log(name)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open_now += 1
        self.open_max = max(self.open_max, self.open_now)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open_now -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        arrival = Arrival(self._loop.time(), head, b"")
        arrival.body = await reader.readexactly(int(arrival.headers.get("content-length", 0)))
        case = self.cases[arrival.path.split("/")[1]]
        case.log.append(arrival)
        step = case.pick(arrival)
        await asyncio.sleep(step.wait)
        if step.end == "abort":
            return reset(writer)
        try:
            for i, part in enumerate(step.pieces()):
                await asyncio.sleep(step.delay if i else 0)
                writer.write(part)
                await writer.drain()
            arrival.sent_at = self._loop.time()
            if step.end == "hang":
                await reader.read(1)
                raise ConnectionResetError
        except ConnectionError:
            arrival.gone_at = self._loop.time()
            arrival.gone.set()
            return False
        return reset(writer) if step.end == "reset" else step.end == "keep"

    async def _stop(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()


def reset(writer: asyncio.StreamWriter) -> bool:
    """Break the connection with RST."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    return False


def manifest() -> list[dict[str, Any]]:
    """The recorded cases."""
    return [json.loads(line) for line in (DATA / "manifest.jsonl").read_text(encoding="utf-8").splitlines() if line]


def read(told: dict[str, Any]) -> Step:
    """A step of the manifest."""
    write = told.get("write", "whole")
    every = 1 if write == "bytewise" else 0 if write == "whole" else write["every"]
    end = {"abort_before": "abort"}.get(told.get("end", "keep"), told.get("end", "keep"))
    return Step(
        (DATA / told["file"]).read_bytes(), every, told.get("delay_ms", 0) / 1000, told.get("wait_before_ms", 0) / 1000, end
    )
