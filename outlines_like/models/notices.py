"""One line about what takes its time, where somebody looks: in a terminal or a notebook."""

from __future__ import annotations

import sys

WIPE = "\r\x1b[K"


class Notice:
    """A line on stderr that is written over, and wiped in the end."""

    def __init__(self, subject: str) -> None:
        self._subject = subject
        self._shown = ""

    def show(self, text: str) -> None:
        """Say what is going on."""
        if text != self._shown and watched():
            self._write(f"{WIPE}outlines_like: {self._subject}: {text} ...")
            self._shown = text

    def wipe(self) -> None:
        """Leave no trace."""
        if self._shown:
            self._write(WIPE)
            self._shown = ""

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def watched() -> bool:
    """Whether somebody looks."""
    return sys.stderr is not None and (sys.stderr.isatty() or in_notebook())


def in_notebook() -> bool:
    """Whether this code runs in a notebook's kernel."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"
