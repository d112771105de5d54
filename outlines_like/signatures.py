"""Signatures in NumPy's gufunc notation: which axes a function takes whole.

Source: https://numpy.org/doc/stable/reference/c-api/generalized-ufuncs.html
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from .errors import SignatureError

SLOT = re.compile(r"\s*(?:(?P<name>\w+)\s*:)?\s*\((?P<dims>[^()]*)\)\s*")
DIM = re.compile(r"\w+\??")


class Slot(NamedTuple):
    """One argument or output: its name, if given, and the names of its core dimensions."""

    name: str | None
    dims: tuple[str, ...]


class Signature(NamedTuple):
    """What a signature text says."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def dims(self, name: str, position: int) -> tuple[str, ...]:
        """The core dimensions of the argument ``name``, which is the ``position``-th."""
        if any(slot.name for slot in self.inputs):
            return next((slot.dims for slot in self.inputs if slot.name == name), ())
        return self.inputs[position].dims if position < len(self.inputs) else ()


def parse(text: str) -> Signature:
    """Read a signature.

    >>> parse("prompt:(), stop:(m) -> (s)").inputs
    (Slot(name='prompt', dims=()), Slot(name='stop', dims=('m',)))

    A dimension may be optional: for ``(m?)`` a scalar is taken as it is.
    """
    if not isinstance(text, str):
        raise TypeError(f"signature={text!r:.60}; it takes a text, as '(),(m)->(s)'")
    sides = text.split("->")
    if len(sides) != 2:
        raise SignatureError(f"signature {text!r} has {len(sides) - 1} arrows; write one, as in '(),(m)->(s)'")
    return Signature(slots(sides[0], text), slots(sides[1], text))


def slots(side: str, text: str) -> tuple[Slot, ...]:
    """The slots of one side of a signature."""
    found, position = [], 0
    while match := SLOT.match(side, position):
        found.append(Slot(match["name"], dims(match["dims"], text)))
        position = match.end()
        if not side.startswith(",", position):
            break
        position += 1
    if position != len(side) or (side.strip() and side.rstrip().endswith(",")):
        raise SignatureError(f"signature {text!r} can't be read at {side[position:]!r}; write it as in '(),(m)->(s)'")
    return tuple(found)


def dims(inside: str, text: str) -> tuple[str, ...]:
    """The dimension names between two parentheses."""
    names = tuple(name.strip() for name in inside.split(",")) if inside.strip() else ()
    for name in names:
        if not DIM.fullmatch(name):
            raise SignatureError(f"signature {text!r} has a dimension {name!r}; a dimension is a word or a number")
    return names


class Argument(NamedTuple):
    """One bound argument. ``keyword`` is None where it is passed by position; ``place`` counts the parameters."""

    name: str
    value: Any
    keyword: str | None
    place: int = 0


def bind(form: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Argument]:
    """The arguments of a call in the order of the function's parameters; defaults that were left out stay out."""
    try:
        bound = form.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{error}{hint(form, kwargs)}") from None
    found: list[Argument] = []
    for place, (name, parameter) in enumerate(form.parameters.items()):
        if name not in bound.arguments:
            continue
        value = bound.arguments[name]
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            found += [Argument(name, item, None, place + k) for k, item in enumerate(value)]
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            found += [Argument(key, item, key, place) for key, item in value.items()]
        else:
            found.append(Argument(name, value, name if name in bound.kwargs else None, place))
    return found


OPTIONS = ("signature", "excluded", "concurrency", "via", "on_error", "fail_fast", "progress", "partial")
LIFTED = "it is given where the function is lifted: vectorize(..., {name}={value!r:.40})(...)"
SERVED = (
    "a model behind a server takes json_schema=, or on vLLM extra_body={{'structured_outputs': {{'%s': {value!r:.80}}}}}; "
    "in a program, %s(...) finds what it takes"
)
ELSEWHERE = {
    **dict.fromkeys(OPTIONS, LIFTED),
    "n": "write samples={value!r:.40}",
    "choices": SERVED % ("choice", "select"),
    "regex": SERVED % ("regex", "regex"),
}


def hint(form: inspect.Signature, kwargs: Mapping[str, Any]) -> str:
    """A word on keywords that are not taken."""
    strange = [name for name in kwargs if name not in form.parameters]
    return f"; {advice(strange[0], kwargs[strange[0]], [*form.parameters, 'samples'])}" if strange else ""


def advice(name: str, value: Any, names: Collection[str]) -> str:
    """What to do where only ``names`` are taken."""
    if name in ELSEWHERE:
        return ELSEWHERE[name].format(name=name, value=value)
    near = nearest(name, names)
    return f"did you mean {near!r}?" if near else f"it takes {', '.join(names)}"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar of ``names``."""
    return next(iter(difflib.get_close_matches(name, list(names), 1)), None)


def form_of(fn: Callable[..., Any]) -> inspect.Signature:
    """How ``fn`` takes its arguments; anything goes where Python can't tell."""
    try:
        return inspect.signature(fn)
    except (ValueError, TypeError):
        return inspect.signature(lambda *args, **kwargs: None)
