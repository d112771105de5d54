"""Where answers are kept, and whether: read when a call is made, and carried with it.

>>> from outlines_like import cache
>>> with cache.disabled():
...     cache.terms().mode
'disabled'
>>> cache.terms().mode
'use'
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Generic, TypeVar

from . import bridge
from .layers import caching
from .requests import Terms

__all__ = ["at", "clear", "disabled", "enabled", "refresh"]

T = TypeVar("T")
Place = tuple[str, bool]  # a folder, and whether what is kept there is to survive a loss of power
FOLDER: ContextVar[Place | None] = ContextVar("FOLDER", default=None)
MODE: ContextVar[str] = ContextVar("MODE", default="use")


class Setting(Generic[T]):
    """A choice that holds from now on; as a context manager, until the block ends."""

    def __init__(self, variable: ContextVar[T], value: T) -> None:
        self._variable, self._before = variable, variable.get()
        variable.set(value)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._variable.set(self._before)


def at(folder: str | os.PathLike[str], *, durable: bool = False) -> Setting[Any]:
    """Keep answers in ``folder`` from now on, or in a ``with`` block.

    With ``durable``, a call ends only when its answers would survive a loss of power.
    """
    return Setting(FOLDER, (str(Path(folder).expanduser().absolute()), durable))


def enabled() -> Setting[str]:
    """Look answers up and keep them, as at the start: ends what ``disabled`` and ``refresh`` began."""
    return Setting(MODE, "use")


def disabled() -> Setting[str]:
    """Neither look answers up nor keep them, from now on or in a ``with`` block."""
    return Setting(MODE, "disabled")


def refresh() -> Setting[str]:
    """Ask everything anew and keep the new answers, from now on or in a ``with`` block."""
    return Setting(MODE, "refresh")


def clear() -> None:
    """Forget all answers of the store that a call would use just now."""
    bridge.wait(caching.cleared, terms().store)


def terms(live: bool = False, scope: str = "") -> Terms:
    """The terms of a call that is made just now."""
    folder, durable = FOLDER.get() or (None, False)
    if folder is None and (named := os.environ.get("OUTLINES_LIKE_CACHE")):
        folder = str(Path(named).expanduser().absolute())
    return Terms(folder, MODE.get(), live, scope, durable=durable)


def __dir__() -> list[str]:
    return __all__
