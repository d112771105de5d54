"""What a server was asked, and what came of it, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakSet

from ..errors import MalformedError, ModelError, TimedOutError, UnreachableError
from ..requests import Usage


@dataclass(eq=False)
class Counts:
    """What became of the requests that were sent for one model.

    ``answered`` were answered and ``refused`` answered by an error; ``timed_out`` got no answer in time and ``broken`` none
    that is whole, ``left`` were given up by whoever asked: these three may have been paid for all the same. ``sent`` are all
    of them, ``retried`` those that were further tries. ``prompted`` and ``written`` are the tokens read and written, as the
    server tells them.
    """

    answered: int = 0
    refused: int = 0
    timed_out: int = 0
    broken: int = 0
    left: int = 0
    retried: int = 0
    prompted: int = 0
    written: int = 0
    _refusals: WeakSet[ModelError] = field(default_factory=WeakSet, repr=False)

    @property
    def sent(self) -> int:
        """How many requests went out and are over."""
        return self.answered + self.refused + self.timed_out + self.broken + self.left

    def refuse(self, error: ModelError) -> None:
        """Hear that the server answered by another status than 200. A request that ends with ``error`` is that one."""
        self.refused += 1
        self._refusals.add(error)

    def end(self, error: BaseException | None) -> None:
        """Hear how a request ended."""
        match error:
            case None:
                self.answered += 1
            case TimedOutError(status=None):
                self.timed_out += 1
            case UnreachableError(status=None) | MalformedError(status=None):
                self.broken += 1
            case ModelError(status=status):  # without a status it was not sent
                self.refused += status is not None and error not in self._refusals
            case _:
                self.left += 1

    def spend(self, usage: Usage) -> None:
        """Hear what an answer took."""
        self.prompted += usage.prompt_tokens
        self.written += usage.completion_tokens
