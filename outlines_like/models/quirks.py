"""How requests are written for one server, and what its refusals teach about that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import BadRequestError
from ..requests import Request, digest
from ..stops import sendable
from .refusals import Said

OPTIONAL = ("max_tokens", "stop", "stream")  # fields that can do without: renamed, applied by us, or told whole
UNSUPPORTED = re.compile(
    r"unsupported|not support|unrecognized|unknown|unexpected|not permitted|not allowed|extra_forbidden|extra inputs"
    r"|not available|use '?max_(completion_)?tokens'? instead"
)
ABOUT_N = re.compile(
    r"['\"`]n['\"`]|\bn\s*(>|=|must|should|is|can)|(one|single|1) (completion )?choice|best_of|multiple (choices|completions)"
)
AT_MOST = re.compile(r"(?:maximum length|at most|less than or equal to|<=|maximum(?: of| is)?|up to)\s*(\d+)")


class Dialect(NamedTuple):
    """What is known of a server: fields it refuses, and how many choices and stops it takes in a request."""

    refused: frozenset[str] = frozenset()
    choices: int = 128
    stops: int = 4

    def joined(self, other: Dialect) -> Dialect:
        """What either knows."""
        return Dialect(self.refused | other.refused, min(self.choices, other.choices), min(self.stops, other.stops))


def body(request: Request, count: int, dialect: Dialect, *, endpoint: str, live: bool, prefill: bool = False) -> dict[str, Any]:
    """The JSON of a request for ``count`` samples: what the user set, what the call needs, and nothing else."""
    params = dict(request.params)
    extra = params.pop("extra_body", {})
    if "json_schema" in params:
        answer = {"name": "answer", "schema": params.pop("json_schema")}
        params.setdefault("response_format", {"type": "json_schema", "json_schema": answer})
    if "logprobs" in params and endpoint == "completions":
        params["logprobs"] = 1  # there it is the number of likeliest tokens to tell of
    written = {name: _written(name, value, request, dialect) for name, value in params.items()}
    sent = {
        "model": request.model,
        **prompt(request, endpoint),
        **{name: value for name, value in written.items() if value is not None},
    }
    if "max_tokens" in sent and "max_tokens" in dialect.refused:
        sent["max_completion_tokens"] = sent.pop("max_tokens")
    if min(count, dialect.choices) > 1:
        sent["n"] = min(count, dialect.choices)
    if live and "stream" not in dialect.refused:
        sent["stream"] = True
    if prefill and sent.get("messages", [{}])[-1].get("role") == "assistant":
        sent |= {"continue_final_message": True, "add_generation_prompt": False}
    return {**sent, **extra}


def prompt(request: Request, endpoint: str) -> dict[str, Any]:
    """The part of a request that holds its prompt, as a "chat" or "completions" endpoint wants it."""
    if endpoint == "chat":
        said = (
            [{"role": "user", "content": request.prompt}]
            if isinstance(request.prompt, str)
            else [turn.wire() for turn in request.prompt]
        )
        return {"messages": said}
    if isinstance(request.prompt, str):
        return {"prompt": request.prompt}
    raise BadRequestError('a conversation was given to a completions endpoint, which takes text; use endpoint="chat"')


def _written(name: str, value: Any, request: Request, dialect: Dialect) -> Any:
    """A parameter as it is sent; None leaves it out."""
    if name == "seed":
        return seed_of(value, request)
    if name == "stop":
        return None if "stop" in dialect.refused else sendable(value, dialect.stops) or None
    return value


def seed_of(seed: int, request: Request) -> int:
    """A seed of its own for every draw; the first draw has the user's."""
    draw = [request.terms.scope, request.occurrence, request.sample]
    return seed if draw == ["", 0, 0] else int(digest([seed, draw])[:8], 16) >> 1


def company(request: Request, dialect: Dialect) -> str:
    """Which requests may share one: those that differ in the sample alone, as many as the server takes."""
    most = 1 if "seed" in request.params else dialect.choices
    return f"{request.family}:{request.sample // most}"


def learnt(dialect: Dialect, said: Said, sent: Mapping[str, Any]) -> Dialect:
    """What a refusal of ``sent`` adds to what was known; the same dialect if nothing that helps."""
    words = said.words
    if sent.get("n", 1) > 1 and (said.param == "n" or ABOUT_N.search(words)):
        return dialect._replace(choices=_less(words, sent["n"]))
    if "stop" in sent and (said.param == "stop" or re.search(r"\bstop\b", words)) and not UNSUPPORTED.search(words):
        most = _number(words) or len(sent["stop"])
        return dialect._replace(stops=most) if most < len(sent["stop"]) else dialect
    field = next((name for name in OPTIONAL if name in sent and _about(name, said)), None)
    return dialect._replace(refused=dialect.refused | {field}) if field and UNSUPPORTED.search(words) else dialect


def _about(name: str, said: Said) -> bool:
    return said.param == name or re.search(rf"(?<!\w){name}(?!\w)", said.words) is not None


def _number(words: str) -> int | None:
    found = AT_MOST.search(words)
    return int(found[1]) if found and int(found[1]) > 0 else None


def _less(words: str, asked: int) -> int:
    """How many choices to ask for after ``asked`` were refused."""
    most = _number(words)
    return most if most is not None and most < asked else 1
