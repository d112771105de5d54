"""Small checks of what users give."""

from __future__ import annotations

import operator
from typing import Any


def count(name: str, value: Any, least: int = 1) -> int:
    """A whole number of at least ``least``.

    >>> count("size", 3)
    3
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}; it takes a whole number") from None
    if isinstance(value, bool) or number < least:
        raise ValueError(f"{name}={value!r}; it takes a whole number of at least {least}")
    return number


def seconds(name: str, value: Any) -> float:
    """A time longer than none.

    >>> seconds("timeout", 2)
    2.0
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{name}={value!r}; it takes a finite number of seconds above 0")
    return float(value)
