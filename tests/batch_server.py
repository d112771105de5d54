"""A Batch API on the replay server: files and batches, in OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.parser import BytesParser
from typing import Any
from urllib.parse import parse_qs, urlsplit

from .replay import Arrival, Replay, Step, choices, respond

Said = dict[str, Any]
Answer = Callable[[Said], Said]  # from the body of a request to the rest of its line among the answers


def right(*texts: str, **more: Any) -> Said:
    """The line of a request that was answered."""
    return {"response": {"status_code": 200, "request_id": "req-1", "body": choices(*texts, **more)}, "error": None}


def wrong(status: int, text: str, **names: Any) -> Said:
    """The line of a request that was refused."""
    body = {"error": {"message": text, **names}}
    return {"response": {"status_code": status, "request_id": "req-2", "body": body}, "error": None}


def unreached(code: str) -> Said:
    """The line of a request that the batch did not come to."""
    return {"response": None, "error": {"code": code, "message": f"This was not reached ({code})."}}


def shout(body: Said) -> Said:
    """The prompt in capitals, numbered where there are more choices."""
    text, n = body["messages"][-1]["content"].upper(), body.get("n", 1)
    return right(*(text if n == 1 else f"{text} {k}" for k in range(n)))


@dataclass
class Bureau:
    """The server. ``polls`` looks at a batch find it under way; ``faults`` are answered first, by method and path."""

    replay: Replay
    name: str
    answer: Answer = shout
    polls: int = 1
    ending: str = "completed"
    faults: dict[str, list[Step]] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    batches: dict[str, Said] = field(default_factory=dict)
    looks: dict[str, int] = field(default_factory=dict)
    lists: bool = True
    route: str = "/v1/chat/completions"
    status: str = "processed"
    made: int = 0

    def __post_init__(self) -> None:
        self.url = self.replay.play(self.name, self.step)

    @property
    def asked(self) -> list[str]:
        """What was asked so far, each as method and first part of the path."""
        return [f"{a.head.split(' ')[0]} {self.parts(a)[0]}" for a in self.replay.log(self.name)]

    @property
    def sent(self) -> list[list[Said]]:
        """The requests in each batch, in order."""
        return [
            [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines()] for batch in self.batches.values()
        ]

    def parts(self, arrival: Arrival) -> list[str]:
        """The path below /v1."""
        return urlsplit(arrival.path).path.split("/")[3:]

    def step(self, arrival: Arrival) -> Step:
        """The answer to one request."""
        method, parts = arrival.head.split(" ")[0], self.parts(arrival)
        waiting = self.faults.get(f"{method} {parts[0]}", [])
        if waiting:
            return waiting.pop(0)
        match method, *parts:
            case "POST", "files":
                return self.uploaded(arrival)
            case "POST", "batches":
                return self.created(arrival.json)
            case "GET", "batches" if self.lists:
                return self.listed(arrival)
            case "GET", "batches", name if name in self.batches:
                return respond(self.looked_at(name))
            case "GET", "files", name if name in self.files:
                return respond({"id": name, "object": "file", "status": "processed"})
            case "GET", "files", name, "content" if name in self.files:
                return respond(self.files[name], "200 OK", "Content-Type: application/octet-stream")
            case "POST", "chat", "completions":
                return respond(self.answer(arrival.json)["response"]["body"])
        return respond({"error": {"message": "no such thing"}}, "404 Not Found")

    def uploaded(self, arrival: Arrival) -> Step:
        head = f"Content-Type: {arrival.headers['content-type']}\r\n\r\n".encode()
        purpose, file = BytesParser().parsebytes(head + arrival.body).get_payload()
        assert (purpose.get_payload(), file.get_filename()) == ("batch", "rows.jsonl")
        name = f"file-{len(self.files)}"
        self.files[name] = file.get_payload(decode=True)
        return respond({"id": name, "object": "file", "status": self.status})

    def created(self, asked: Said) -> Step:
        assert (asked["endpoint"], asked["completion_window"]) == (self.route, "24h")
        name = f"batch-{self.made}"
        self.made += 1
        self.batches[name] = {"id": name, "object": "batch", "status": "validating", **asked}
        return respond(self.batches[name])

    def listed(self, arrival: Arrival) -> Step:
        after = parse_qs(urlsplit(arrival.path).query).get("after", [""])[0]
        names = sorted(self.batches, key=lambda name: -int(name.split("-")[1]))
        rest = names[names.index(after) + 1 :] if after else names
        return respond({"data": [self.batches[name] for name in rest[:2]], "has_more": len(rest) > 2})

    def looked_at(self, name: str) -> Said:
        batch = self.batches[name]
        self.looks[name] = self.looks.get(name, 0) + 1
        if self.looks[name] > self.polls and batch["status"] in ("validating", "in_progress"):
            batch |= {"status": self.ending}
            told = [json.dumps(line).encode() for line in self.lines(self.files[batch["input_file_id"]])]
            good = [line for line in told if b'"status_code": 200' in line]
            bad = [line for line in told if line not in good]
            for field_name, found in (("output_file_id", good), ("error_file_id", bad)):
                if found and self.ending != "failed":
                    batch[field_name] = f"file-{len(self.files)}"
                    self.files[batch[field_name]] = b"\n".join(reversed(found))  # in any order
        return batch

    def lines(self, file: bytes) -> Iterator[Said]:
        for line in file.splitlines():
            asked = json.loads(line)
            assert (asked["method"], asked["url"]) == ("POST", self.route)
            if told := self.answer(asked["body"]):
                yield {"id": "x", "custom_id": asked["custom_id"], **told}
