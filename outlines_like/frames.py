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

    cells = value.tolist() if hasattr(value, "tolist") else series(value).to_list()
    return np.fromiter(cells, dtype=object, count=len(cells))


def index_of(value: Any) -> Any:
    """The labels of the rows, where there are any."""
    pandas = sys.modules.get("pandas")
    return value.index if pandas is not None and isinstance(value, pandas.Series) else None


def like(columns: Sequence[Any], values: Any) -> Any:
    """``values`` as a column like the first of ``columns``, under the same labels.

    Text and missing values get the library's own text type; any other values stay the objects that they are.
    """
    import narwhals

    first, cells = series(columns[0]), values.tolist()
    plain = all(cell is None or isinstance(cell, str) for cell in cells)
    kind = narwhals.String() if plain else narwhals.Object()
    made = narwhals.new_series(first.name, cells, kind, backend=first.implementation).to_native()
    if (labels := index_of(columns[0])) is not None:
        made.index = labels
    return made


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
