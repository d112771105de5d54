"""``python -m outlines_like.worker FD`` answers rows over a socket; ``... convert GGUF FOLDER`` converts a model."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from .wire import LENGTH, Cancel, Order, Ready, Report, Rows, Setup, ask_of, frame, order_of

if TYPE_CHECKING:
    from .engine import Engine

PR_SET_PDEATHSIG = 1


class Link:
    """The worker's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._stream = self._socket.makefile("rb")
        self._orders: SimpleQueue[Order] = SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Queue what the parent says; where it is gone, end at once."""
        while len(head := self._stream.read(LENGTH.size)) == LENGTH.size:
            body = self._stream.read(*LENGTH.unpack(head))
            self._orders.put(order_of(body))
        os._exit(0)

    def wait(self) -> Order:
        """The next order."""
        return self._orders.get()

    def pending(self) -> bool:
        """Whether an order has come."""
        return not self._orders.empty()

    def send(self, report: Report) -> None:
        """Tell the parent."""
        self._socket.sendall(frame(report))


def die_with_parent() -> None:
    """End when the parent does, even if something else keeps its end of the socket open (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(link: Link) -> None:
    """Load the model that the parent names, then answer for ever."""
    setup = link.wait()
    assert isinstance(setup, Setup)
    from .loading import load  # importing torch takes seconds; the socket is watched meanwhile

    engine = load(setup)
    link.send(Ready())
    while True:
        while engine.idle or link.pending():
            obey(engine, link.wait())
        news = engine.step()
        if news.answers or news.faults:
            link.send(news)


def obey(engine: Engine, order: Order) -> None:
    """Do what the parent wants."""
    if isinstance(order, Rows):
        engine.take([ask_of(row) for row in order.rows])
    elif isinstance(order, Cancel):
        engine.drop(order.ids)


def main(arguments: list[str]) -> None:
    """Be a worker, or convert a model."""
    die_with_parent()
    if arguments[0] == "convert":
        from .loading import convert

        convert(Path(arguments[1]), Path(arguments[2]))
    else:
        serve(Link(int(arguments[0])))


if __name__ == "__main__":
    main(sys.argv[1:])
