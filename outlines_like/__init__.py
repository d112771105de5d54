"""NumPy for language-model calls: write a function of one prompt, call it on arrays of any shape."""

from . import cache, errors, models
from .arrays import Leaf
from .calling import Stream
from .errors import OutlinesError, RowErrors
from .events import Elementwise, Event, Failure, Layer
from .layers import Limit, batched, cached, deduped, guarded, limited, retried, tapped
from .lifting import elemwise, through, vectorize
from .programs import (
    LM,
    Part,
    assistant,
    capture,
    captures,
    gen,
    image,
    json,
    program,
    regex,
    select,
    system,
    to_frame,
    user,
)
from .requests import Completion, Message, Request, Usage
from .sampling import Vote, vote
from .targets import Plan

__version__ = "0.1.0"

__all__ = [  # noqa: RUF022  plain order
    "Completion",
    "Elementwise",
    "Event",
    "Failure",
    "LM",
    "Layer",
    "Leaf",
    "Limit",
    "Message",
    "OutlinesError",
    "Part",
    "Plan",
    "Request",
    "RowErrors",
    "Stream",
    "Usage",
    "Vote",
    "assistant",
    "batched",
    "cache",
    "cached",
    "capture",
    "captures",
    "deduped",
    "elemwise",
    "errors",
    "gen",
    "guarded",
    "image",
    "json",
    "limited",
    "models",
    "program",
    "regex",
    "retried",
    "select",
    "system",
    "tapped",
    "through",
    "to_frame",
    "user",
    "vectorize",
    "vote",
]


def __dir__() -> list[str]:
    return __all__
