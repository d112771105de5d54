"""Which prefixes are worth reading once for many rows, and those that were read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from .packs import Prefix, Share

LEAST = 16  # tokens: sharing fewer saves less than it costs
FEW = 3  # rows that must have a prefix in common before it is read apart from them

Tokens = tuple[int, ...]


def common(one: Tokens, other: Tokens) -> int:
    """How many tokens two texts begin with in common.

    >>> common((1, 2, 3), (1, 2, 4, 5))
    2
    """
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def worthwhile(texts: Sequence[Tokens]) -> dict[Tokens, int]:
    """How many first tokens of each text should be read together with other texts: those that save the most reading.

    At least one token of a text is always left to be read by itself, since its answer is chosen after it.

    >>> worthwhile([(*range(20), 1), (*range(20), 2), (*range(20), 3), (9,)])[(*range(20), 2)]
    20
    """
    ordered = sorted(texts)
    steps = [common(one, other) for one, other in pairwise(ordered)]
    return {text: _best(place, steps, len(text) - 1) for place, text in enumerate(ordered)}


def _best(place: int, steps: Sequence[int], most: int) -> int:
    """The length of the prefix that saves most for the text at ``place``, 0 for none."""
    reach = sorted((*_falling(steps[place:]), *_falling(steps[:place][::-1])), reverse=True)
    savings = [(count * min(length, most), min(length, most)) for count, length in enumerate(reach, 1)]
    fit = [saving for count, saving in enumerate(savings, 1) if count + 1 >= FEW and saving[1] >= LEAST]
    return max(fit)[1] if fit else 0


def _falling(steps: Sequence[int]) -> list[int]:
    """What a text has in common with each next one, given what neighbors have in common."""
    found: list[int] = []
    for step in steps:
        found.append(min(step, found[-1]) if found else step)
        if found[-1] < LEAST:
            break
    return found


def places(ids: Tokens) -> list[int]:
    """A number for each beginning of a text, block by block: equal beginnings have equal ones."""
    found, place = [], 0
    for end in range(LEAST, len(ids) + 1, LEAST):
        found.append(place := hash((place, ids[end - LEAST : end])))
    return found


class Prefixes:
    """Prefixes that were read, the least recently used forgotten first when they take more than ``room`` bytes.

    Each is found by its blocks, so looking is quick however many are kept. Of several with the same block the last one is.
    """

    def __init__(self, room: int) -> None:
        self._room, self._taken = room, 0
        self._kept: OrderedDict[Tokens, Prefix] = OrderedDict()
        self._owners: dict[int, Tokens] = {}

    def find(self, text: Tokens) -> Share:
        """A beginning of ``text`` that is kept, as long as there is one, leaving at least one token."""
        for place in reversed(places(text)):
            if (ids := self._owners.get(place)) is not None:
                length = min(common(ids, text), len(text) - 1)
                self._kept.move_to_end(ids)
                return Share(self._kept[ids], length) if length >= LEAST else Share()
        return Share()

    def keep(self, prefix: Prefix) -> None:
        """Remember ``prefix``; a shorter one that begins it is no longer needed."""
        mine = places(prefix.ids)
        if not mine:
            return  # it is too short to be found again
        begun = {prefix.ids, *(self._owners[place] for place in mine if place in self._owners)}
        for ids in [ids for ids in begun if prefix.ids[: len(ids)] == ids and ids in self._kept]:
            self._forget(ids)
        self._kept[prefix.ids] = prefix
        self._taken += prefix.memory.nbytes
        self._owners.update(dict.fromkeys(mine, prefix.ids))
        while self._kept and self._taken > self._room:
            self._forget(next(iter(self._kept)))

    def _forget(self, ids: Tokens) -> None:
        self._taken -= self._kept.pop(ids).memory.nbytes
        for place in places(ids):
            if self._owners.get(place) is ids:
                del self._owners[place]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
        self._owners.clear()
        self._taken = 0
