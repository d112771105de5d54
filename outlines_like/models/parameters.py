"""What may be set on a model call, and how each setting is written canonically."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from inspect import Parameter, Signature, signature
from typing import Any

import msgspec

from ..checks import count
from ..requests import native
from ..signatures import advice

Check = Callable[[str, Any], Any]
INFINITY = float("inf")


def integer(least: int, most: int = 2**63 - 1) -> Check:
    """A whole number from ``least`` to ``most``."""

    def check(name: str, value: Any) -> int:
        if count(name, value, least) > most:
            raise ValueError(f"{name}={value!r}; it takes a whole number of at most {most}")
        return int(value)

    return check


def number(least: float, most: float = INFINITY) -> Check:
    """A number from ``least`` to ``most``."""

    def check(name: str, value: Any) -> float | int:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= most or value == INFINITY:
            raise ValueError(f"{name}={value!r}; it takes a finite number from {least} to {most}")
        return int(value) if value == int(value) else value

    return check


def stops(name: str, value: Any) -> list[str]:
    """One stop string or several, in a fixed order. None at all is the same as not set."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise TypeError(f"{name}={value!r}; it takes a string or a list of strings")
    texts = sorted(value) if isinstance(value, (set, frozenset)) else list(value)
    if any(not isinstance(text, str) for text in texts):
        raise TypeError(f"{name}={texts!r}; it takes a string or a list of strings")
    if any(broken(text) for text in texts):
        raise ValueError(f"{name}={texts!r} holds a lone surrogate, which is not valid text")
    if "" in texts:
        raise ValueError(f"{name}={texts!r} holds an empty string, which would stop every answer before it began; leave it out")
    return texts


def texts(name: str, value: Any) -> list[str]:
    """A list of strings, none of them empty."""
    for text in value:
        if not isinstance(text, str) or not text or broken(text):
            raise TypeError(f"{name}={value!r:.80} holds {text!r:.40}; it takes strings of valid text, none of them empty")
    return [str(text) for text in value]


def broken(text: str) -> bool:
    """Whether a string is not valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def text(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r}; it takes a string")
    return value


def plain(name: str, value: Any) -> Any:
    """Anything that JSON can say, as it is."""
    try:
        msgspec.json.encode(value, order="deterministic")
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name}={value!r:.80}; it takes what JSON can say: {error}") from None
    return value


def options(name: str, value: Any) -> list[str]:
    """Texts to choose from, at least one."""
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={value!r:.80}; it takes a list of strings")
    if not (found := list(dict.fromkeys(texts(name, list(value))))):
        raise ValueError(f"{name}={value!r:.80}; it takes at least one string")
    return found


def regular(name: str, value: Any) -> str:
    """A regular expression."""
    try:
        re.compile(text(name, value))
    except re.error as error:
        raise ValueError(f"{name}={value!r:.80} is not a regular expression: {error}") from error
    return str(value)


def schema(name: str, value: Any) -> dict[str, Any]:
    """A JSON schema."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}={value!r:.80}; it takes a JSON schema as a dict (of a pydantic model, model_json_schema())")
    return dict(plain(name, value))


def biases(name: str, value: Any) -> dict[str, float]:
    """What is added to single tokens' logits, by the tokens' numbers."""
    if not isinstance(value, Mapping) or not all(str(token).isdecimal() for token in value):
        raise TypeError(f"{name}={value!r:.80}; it takes a dict from the numbers of tokens to what is added to their logits")
    return {str(token): number(-INFINITY)(f"{name}[{token}]", added) for token, added in value.items()}


def flag(name: str, value: Any) -> bool | None:
    """Yes or no; no is the same as not set."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r:.80}; it takes True or False")
    return value or None


COMMON: Mapping[str, Check] = {
    "max_tokens": integer(1),
    "temperature": number(0),
    "top_p": number(0, 1),
    "top_k": integer(1),
    "stop": stops,
    "seed": integer(-(2**63)),
}
FORMS: Mapping[str, Check] = {"choices": options, "regex": regular, "json_schema": schema}
LOCAL: Mapping[str, Check] = {
    **COMMON,
    **FORMS,
    "min_p": number(0, 1),
    "repetition_penalty": number(0.01, 100),
    "logit_bias": biases,
    "logprobs": flag,
}


def checked(given: Mapping[str, Any], parameters: Mapping[str, Check], beside: Iterable[str] = ()) -> dict[str, Any]:
    """What was really set, canonically. None means not set. ``beside`` these other names are taken."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name not in parameters:
            raise TypeError(f"a model has no parameter {name!r}; {advice(name, value, [*parameters, *beside])}")
        value = native(value)
        if value is not None and (value := parameters[name](name, value)) is not None and value != []:
            found[name] = value
    return found


def preset(maker: Callable[..., Any], given: Mapping[str, Any], parameters: Mapping[str, Check]) -> dict[str, Any]:
    """What holds for all calls of a model, as it was given to ``maker`` beside what that takes itself."""
    own = [name for name, taken in signature(maker).parameters.items() if taken.kind is not Parameter.VAR_KEYWORD]
    return checked(given, parameters, own)


def settled(params: dict[str, Any]) -> dict[str, Any]:
    """All that is set for a call, if it goes together."""
    forms = [name for name in FORMS if name in params]
    if len(forms) > 1:
        raise ValueError(f"an answer is held to one form, not to {' and '.join(forms)}: give one of them")
    return params


def form(parameters: Mapping[str, Check]) -> Signature:
    """How a model takes its arguments."""
    prompt = Parameter("prompt", Parameter.POSITIONAL_OR_KEYWORD)
    return Signature([prompt, *(Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in parameters)])
