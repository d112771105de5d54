"""Many programs at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..calling import ON_ERROR
from ..checks import count
from ..errors import RowErrors
from ..events import Failure, last_values
from .evaluation import each_settled
from .runs import Visit

if TYPE_CHECKING:
    from .lm import LM

CONCURRENCY = 256


def check_batch(on_error: str, concurrency: int) -> None:
    """Refuse what a batch can't be run by, before anything is sent."""
    if on_error not in ON_ERROR:
        raise ValueError(f"on_error={on_error!r}; it is one of {', '.join(map(repr, ON_ERROR))}")
    count("concurrency", concurrency)


async def settled(lms: Sequence[LM], visit: Visit, concurrency: int) -> list[Any]:
    """Each program, run, or its failure."""
    return await last_values(each_settled(lms, visit, concurrency), len(lms))


def outcomes(values: Sequence[Any], lms: Sequence[LM], on_error: str) -> list[Any]:
    """The programs of a batch, and what became of those that failed."""
    whole = [value.error if isinstance(value, Failure) else value for value in values]
    errors: dict[tuple[int, ...], Exception] = {
        (i,): value.error for i, value in enumerate(values) if isinstance(value, Failure)
    }
    if errors and on_error == "raise":
        first, error = next(iter(errors.items()))
        text = f"{len(errors)} of {len(lms)} programs failed; the first, at {first}: {type(error).__name__}: {error}"
        raise RowErrors(text, errors, whole)
    return [None if (i,) in errors and on_error == "missing" else value for i, value in enumerate(whole)]
