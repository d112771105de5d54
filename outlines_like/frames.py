"""Series of pandas, polars and their kin to arrays and back, by narwhals."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .errors import ShapeError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

LIBRARIES = ("pandas", "polars", "pyarrow", "modin", "cudf")


def is_series(value: Any) -> bool:
    """Whether ``value`` is a column of a data frame."""
    kind = type(value)
    return kind.__name__ in ("Series", "ChunkedArray") and kind.__module__.partition(".")[0] in LIBRARIES


def series(value: Any) -> Any:
    """The narwhals view of a column."""
    try:
        import narwhals
    except ImportError:
        raise ImportError("a data frame's column needs narwhals: run `pip install 'outlines_like[frames]'`") from None
    return narwhals.from_native(value, series_only=True)


def to_array(value: Any) -> npt.NDArray[np.object_]:
    """The column's values as an object array; what is missing stays missing."""
    import numpy as np

    column = series(value)
    cells = value.tolist() if hasattr(value, "tolist") else column.to_list()
    return np.fromiter(cells, dtype=object, count=len(cells))


def index_of(value: Any) -> Any:
    """The labels of the rows, where there are any."""
    pandas = sys.modules.get("pandas")
    return value.index if pandas is not None and isinstance(value, pandas.Series) else None


def like(columns: Sequence[Any], values: Any) -> Any:
    """``values`` as a column like the first of ``columns``, under the same labels.

    It has the library's own type for them where that holds the very same values, else they stay objects.
    """
    import narwhals

    first, cells = series(columns[0]), values.tolist()
    own = typed(first, cells)
    made = own if own is not None else narwhals.new_series(first.name, cells, narwhals.Object(), backend=first.implementation)
    native = made.to_native()
    if (labels := index_of(columns[0])) is not None:
        native.index = labels
    return native


def typed(first: Any, cells: Sequence[Any]) -> Any:
    """A column of a type that the library infers; None if that would change a value."""
    import narwhals

    try:
        made = narwhals.new_series(first.name, cells, backend=first.implementation)
    except Exception:  # each library refuses mixed values in a way of its own
        return None
    return made if all(map(same, made.to_list(), cells)) else None


def same(one: Any, other: Any) -> bool:
    """Whether two cells hold equal values of one type, or are both missing."""
    if other is None:
        return one is None or one != one
    return type(one) is type(other) and bool(one == other or one != one)


def check_labels(columns: Sequence[Any]) -> None:
    """Two columns under different labels can't be matched by position."""
    labels = [index for column in columns if (index := index_of(column)) is not None]
    if any(not index.equals(labels[0]) for index in labels[1:]):
        raise ShapeError("two Series have different indexes; align them first, or pass .to_numpy() to match them by position")


def table(columns: Mapping[str, Sequence[Any]]) -> Any:
    """A data frame of pandas, or of polars where there is no pandas."""
    try:
        import pandas
    except ImportError:
        import polars

        return polars.DataFrame(columns, strict=False)
    return pandas.DataFrame(columns)
