"""NumPy for language-model calls: write a function of one prompt, call it on arrays of any shape."""

from . import cache, errors, models
from .arrays import Leaf
from .errors import OutlinesError, RowErrors
from .events import Elementwise, Event, Failure, Layer, Snapshot
from .layers import Limit, batched, cached, deduped, guarded, limited, retried, tapped
from .lifting import elemwise, stream, through, vectorize
from .operators import (
    acollect,
    by_row,
    chunks,
    collect,
    deltas,
    filter_rows,
    finished,
    first,
    latest,
    lines,
    map_values,
    merge,
    partial_json,
    peek,
    scan,
    sentences,
    stop_when,
    take,
    tee,
    throttle,
    timeout,
    zip_latest,
)
from .pipes import pipe
from .requests import Completion, Message, Request, Usage
from .sampling import Vote, until_decided, vote
from .streaming import Stream
from .targets import Plan
from .watching import watch

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
    "Snapshot",
    "Stream",
    "Usage",
    "Vote",
    "acollect",
    "batched",
    "by_row",
    "cache",
    "cached",
    "chunks",
    "collect",
    "deduped",
    "deltas",
    "elemwise",
    "errors",
    "filter_rows",
    "finished",
    "first",
    "guarded",
    "latest",
    "limited",
    "lines",
    "map_values",
    "merge",
    "models",
    "partial_json",
    "peek",
    "pipe",
    "retried",
    "scan",
    "sentences",
    "stop_when",
    "stream",
    "take",
    "tapped",
    "tee",
    "throttle",
    "through",
    "timeout",
    "until_decided",
    "vectorize",
    "vote",
    "watch",
    "zip_latest",
]


def __dir__() -> list[str]:
    return __all__
