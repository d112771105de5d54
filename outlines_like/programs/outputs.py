"""What an answer must be like: free, one of some options, a pattern, or JSON; and how it is read."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from ..errors import MalformedError, ProgramError

Parameters = Mapping[str, Any]
BOX = "answer"


class Reading(NamedTuple):
    """An answer read: its text, and its value."""

    text: str
    value: Any


class Form(Protocol):
    """What an answer must be like."""

    @property
    def title(self) -> str:
        """What users call it."""

    @property
    def shown(self) -> bool:
        """Whether it may be shown while it is under way."""

    def sent(self) -> dict[str, Any]:
        """What a backend is told that keeps to such forms by itself."""

    def as_json(self) -> dict[str, Any]:
        """What a server is told that keeps to JSON schemas."""

    def read(self, text: str) -> Reading:
        """The answer, checked."""


@dataclass(frozen=True, slots=True)
class Free:
    """Any text."""

    title: str = "gen"
    shown: bool = True

    def sent(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def as_json(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def read(self, text: str) -> Reading:
        """As it is."""
        return Reading(text, text)


FREE = Free()


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some options."""

    options: tuple[str, ...]
    title: str = "select"
    shown: bool = False

    def sent(self) -> dict[str, Any]:
        """The options."""
        return {"choices": list(self.options)}

    def as_json(self) -> dict[str, Any]:
        """The options, boxed."""
        return boxed({"type": "string", "enum": list(self.options)})

    def read(self, text: str) -> Reading:
        """The option that it is."""
        for candidate in (text, text.strip(), unboxed(text)):
            if candidate in self.options:
                return Reading(candidate, candidate)
        raise MalformedError(f"the answer {text!r:.80} is none of {', '.join(map(repr, self.options)):.200}")


@dataclass(frozen=True, slots=True)
class Pattern:
    """All of a regular expression."""

    pattern: str
    title: str = "regex"
    shown: bool = False

    def sent(self) -> dict[str, Any]:
        """The pattern."""
        return {"regex": self.pattern}

    def as_json(self) -> dict[str, Any]:
        """The pattern, boxed."""
        return boxed({"type": "string", "pattern": f"^(?:{self.pattern})$"})

    def read(self, text: str) -> Reading:
        """As it is, if it matches."""
        for candidate in (text, unboxed(text)):
            if re.fullmatch(self.pattern, candidate):
                return Reading(candidate, candidate)
        raise MalformedError(f"the answer {text!r:.80} does not match {self.pattern!r}")


@dataclass(frozen=True, slots=True)
class Schema:
    """JSON by a schema."""

    schema: Mapping[str, Any]
    load: Callable[[str], Any] = field(compare=False)
    title: str = "json"
    shown: bool = True

    def sent(self) -> dict[str, Any]:
        """The schema."""
        return {"json_schema": self.schema}

    def as_json(self) -> dict[str, Any]:
        """The schema."""
        return {"name": "answer", "schema": self.schema}

    def read(self, text: str) -> Reading:
        """The parsed object."""
        try:
            return Reading(text, self.load(text))
        except (ValueError, RecursionError) as error:
            raise MalformedError(f"the answer {text!r:.80} is not JSON as the schema wants it: {error}") from error


def choice(options: Sequence[str]) -> Choice:
    """One of ``options``, checked."""
    if isinstance(options, str) or not options or not all(isinstance(option, str) and option for option in options):
        raise ValueError(f"select takes a list of texts that are not empty, not {options!r:.80}")
    return Choice(tuple(dict.fromkeys(options)))


def pattern(text: str) -> Pattern:
    """All of the regular expression ``text``, checked."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"the pattern {text!r} is not a regular expression: {error}") from error
    return Pattern(text)


def schema(given: Any) -> Schema:
    """JSON by a JSON schema, a pydantic model, or any type that msgspec knows."""
    if isinstance(given, Mapping):
        return Schema(dict(given), validating(given))
    if isinstance(given, type) and (load := getattr(given, "model_validate_json", None)) is not None:
        return Schema(given.model_json_schema(), load)  # type: ignore[attr-defined]
    try:
        return Schema(msgspec.json.schema(given), lambda text: msgspec.json.decode(text, type=given))
    except TypeError as error:
        raise TypeError(f"json takes a JSON schema or a type, not {given!r:.80}: {error}") from None


def validating(given: Mapping[str, Any]) -> Callable[[str], Any]:
    """Parses JSON, and holds it against a schema where jsonschema is installed."""
    if importlib.util.find_spec("jsonschema") is None:
        return msgspec.json.decode
    import jsonschema  # type: ignore[import-untyped]

    checker = jsonschema.validators.validator_for(given)(given)

    def load(text: str) -> Any:
        value = msgspec.json.decode(text)
        for fault in checker.iter_errors(value):
            raise ValueError(f"{fault.message} (at {fault.json_path})")
        return value

    return load


def settings(form: Form, parameters: Parameters, model: object) -> dict[str, Any]:
    """How a model with ``parameters`` is told of ``form``; a ProgramError where it can't be."""
    sent = form.sent()
    if all(name in parameters for name in sent):
        return sent
    if "response_format" in parameters:
        return {"response_format": {"type": "json_schema", "json_schema": form.as_json()}}
    raise ProgramError(
        f"{form.title}(...) needs a model that takes {' and '.join(map(repr, sent))}, and {model} does not: it can't keep an "
        "answer to that. Write the wish into the prompt, use gen(...), and check the answer."
    )


def boxed(kind: dict[str, Any]) -> dict[str, Any]:
    """A schema for servers that write nothing but JSON objects: one with the answer in it."""
    schema = {"type": "object", "properties": {BOX: kind}, "required": [BOX], "additionalProperties": False}
    return {"name": "boxed", "schema": schema, "strict": True}


def unboxed(text: str) -> str:
    """The answer in a JSON object, if it is in one."""
    with suppress(ValueError, RecursionError):
        match msgspec.json.decode(text):
            case {"answer": str(answer), **rest} if not rest:
                return answer
    return text
