"""Backends with their default layers. Each is imported when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .base import Model as Model
    from .fakes import fake as fake
    from .local import transformers as transformers
    from .remote import openai as openai

HOMES = {"Model": "base", "fake": "fakes", "openai": "remote", "transformers": "local"}
__all__ = ["Model", "fake", "openai", "transformers"]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"outlines_like.models has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
