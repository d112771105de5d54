"""NumPy for language-model calls: write a function of one prompt, call it on arrays of any shape."""

from . import cache, errors, models
from .arrays import Leaf
from .calling import Stream
from .errors import OutlinesError, RowErrors
from .events import Elementwise, Event, Failure, Layer
from .layers import Limit, batched, cached, deduped, guarded, limited, retried, tapped
from .lifting import elemwise, through, vectorize
from .requests import Completion, Message, Request, Usage
from .sampling import Vote, vote
from .targets import Plan

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Elementwise",
    "Event",
    "Failure",
    "Layer",
    "Leaf",
    "Limit",
    "Message",
    "OutlinesError",
    "Plan",
    "Request",
    "RowErrors",
    "Stream",
    "Usage",
    "Vote",
    "batched",
    "cache",
    "cached",
    "deduped",
    "elemwise",
    "errors",
    "guarded",
    "limited",
    "models",
    "retried",
    "tapped",
    "through",
    "vectorize",
    "vote",
]


def __dir__() -> list[str]:
    return __all__
