"""A live table of a stream, in terminals and notebooks."""

from __future__ import annotations

import html
import importlib
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .calling import Index
from .checks import count
from .events import Failure, Snapshot
from .models.notices import in_notebook
from .operators import Cells, chunks, text_of
from .streaming import Stream, curried

EVERY = 0.1  # seconds between two looks
LETTERS = 4  # that make a token, about
WIDTH = 60  # letters of a row that are shown
STATES = {"done": "green", "failed": "red", "running": "yellow"}


class Board:
    """What there is to see of a call: each row's state and last words, and how fast it goes."""

    def __init__(self, total: int, height: int) -> None:
        self.total, self.height = total, height
        self.rows: dict[Index, tuple[str, str]] = {}
        self.letters, self.start, self.now = 0, time.monotonic(), time.monotonic()

    def note(self, snapshots: Iterable[Snapshot[Any]]) -> None:
        """Take in what has come."""
        for index, value, done in snapshots:
            failed = isinstance(value, Failure | Exception)
            text = words(value)
            self.letters += 0 if failed else max(0, len(text) - len(self.rows.pop(index, ("", ""))[1]))
            self.rows[index] = ("failed" if failed else "done" if done else "running", text)
        self.now = time.monotonic()

    def count(self, state: str) -> int:
        """How many rows are in a state."""
        return sum(other == state for other, _ in self.rows.values())

    @property
    def title(self) -> str:
        """The whole in one line."""
        seconds = self.now - self.start
        rate = self.letters / LETTERS / seconds if seconds else 0
        counts = ", ".join(f"{self.count(state)} {state}" for state in STATES)
        return f"{self.total} rows: {counts}; about {rate:,.0f} tokens/s, {seconds:.1f} s"

    def lines(self) -> list[tuple[str, str, str]]:
        """Index, state and last words of the rows worth a look: what runs, then what came last."""
        rows = [(index, state, tail(text)) for index, (state, text) in self.rows.items()]
        rows.sort(key=lambda row: row[1] == "running")  # the others stay in the order in which they spoke
        return [(str(index), state, text) for index, state, text in sorted(rows[-self.height :])]

    def html(self) -> str:
        """The table as a notebook shows it."""
        cells = "".join(
            f'<tr><td>{index}</td><td style="color:{STATES[state]}">{state}</td>'
            f'<td style="text-align:left;font-family:monospace">{html.escape(text)}</td></tr>'
            for index, state, text in self.lines()
        )
        return f"<table><caption>{html.escape(self.title)}</caption>{cells}</table>"


def words(value: Any) -> str:
    """A value in one line."""
    value = value.error if isinstance(value, Failure) else value
    if isinstance(value, Exception):
        value = f"{type(value).__name__}: {value}"
    try:
        text = text_of(value) if value is not None else "None"
    except TypeError:
        text = repr(value)
    return " ".join(text.split())


def tail(text: str) -> str:
    """The last words of a text."""
    return text if len(text) <= WIDTH else "…" + text[-WIDTH:].partition(" ")[2]


@contextmanager
def notebook(board: Board) -> Iterator[Callable[[], object]]:
    """Show ``board`` under a cell; what it gives shows it anew."""
    ipython = importlib.import_module("IPython.display")
    handle = ipython.display(ipython.HTML(board.html()), display_id=True)
    yield lambda: handle.update(ipython.HTML(board.html()))


@contextmanager
def terminal(board: Board) -> Iterator[Callable[[], object]]:
    """Show ``board`` in a terminal; what it gives shows it anew."""
    try:
        from rich.console import Group
        from rich.live import Live
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        raise ImportError("watch needs rich: run `pip install 'outlines_like[watch]'`") from None

    def picture() -> Group:
        made = Table("row", "state", "last words")
        for index, state, text in board.lines():
            made.add_row(index, Text(state, STATES[state]), Text(text, overflow="ellipsis", no_wrap=True))
        return Group(Text(board.title), made)

    with Live(picture(), auto_refresh=False) as live:
        yield lambda: live.update(picture(), refresh=True)
    if not live.console.is_terminal:
        live.console.line()  # rich ends the last line in terminals only


@curried
def watch(stream: Stream[Any], *, height: int = 20) -> Any:
    """Show a live table of a stream and give its result, as :func:`collect` does.

    Which rows run, their last words, how many are done or failed, and how fast it goes (a token counts as four letters);
    ``height`` rows at most. It needs ``rich`` in a terminal, nothing in a notebook.

    >>> import outlines_like as ol
    >>> ol.models.fake().stream(["so it goes", "no"]) | ol.watch  # doctest: +ELLIPSIS
    2 rows: 2 done, 0 failed, 0 running; about ... tokens/s, ... s
    ┏━━━━━━┳━━━━━━━┳━━━━━━━━━━━━┓
    ┃ row  ┃ state ┃ last words ┃
    ┡━━━━━━╇━━━━━━━╇━━━━━━━━━━━━┩
    │ (0,) │ done  │ SO IT GOES │
    │ (1,) │ done  │ NO         │
    └──────┴───────┴────────────┘
    array(['SO IT GOES', 'NO'], dtype=object)
    """
    cells, board = Cells(stream.work), Board(len(stream.work.rows), count("height", height))
    with (notebook if in_notebook() else terminal)(board) as show:
        for chunk in stream | chunks(every=EVERY):
            board.note(chunk)
            for snapshot in chunk:
                cells.note(snapshot)
            show()
    return cells.work.result(cells.values)
