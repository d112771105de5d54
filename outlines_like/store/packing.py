"""Values as bytes, and back: what is damaged, or stands under another key, is no value.

msgpack has no tuples and no large integers: they and completions are tagged.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import msgspec

from ..requests import Completion

LARGEST = 2**28  # bytes of one value
SEAL = 16  # bytes of a checksum
BIG, TUPLE, COMPLETION = 1, 2, 3
pack = msgspec.msgpack.Encoder().encode
read_completion = msgspec.msgpack.Decoder(Completion).decode


class UnfitError(TypeError):
    """A value that would not come back from the store as it was."""


def fitted(value: Any) -> Any:
    """``value`` in msgpack's types, exactly: a subclass, which would come back as something else, is an error."""
    kind = type(value)
    if value is None or kind in (str, float, bool, bytes):
        return value
    if kind is int:
        return value if -(2**63) <= value < 2**64 else msgspec.msgpack.Ext(BIG, big_bytes(value))
    if kind is Completion:
        return msgspec.msgpack.Ext(COMPLETION, pack(value))
    if kind is list:
        return [fitted(cell) for cell in value]
    if kind is tuple:
        return msgspec.msgpack.Ext(TUPLE, pack([fitted(cell) for cell in value]))
    if kind is dict and all(type(name) is str for name in value):
        return {name: fitted(cell) for name, cell in value.items()}
    raise UnfitError(f"no {kind.__module__}.{kind.__qualname__}" if kind is not dict else "no dict with keys that are not str")


def big_bytes(value: int) -> bytes:
    """An integer of any size as bytes."""
    return value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)


def tagged(tag: int, data: memoryview) -> Any:
    """The value that was packed under a tag."""
    if tag == BIG:
        return int.from_bytes(data, "big", signed=True)
    if tag == TUPLE:
        return tuple(unpack(data))
    if tag == COMPLETION:
        return read_completion(data)
    raise ValueError(f"unknown tag {tag}")


unpack = msgspec.msgpack.Decoder(ext_hook=tagged).decode


def seal(key: str, packed: bytes) -> bytes:
    """A checksum over key and value."""
    name = key.encode()
    made = blake2b(b"%d %b" % (len(name), name), digest_size=SEAL)
    made.update(packed)
    return made.digest()


def sealed(key: str, value: Any) -> bytes:
    """What is written for ``value`` under ``key``."""
    packed = pack(fitted(value))
    if len(packed) > LARGEST:
        raise UnfitError(f"nothing of more than {LARGEST} bytes")
    return seal(key, packed) + packed


def unsealed(key: str, data: bytes) -> Any:
    """The value that was written under ``key``; a ValueError if these bytes are not it."""
    packed = data[SEAL:]
    if seal(key, packed) != data[:SEAL]:
        raise ValueError("the checksum does not match")
    return unpack(packed)


def sound(key: str) -> bool:
    """Whether a database can hold ``key`` (lone surrogates it can't)."""
    return key.isascii() or key.encode("utf-8", "ignore").decode() == key
