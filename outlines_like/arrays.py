"""Arrays to rows and back. Pure NumPy; no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from . import frames
from .errors import ShapeError, SignatureError
from .requests import Message
from .signatures import Argument, Signature

Array = npt.NDArray[np.object_]
Shape = tuple[int, ...]


class Leaf(NamedTuple):
    """One element, whatever its value looks like.

    >>> import outlines_like as ol
    >>> ol.vectorize(len)(ol.Leaf(["a", "b"]))
    2
    """

    value: Any


class Call(NamedTuple):
    """The arguments of one row."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Grid(NamedTuple):
    """The rows of a call and the shape they came in. ``core`` has the sizes of the core dimensions."""

    calls: list[Call]
    shape: Shape
    core: dict[str, int]


def is_message(value: Any) -> bool:
    """Whether ``value`` is one turn of a conversation."""
    return isinstance(value, Message) or (isinstance(value, dict) and "role" in value)


def is_conversation(value: Any) -> bool:
    """Whether ``value`` is one conversation: a list or tuple of messages and nothing else."""
    return isinstance(value, (list, tuple)) and len(value) > 0 and all(map(is_message, value))


def is_array(value: Any) -> bool:
    """Whether ``value`` is mapped over. All else is one element."""
    if isinstance(value, (list, tuple, range)):
        return not isinstance(value, Leaf) and not is_conversation(value)
    return isinstance(value, np.ndarray) or frames.is_series(value)


def cells(value: Any) -> Array:
    """``value`` as an object array of native Python objects."""
    if isinstance(value, np.ndarray):
        return native(value.astype(object))
    if isinstance(value, Leaf):
        return whole(value)
    if not is_array(value):
        return filled([value.item() if isinstance(value, np.generic) else value], ())
    if frames.is_series(value):
        return native(frames.to_array(value))
    return nested(value, ())


def native(array: Array) -> Array:
    """The same array with NumPy's scalars made Python's. Cells are not opened."""
    if not any(issubclass(kind, np.generic) for kind in set(map(type, array.flat))):
        return array
    return filled([cell.item() if isinstance(cell, np.generic) else cell for cell in array.flat], array.shape)


def nested(value: Sequence[Any], at: Shape) -> Array:
    """Nested lists as one array. ``at`` is where this list stands in the whole."""
    kinds = set(map(type, value))
    if not any(map(may_nest, kinds)) or not any(is_array(item) for item in value):
        return native(filled([item.value if isinstance(item, Leaf) else item for item in value], (len(value),)))
    parts = [cells(item) if not isinstance(item, (list, tuple)) else part_of(item, (*at, i)) for i, item in enumerate(value)]
    for i, part in enumerate(parts):
        if part.shape != parts[0].shape:
            raise ShapeError(
                f"the list is ragged: item {(*at, i)} has shape {part.shape} but item {(*at, 0)} has shape {parts[0].shape}; "
                "give every sublist the same length, or wrap what is one element in Leaf(...)"
            )
    return np.stack(parts)


def may_nest(kind: type) -> bool:
    """Whether values of this type can be arrays within a list; strings and numbers, the usual ones, can't."""
    return kind not in (str, int, float, bool, bytes, dict, type(None))


def part_of(item: Sequence[Any], at: Shape) -> Array:
    """An item of a list: a list of its own, or one conversation."""
    return nested(item, at) if is_array(item) else cells(item)


def filled(values: Iterable[Any], shape: Shape) -> Array:
    """An object array filled by index, so that no value is ever opened."""
    values = list(values)
    return np.fromiter(values, dtype=object, count=len(values)).reshape(shape)


def flatten(arguments: Sequence[Argument], signature: Signature | None, excluded: Iterable[int | str] = ()) -> Grid:
    """Broadcast all arguments against each other and list the calls in C order."""
    check_count(arguments, signature)
    core: dict[str, int] = {}
    folded: list[Array] = []
    for argument in arguments:
        alone = argument.name in excluded or argument.place in excluded
        column = whole(argument.value) if alone else cells(argument.value)
        dims = signature.dims(argument.name, argument.place) if signature and not alone else ()
        folded.append(fold(column, dims, core, argument.name))
    shape = broadcast(folded, arguments)
    return Grid(calls(folded, shape, arguments), shape, core)


def whole(value: Any) -> Array:
    """``value`` as one element."""
    return filled([value.value if isinstance(value, Leaf) else value], ())


def columns(arguments: Sequence[Argument], signature: Signature | None, excluded: Iterable[int | str] = ()) -> list[Any]:
    """The data frame columns among the arguments that are mapped over cell by cell."""
    mapped = [a for a in arguments if a.name not in excluded and a.place not in excluded]
    return [a.value for a in mapped if frames.is_series(a.value) and not (signature and signature.dims(a.name, a.place))]


def check_count(arguments: Sequence[Argument], signature: Signature | None) -> None:
    """A signature without names lists every positional argument."""
    if signature is None or any(slot.name for slot in signature.inputs):
        return
    given = sum(argument.keyword is None for argument in arguments)
    if given > len(signature.inputs):
        raise TypeError(f"wrong number of positional arguments: {given} for a signature of {len(signature.inputs)}")


def fold(column: Array, dims: tuple[str, ...], core: dict[str, int], name: str) -> Array:
    """Make each core part of ``column`` one cell, and note the sizes of its dimensions in ``core``."""
    needed = sum(not dim.endswith("?") for dim in dims)
    if column.ndim < needed:
        raise ShapeError(f"{name} has shape {column.shape} but its signature takes {needed} dimensions {dims}; give it more")
    dims = dims[len(dims) - min(len(dims), column.ndim) :]
    if not dims:
        return column
    loop, sizes = column.shape[: -len(dims)], column.shape[-len(dims) :]
    for dim, size in zip(dims, sizes, strict=True):
        label = dim.rstrip("?")
        wanted = int(label) if label.isdigit() else core.setdefault(label, size)
        if wanted != size:
            raise ShapeError(f"{name} has size {size} in its core dimension {label!r}, which has size {wanted} elsewhere")
    return filled((column[index] for index in np.ndindex(*loop)), loop)


def broadcast(columns: Sequence[Array], arguments: Sequence[Argument]) -> Shape:
    """The shape of all columns together."""
    try:
        return np.broadcast_shapes(*(column.shape for column in columns))
    except ValueError:
        shapes = ", ".join(f"{a.name} has shape {c.shape}" for a, c in zip(arguments, columns, strict=True) if c.shape)
        raise ShapeError(f"{shapes}; they do not broadcast. For every pair, give one of them a trailing axis of 1.") from None


def calls(columns: Sequence[Array], shape: Shape, arguments: Sequence[Argument]) -> list[Call]:
    """One call a row. Keywords that are the same for all rows are one dict."""
    by_position = [c for c, a in zip(columns, arguments, strict=True) if a.keyword is None]
    by_keyword = {a.keyword: c for c, a in zip(columns, arguments, strict=True) if a.keyword is not None}
    n = int(np.prod(shape, dtype=int))
    rows = zip(*(spread(column, shape) for column in by_position), strict=True) if by_position else repeat((), n)
    if not any(column.shape for column in by_keyword.values()):
        same = {name: column[()] for name, column in by_keyword.items()}
        return [Call(args, same) for args in rows]
    values = zip(*(spread(column, shape) for column in by_keyword.values()), strict=True)
    return [Call(args, dict(zip(by_keyword, row, strict=True))) for args, row in zip(rows, values, strict=True)]


def spread(column: Array, shape: Shape) -> list[Any]:
    """The cells of ``column``, broadcast to ``shape``, in C order."""
    if not column.shape:
        return [column[()]] * int(np.prod(shape, dtype=int))
    return list(np.broadcast_to(column, shape).flat)


def unflatten(values: Sequence[Any], shape: Shape) -> Any:
    """Undo :func:`flatten`: the same shape, nothing squeezed; a scalar call gives a scalar."""
    return filled(values, shape) if shape else values[0]


def expand(values: Sequence[Any], dims: tuple[str, ...], shape: Shape, core: dict[str, int], samples: int | None) -> Any:
    """Lay out values that are arrays themselves: loop, then core dimensions, then samples.

    Values are arrays of the core's shape; None and errors fill theirs.
    """
    parts = [value if value is None or isinstance(value, Exception) else cells(value) for value in values]
    sizes = core_sizes([part for part in parts if isinstance(part, np.ndarray)], dims, core)
    out = np.empty((len(parts), *sizes), dtype=object)
    for i, part in enumerate(parts):
        out[i] = part
    out = out.reshape(*shape, *sizes)
    return np.moveaxis(out, len(shape) - 1, -1) if samples is not None else out


def core_sizes(parts: Sequence[Array], dims: tuple[str, ...], core: dict[str, int]) -> Shape:
    """The sizes of an output's core dimensions, the same in every row."""
    known = dict(core)
    for part in parts:
        if part.ndim != len(dims):
            raise SignatureError(f"the function returned shape {part.shape}; its signature says {len(dims)} dimensions {dims}")
        for dim, size in zip(dims, part.shape, strict=True):
            wanted = int(dim) if dim.isdigit() else known.setdefault(dim, size)
            if wanted != size:
                raise SignatureError(f"the function returned size {size} in core dimension {dim!r}, elsewhere of size {wanted}")
    return tuple(int(dim) if dim.isdigit() else known.get(dim, 0) for dim in dims)


def index_of(row: int, shape: Shape) -> Shape:
    """Where row number ``row`` stands in an array of ``shape``."""
    return tuple(int(k) for k in np.unravel_index(row, shape)) if shape else ()


def plain(value: Any) -> Any:
    """A value as JSON in which different values never look the same; TypeError if it has no stable text.

    >>> plain("a"), plain(("a", b"a"))
    ('a', ['tuple', ['a', ['bytes', '61']]])
    """
    if value is None or type(value) in (str, int, bool):
        return value
    kind = type(value).__name__
    if type(value) in (float, complex):
        return [kind, repr(value)]
    if type(value) in (bytes, bytearray):
        return [kind, value.hex()]
    if type(value) in (list, tuple):
        return [kind, [plain(item) for item in value]]
    if type(value) in (set, frozenset):
        return [kind, sorted((plain(item) for item in value), key=repr)]
    if isinstance(value, dict) and all(type(name) is str for name in value):
        return ["dict", {name: plain(item) for name, item in value.items()}]
    if isinstance(value, np.ndarray):
        return [kind, value.shape, plain(value.tolist())]
    raise TypeError(f"{kind} {value!r:.60} has no stable text")
