"""The fast way to run rows, for models with ordinary full attention: a slot of keys and values for each row.

Everything that the running rows write and that new rows have to read goes through the model in one pass, end to end
without padding. The next row takes the place of a finished one at once, samples of one prompt are forks of one slot,
and prefixes that rows share are read and held once (see ``packs``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from ..requests import Completion
from .batches import Batch, Net
from .linears import precise
from .packs import Pack, Piece, Prefix, Share, Store
from .prefixes import LEAST, Prefixes, Tokens, worthwhile
from .rows import Row
from .scoring import Quiz, logarithms

PREFILL = 512  # tokens of new rows that are read beside running ones in one pass
SCORED = 1024  # tokens of quizzes that are read in one pass
NAME = "outlines_like"
FOREIGN = ("softcap", "s_aux", "sliding_window")  # kinds of attention that are computed otherwise
COLUMNS, SLOTS = 64, 16  # slots grow by so much


def packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, *, pack: Pack, scaling: float | None = None, **rest: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, over a pack's tokens."""
    if any(rest.get(name) is not None for name in FOREIGN):
        raise TypeError(f"{type(module).__name__} has an attention of its own kind")
    return pack.attend(module.layer_idx, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(NAME, packed_attention)


def keeping(memory: Tensor | None) -> Store:
    """What puts a pack's keys and values into ``memory``, if there is one."""

    def store(layer: int, key: Tensor, value: Tensor) -> None:
        if memory is not None:
            memory[layer, 0], memory[layer, 1] = key, value

    return store


def prolonged(piece: Piece, memory: Tensor) -> Share:
    """What a piece shared and what it read, as one prefix."""
    before, length = piece.share.prefix, piece.share.length
    whole = torch.cat([before.memory[..., :length, :], memory], -2) if before else memory
    return Share(Prefix((), whole), whole.shape[-2])


class PackedNet:
    """A model that reads packs. ``shape`` is layers, heads and width of its keys."""

    def __init__(self, net: Net, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        self.model, self.device = net.model, net.device
        self._head = precise(net.model)
        self.shape, self.dtype = shape, dtype

    def room(self, slots: int, columns: int) -> Tensor:
        """Keys and values for so many rows and tokens."""
        layers, heads, width = self.shape
        return torch.zeros(layers, 2, slots, heads, columns, width, dtype=self.dtype, device=self.device)

    def exact(self, pack: Pack) -> Tensor:
        """The logarithms of chances, from logits in float32."""
        if self._head is None:
            return logarithms(self.read(pack))
        self._head.exact = True
        try:
            return logarithms(self.read(pack))
        finally:
            self._head.exact = False

    def read(self, pack: Pack) -> Tensor:
        """Logits where the pack wants them."""
        out = self.model(
            input_ids=pack.ids[None],
            position_ids=pack.positions[None],
            use_cache=False,
            logits_to_keep=pack.lasts,
            pack=pack,
        )
        logits: Tensor = out.logits[0]
        return logits

    def prefix(self, ids: Tokens, base: Share) -> Prefix:
        """Read a prefix that goes on where ``base`` ends."""
        memory = self.room(1, len(ids))[:, :, 0]
        if base.prefix:
            memory[..., : base.length, :] = base.prefix.memory[..., : base.length, :]
        rest = keeping(memory[..., base.length :, :])
        self.read(Pack([Piece(ids[base.length :], share=base)], rest, device=self.device))
        return Prefix(ids, memory)


def packable(net: Net) -> PackedNet | None:
    """The same model as a reader of packs, if its answers are the same that way; it is tried out on a few tokens."""
    if not net.plain or not net.model._supports_attention_backend:
        return None
    start, *ends = trial(net.model.config.get_text_config().vocab_size)
    batch = Batch.read(net, [start + end for end in ends])
    shapes = {part.shape[1::2] for layer in batch.layers for part in (layer.keys, layer.values)}
    if len(shapes) != 1:
        return None
    heads, width = shapes.pop()
    before = net.model.config._attn_implementation
    packed = PackedNet(net, (len(batch.layers), heads, width), batch.layers[0].keys.dtype)
    net.model.set_attn_implementation(NAME)
    try:
        share = Share(packed.prefix(start, Share()), len(start))
        got = packed.read(Pack([Piece(end, share=share) for end in ends], keeping(None), device=net.device))
        if close(got, batch.logits):
            return packed
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError):
        pass
    net.model.set_attn_implementation(before)
    return None


def trial(size: int) -> list[Tokens]:
    """A beginning and two ends of texts, of tokens from all over the vocabulary: its first ones are often never used."""
    words = tuple(size * k // 12 for k in range(1, 12))
    return [words[:6], words[6:10], words[10:]]


def close(one: Tensor, other: Tensor) -> bool:
    """Whether two computations of the same logits agree, as far as their precision lets them."""
    return bool((one.float() - other.float()).abs().mean() <= 0.2 * other.float().std())


class Waiting(Protocol):
    """Something with a text to be read."""

    @property
    def text(self) -> Tokens:
        """The text."""


class Outlook:
    """How many first tokens of each waiting text should be read apart, for others that have them too."""

    def __init__(self) -> None:
        self._wanted: dict[Waiting, int] = {}

    def see(self, waiting: Sequence[Waiting]) -> None:
        """Take in what waits."""
        if any(one not in self._wanted for one in waiting):
            best = worthwhile([one.text for one in waiting])
            self._wanted = {one: best[one.text] for one in waiting}

    def wanted(self, one: Waiting) -> int:
        """How many tokens of one of them."""
        return self._wanted.get(one, 0)


@dataclass(slots=True, eq=False)
class Seat:
    """A running row, the text it came with, the prefix that it shares, and how many tokens of its own stand in its slot."""

    row: Row
    text: Tokens
    share: Share
    length: int

    def __post_init__(self) -> None:
        self.row.seen = self.share.length + self.length

    def grow(self) -> None:
        """All of the row was read."""
        self.length += len(self.row.unread)
        self.row.seen = self.share.length + self.length


class Slots:
    """Runs rows of a model that reads packs. The place of a row in ``rows`` is the number of its slot."""

    def __init__(self, net: PackedNet, room: int) -> None:
        self._net, self.prefixes = net, Prefixes(room)
        self._seats: list[Seat] = []
        self._memory = net.room(0, 0)
        self._rows, self._quizzes = Outlook(), Outlook()
        self.logits = torch.empty(0)
        self.prefilled = 0

    @property
    def rows(self) -> list[Row]:
        """The rows that run."""
        return [seat.row for seat in self._seats]

    def pick(self, waiting: Sequence[Row], free: int, room: int) -> list[Row]:
        """Which waiting rows to let in now: the oldest, as many as one pass may read and memory holds."""
        self._rows.see(waiting)
        group: list[Row] = []
        tokens: dict[Tokens, int] = {}
        width = max((seat.row.size - seat.share.length for seat in self._seats), default=0)
        for row in waiting:
            text, reach = row.text, self._reach(row, self._rows)
            tokens.setdefault(text, len(text) - reach)
            width = max(width, row.size - reach)
            held = (len(self._seats) + len(group) + 1) * width
            if len(group) == free or (held > room and (group or self._seats)) or (group and sum(tokens.values()) > PREFILL):
                break
            group.append(row)
        return group

    def _reach(self, waiting: Waiting, outlook: Outlook) -> int:
        """How many first tokens of a text are read apart from the rest, or need not be read."""
        return max(outlook.wanted(waiting), self.prefixes.find(waiting.text).length)

    def advance(self, group: Sequence[Row]) -> None:
        """Read what each running row wrote last, and the texts of new rows, each different one once."""
        fresh = self._fork(group)
        going, more = self._going()
        texts = self._opened(fresh)
        logits = self._read([*going, *more, *texts.values()], len(going))
        for seat in self._seats:
            seat.grow()
        self._seats += [Seat(row, row.text, texts[row.text].share, len(texts[row.text].ids)) for row in fresh]
        self._copy({slot: texts[row.text].slot for slot, row in enumerate(fresh, len(going))})
        ends = {piece.slot: place for place, piece in enumerate([*going, *more])}
        places = {text: place for place, text in enumerate(texts, len(going) + len(more))}
        self.logits = logits[[*ends.values(), *(places[row.text] for row in fresh)]]

    def _going(self) -> tuple[list[Piece], list[Piece]]:
        """What running rows go on with: one token each, and what some have beyond that."""
        unread = [seat.row.unread for seat in self._seats]
        pairs = list(zip(unread, self._seats, strict=True))
        going = [Piece(ids[:1], slot, seat.length, seat.share) for slot, (ids, seat) in enumerate(pairs)]
        more = [Piece(ids[1:], slot, seat.length + 1, seat.share) for slot, (ids, seat) in enumerate(pairs) if len(ids) > 1]
        return going, more

    def _fork(self, group: Sequence[Row]) -> list[Row]:
        """Give rows a copy of a slot if a running row began with the same text, of which only the end is read again.

        Return the other rows.
        """
        if not group:
            return []
        known = {seat.text: slot for slot, seat in enumerate(self._seats) if len(seat.text) > seat.share.length + 1}
        forks = [row for row in group if row.text in known]
        self._reserve(len(self._seats) + len(group), 0)
        self._copy({slot: known[row.text] for slot, row in enumerate(forks, len(self._seats))})
        shares = [self._seats[known[row.text]].share for row in forks]
        self._seats += [
            Seat(row, row.text, share, len(row.text) - share.length - 1) for row, share in zip(forks, shares, strict=True)
        ]
        self.prefilled += len(forks)
        return [row for row in group if row.text not in known]

    def _opened(self, rows: Sequence[Row]) -> dict[Tokens, Piece]:
        """What has to be read for new rows, by their texts."""
        texts: dict[Tokens, Piece] = {}
        for slot, row in enumerate(rows, len(self._seats)):
            if row.text not in texts:
                share = self._share(row, self._rows)
                texts[row.text] = Piece(row.text[share.length :], slot, 0, share)
        self.prefilled += sum(len(piece.ids) for piece in texts.values())
        return texts

    def _share(self, waiting: Waiting, outlook: Outlook) -> Share:
        """The prefix of a text: the longest that is kept, or a longer one, read now, that others will have too."""
        found, wanted = self.prefixes.find(waiting.text), outlook.wanted(waiting)
        if wanted < found.length + LEAST:
            return found
        prefix = self._net.prefix(waiting.text[:wanted], found)
        self.prefilled += wanted - found.length
        self.prefixes.keep(prefix)
        return Share(prefix, wanted)

    def score(self, quizzes: Sequence[Quiz]) -> list[Completion]:
        """Score the answers of the first quizzes, as many as one pass may read."""
        self._quizzes.see(quizzes)
        count, tokens = 0, 0
        for quiz in quizzes:
            tokens += len(quiz.text) - self._reach(quiz, self._quizzes) + sum(map(len, quiz.tails))
            if count and tokens > SCORED:
                break
            count += 1
        return self._scored(quizzes[:count])

    def _scored(self, quizzes: Sequence[Quiz]) -> list[Completion]:
        shares = [self._share(quiz, self._quizzes) for quiz in quizzes]
        pieces = [Piece(quiz.text[share.length :], share=share) for quiz, share in zip(quizzes, shares, strict=True)]
        tails = any(quiz.tails for quiz in quizzes)
        memory = self._net.room(1, sum(len(piece.ids) for piece in pieces))[:, :, 0] if tails else None
        firsts = self._net.exact(Pack(pieces, keeping(memory), device=self._net.device))
        self.prefilled += sum(len(piece.ids) for piece in pieces)
        after = self._after(quizzes, pieces, memory) if memory is not None else [{} for _ in quizzes]
        return [quiz.completion(first, more) for quiz, first, more in zip(quizzes, firsts, after, strict=True)]

    def _after(self, quizzes: Sequence[Quiz], pieces: Sequence[Piece], memory: Tensor) -> list[dict[Tokens, Tensor]]:
        """What follows each token of each quiz's tails, read after the prompts that ``memory`` holds."""
        parts = torch.split(memory, [len(piece.ids) for piece in pieces], -2)
        shares = [prolonged(piece, part) for piece, part in zip(pieces, parts, strict=True)]
        tails = [Piece(tail, share=share) for quiz, share in zip(quizzes, shares, strict=True) for tail in quiz.tails]
        found = self._net.exact(Pack(tails, keeping(None), device=self._net.device, every=True))
        each = iter(torch.split(found, [len(tail.ids) for tail in tails]))
        return [{tail: next(each) for tail in quiz.tails} for quiz in quizzes]

    def _read(self, pieces: Sequence[Piece], going: int) -> Tensor:
        self._reserve(0, max(piece.start + len(piece.ids) for piece in pieces))
        memory, places = self._memory, list[Tensor]()

        def store(layer: int, key: Tensor, value: Tensor) -> None:
            rows, cols = places
            memory[layer, 0, rows, :, cols] = key.transpose(0, 1)
            memory[layer, 1, rows, :, cols] = value.transpose(0, 1)

        pack = Pack(pieces, store, memory, going=going, device=self._net.device)
        places += pack.rows, pack.cols  # not the pack: a circle would hold the memory until it is found
        return self._net.read(pack)

    def _said(self, slot: int, seat: Seat) -> Prefix:
        """What was read for a row and what it has said, as the beginning of what follows."""
        mine = self._memory[:, :, slot, :, : seat.length]
        theirs = seat.share.prefix.memory[..., : seat.share.length, :] if seat.share.prefix else mine[..., :0, :]
        return Prefix(seat.row.text[: seat.share.length + seat.length], torch.cat([theirs, mine], -2))

    def _reserve(self, slots: int, columns: int) -> None:
        """See that the slots suffice."""
        old = self._memory
        if slots > old.shape[2] or columns > old.shape[4]:
            self._memory = self._net.room(
                *(rounded(*pair) for pair in ((slots, SLOTS, old.shape[2]), (columns, COLUMNS, old.shape[4])))
            )
            self._memory[:, :, : old.shape[2], :, : old.shape[4]] = old

    def _copy(self, slots: dict[int, int]) -> None:
        """Copy slots: each key is filled from its value."""
        pairs = [(to, source) for to, source in slots.items() if to != source]
        if pairs:
            to, source = map(list, zip(*pairs, strict=True))
            length = max(self._seats[slot].length for slot in source)
            self._memory[:, :, to, :, :length] = self._memory[:, :, source, :, :length]

    def keep(self, rows: Iterable[Row]) -> None:
        """Let all other rows go. The last ones move into the slots that they leave."""
        chosen = set(rows)
        for slot, seat in enumerate(self._seats):
            if seat.row.ongoing and seat.row.finish and seat.row not in chosen:
                self.prefixes.keep(self._said(slot, seat))
        kept = [slot for slot, seat in enumerate(self._seats) if seat.row in chosen]
        moved = moves(kept)
        self._copy({to: source for source, to in moved.items()})
        order = sorted(kept, key=lambda slot: moved.get(slot, slot))
        self._seats = [self._seats[slot] for slot in order]
        if not kept:
            self._memory = self._net.room(0, 0)


def rounded(count: int, step: int, least: int) -> int:
    """The next multiple of ``step``, and no less than ``least``."""
    return max(least, -(-count // step) * step)


def moves(kept: Sequence[int]) -> dict[int, int]:
    """Which slots to move where, so that those kept are the first ones.

    >>> moves([0, 2, 5, 6])
    {5: 1, 6: 3}
    """
    holes = sorted(set(range(len(kept))) - set(kept))
    return dict(zip([slot for slot in kept if slot >= len(kept)], holes, strict=True))
