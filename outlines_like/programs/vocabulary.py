"""The words that programs are written with."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

from .blocks import Block, Stamp
from .nodes import Expression, Gen, Picture, Stamped, Sum, expression
from .outputs import FREE, choice, pattern, schema

MAGIC = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}


def gen(
    name: str | None = None,
    *,
    max_tokens: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_regex: str | None = None,
    regex: str | None = None,
    save_stop_text: bool | str = False,
    list_append: bool = False,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int | None = None,
    **params: Any,
) -> Expression:
    """Words of the model's, captured under ``name`` if there is one.

    It ends where the model ends, at ``max_tokens``, before a ``stop`` string, or before a match of ``stop_regex`` (which is
    looked for in the finished answer). ``regex`` is a pattern that all of it keeps to. With ``save_stop_text`` what it stopped
    at is captured too, as ``{name}_stop_text`` or under the name that is given. ``list_append`` adds to a list of that name.
    The other arguments are sampling parameters, as any call of the model takes them.
    """
    given = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, **params}
    given["stop"] = [stop] if isinstance(stop, str) else stop
    saved = save_stop_text if isinstance(save_stop_text, str) else f"{name}_stop_text" if save_stop_text else None
    form = pattern(regex) if regex is not None else FREE
    ending = pattern(stop_regex).pattern if stop_regex is not None else None
    set_ = {key: value for key, value in given.items() if value is not None}
    return Gen(named(name, list_append), set_, form, list_append, ending, saved)


def select(options: Sequence[str], name: str | None = None, *, list_append: bool = False, **params: Any) -> Expression:
    """One of ``options``, chosen by the model."""
    return Gen(named(name, list_append), params, choice(options), list_append)


def regex(pattern_: str, name: str | None = None, *, list_append: bool = False, **params: Any) -> Expression:
    """Words of the model's that match all of a regular expression."""
    return Gen(named(name, list_append), params, pattern(pattern_), list_append)


def json(name: str | None = None, *, schema: Any, list_append: bool = False, **params: Any) -> Expression:
    """JSON by ``schema``: a JSON schema, a pydantic model, or a type (a dataclass, ``list[int]``).

    The capture is the parsed object; ``lm.text(name)`` is the text as the model wrote it.
    """
    return Gen(named(name, list_append), params, read_schema(schema), list_append)


read_schema = schema


def named(name: str | None, list_append: bool) -> str | None:
    """A capture's name, checked."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"the name of a capture is text, not {name!r:.60}")
    if list_append and not name:
        raise ValueError("list_append=True needs the name of the list")
    return name


def image(source: Any) -> Expression:
    """An image for a chat model: bytes, a Path, a PIL image, or the address of one (an address is sent as it is)."""
    if isinstance(source, str):
        if not source.startswith(("http://", "https://", "data:image/")):
            raise ValueError(f"image({source!r:.60}): a text is the address of an image; give a file as pathlib.Path(...)")
        return picture(source)
    if isinstance(source, Path):
        return image(source.read_bytes())
    if hasattr(source, "save") and not isinstance(source, (bytes, bytearray)):
        source.save(buffer := io.BytesIO(), format="PNG")
        return image(buffer.getvalue())
    if not isinstance(source, (bytes, bytearray, memoryview)):
        raise TypeError(f"image takes bytes, a Path, a PIL image or an address, not {type(source).__name__}")
    body = bytes(source)
    kind = next((kind for magic, kind in MAGIC.items() if body.startswith(magic)), None)
    if kind is None:
        raise ValueError("image takes PNG, JPEG, GIF or WebP; these bytes begin like none of them")
    return picture(f"data:{kind};base64,{base64.b64encode(body).decode()}")


def picture(url: str) -> Picture:
    """An image as chat servers read it."""
    return Picture({"type": "image_url", "image_url": {"url": url}})


@overload
def system() -> Block: ...
@overload
def system(first: Any, /, *more: Any) -> Expression: ...
def system(*content: Any) -> Block | Expression:
    """A turn of the system's: ``with system(): lm += ...``, or ``lm += system("...")``."""
    return role("system", content)


@overload
def user() -> Block: ...
@overload
def user(first: Any, /, *more: Any) -> Expression: ...
def user(*content: Any) -> Block | Expression:
    """A turn of the user's: ``with user(): lm += ...``, or ``lm += user("...")``."""
    return role("user", content)


@overload
def assistant() -> Block: ...
@overload
def assistant(first: Any, /, *more: Any) -> Expression: ...
def assistant(*content: Any) -> Block | Expression:
    """A turn of the model's: ``with assistant(): lm += gen("x")``, or ``lm += assistant(gen("x"))``."""
    return role("assistant", content)


def role(name: str, content: Sequence[Any]) -> Block | Expression:
    """A turn as a block, or round what is given."""
    speaking = partial(Stamp.speaking, role=name)
    return Stamped(joined(content), speaking) if content else Block(f"{name}()", speaking)


def joined(content: Sequence[Any]) -> Expression:
    """All of it as one expression."""
    return Sum(tuple(map(expression, content)))


@overload
def capture(what: str, /, *, list_append: bool = False) -> Block: ...
@overload
def capture(what: Any, name: str, /, *, list_append: bool = False) -> Expression: ...
def capture(what: Any, name: str | None = None, /, *, list_append: bool = False) -> Block | Expression:
    """Everything said in a block, ``with capture("name"): ...``, or by an expression, ``capture(expression, "name")``."""
    title = what if name is None else name
    if not isinstance(title, str) or not title:
        raise TypeError(f"capture takes a name, or an expression and a name; {what!r:.60} came without one")
    capturing = partial(Stamp.capturing, name=title, list_append=list_append)
    return Block(f"capture({title!r})", capturing) if name is None else Stamped(expression(what), capturing)
