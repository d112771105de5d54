"""A worker's life: load what the parent names, then answer rows until it is gone."""

from __future__ import annotations

import ctypes
import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING

from ..errors import ModelError
from .wire import LENGTH, PULSE, Cancel, Loading, Order, Ready, Refused, Report, Rows, Setup, ask_of, frame, order_of

if TYPE_CHECKING:
    from .engine import Engine


class Link:
    """The worker's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._stream = self._socket.makefile("rb")
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._told = 0.0
        self.stage = ""
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        """Queue what the parent says; where it is gone, end at once."""
        try:
            while len(head := self._stream.read(LENGTH.size)) == LENGTH.size:
                body = self._stream.read(*LENGTH.unpack(head))
                self._orders.put(order_of(body))
        except BaseException:  # a worker that hears nothing any more is of no use
            traceback.print_exc()
        os._exit(0)

    def wait(self) -> Order:
        """The next order."""
        return self._orders.get()

    def pending(self) -> bool:
        """Whether an order has come."""
        return not self._orders.empty()

    def send(self, report: Report) -> None:
        """Tell the parent."""
        self._told = time.monotonic()
        self._socket.sendall(frame(report))

    @property
    def quiet(self) -> bool:
        """Whether the parent has heard nothing for so long that it may worry."""
        return time.monotonic() - self._told > PULSE

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Tell the parent every second how far the loading is."""
        done = threading.Event()
        teller = threading.Thread(target=self._tell, args=[done])
        teller.start()
        try:
            yield
        finally:
            done.set()
            teller.join()

    def _tell(self, done: threading.Event) -> None:
        while not done.wait(PULSE):
            self.send(Loading(self.stage))

    def enter(self, stage: str) -> None:
        """Note what is being done."""
        self.stage = stage


def serve(descriptor: int) -> None:
    """Load the model that the parent names, then answer for ever."""
    link = Link(descriptor)
    setup = link.wait()
    assert isinstance(setup, Setup)
    with link.loading():
        engine = loaded(link, setup)
    settle()
    link.send(Ready(os.getpid()))
    while True:
        while engine.idle or link.pending():
            obey(engine, link.wait())
        news = engine.step()
        if news.answers or news.faults or link.quiet:
            link.send(news)


def loaded(link: Link, setup: Setup) -> Engine:
    """The engine for a model. Where it is known why there is none, the parent is told."""
    from .loading import load  # it imports torch, which may take seconds; the socket is watched meanwhile

    try:
        return load(setup, link.enter)
    except ModelError as error:
        link.send(Refused(type(error).__name__, str(error.args[0]), error.hint))
        sys.exit(1)


def settle() -> None:
    """Give memory back that loading took, and let nobody look for garbage among what stays."""
    gc.collect()
    gc.freeze()
    with suppress(AttributeError):  # other systems than Linux have no such function
        ctypes.CDLL(None).malloc_trim(0)


def obey(engine: Engine, order: Order) -> None:
    """Do what the parent wants."""
    if isinstance(order, Rows):
        engine.take([ask_of(row) for row in order.rows])
    elif isinstance(order, Cancel):
        engine.drop(order.ids)
