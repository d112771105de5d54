"""Arrays of programs: what they captured, as arrays and as tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import arrays, bridge, frames
from ..arrays import index_of
from .batches import CONCURRENCY, outcomes, settled
from .lm import LM
from .runs import Visit


def run_all(programs: Any) -> arrays.Array:
    """Programs as an array, all of them run. What is no program stays as it is."""
    cells = arrays.cells(programs)
    lms = [cell for cell in cells.ravel().tolist() if isinstance(cell, LM)]
    outcomes(bridge.wait(settled, lms, Visit(), CONCURRENCY) if lms else [], lms, "raise")
    return cells


def mapped(view: Callable[[LM], Any], cells: arrays.Array) -> list[Any]:
    """A view of every program; None and errors stay."""
    return [view(cell) if isinstance(cell, LM) else cell for cell in cells.ravel().tolist()]


def captures(programs: Any, name: str) -> Any:
    """The capture ``name`` of every program of an array, in the same shape. What has not run yet runs, all at once.

    >>> import outlines_like as ol
    >>> model = ol.models.fake(lambda asked: asked.text[0])
    >>> ol.captures(model.run_batched([word + ol.gen("first") for word in ("one", "two")]), "first").tolist()
    ['o', 't']
    """
    cells = run_all(programs)
    return arrays.unflatten(mapped(lambda lm: lm[name], cells), cells.shape)


def to_frame(programs: Any) -> Any:
    """A data frame with a row for each program of an array and a column for each capture, with the whole text as "text".

    Where there are several axes, a column for each says where a row stands. It is pandas' if that is installed, else polars'.
    """
    cells = run_all(programs)
    rows = [lm.captures if isinstance(lm, LM) else {} for lm in cells.ravel().tolist()]
    names = list(dict.fromkeys(name for row in rows for name in row))
    places = [index_of(i, cells.shape) for i in range(cells.size)] if cells.ndim > 1 else []
    axes = {f"axis_{k}": [place[k] for place in places] for k in range(cells.ndim)} if places else {}
    table = {name: [row.get(name) for row in rows] for name in names}
    return frames.table({**axes, **table, "text": mapped(str, cells)})
