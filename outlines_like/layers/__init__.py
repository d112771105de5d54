"""Layers change when, how often and in what company a backend runs, never what the caller sees."""

from .batching import batched
from .caching import cached
from .deduplication import deduped
from .guarding import guarded
from .halting import halted
from .limiting import Limit, limited
from .retrying import retried
from .tapping import tapped

__all__ = ["Limit", "batched", "cached", "deduped", "guarded", "halted", "limited", "retried", "tapped"]
