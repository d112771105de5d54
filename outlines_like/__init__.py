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
from .sampling import Vote, until_decided, vote
from .streaming import Stream
from .targets import Plan
from .watching import watch

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
    "Snapshot",
    "Stream",
    "Usage",
    "Vote",
    "acollect",
    "assistant",
    "batched",
    "by_row",
    "cache",
    "cached",
    "capture",
    "captures",
    "chunks",
    "collect",
    "deduped",
    "deltas",
    "elemwise",
    "errors",
    "filter_rows",
    "finished",
    "first",
    "gen",
    "guarded",
    "image",
    "json",
    "latest",
    "limited",
    "lines",
    "map_values",
    "merge",
    "models",
    "partial_json",
    "peek",
    "pipe",
    "program",
    "regex",
    "retried",
    "scan",
    "select",
    "sentences",
    "stop_when",
    "stream",
    "system",
    "take",
    "tapped",
    "tee",
    "throttle",
    "through",
    "timeout",
    "to_frame",
    "until_decided",
    "user",
    "vectorize",
    "vote",
    "watch",
    "zip_latest",
]


def __dir__() -> list[str]:
    return __all__
