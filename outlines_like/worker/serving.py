"""A worker's life: answer rows of the model that the parent names until it is gone. And that of a model's nursery."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue
from typing import TYPE_CHECKING, Self

from ..errors import ModelError
from .nursery import forkable, settle, tend, wish
from .wire import LENGTH, PULSE, Cancel, Loading, Order, Ready, Refused, Report, Rows, Setup, ask_of, frame, order_of

if TYPE_CHECKING:
    from .engine import Engine

FRESH = [sys.executable, "-P", "-m", "outlines_like.worker"]


class Link:
    """The worker's end of the socket."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._stream = self._socket.makefile("rb")
        self._orders: SimpleQueue[Order] = SimpleQueue()
        self._told = 0.0
        self.stage = ""

    def listen(self) -> Self:
        """Take in orders from now on."""
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def close(self) -> None:
        """Leave the socket to whoever else has it."""
        self._stream.close()
        self._socket.close()

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


def rear(descriptor: int) -> None:
    """Make workers of one model, which is loaded before the first one where that one can be forked."""
    control = socket.socket(fileno=descriptor)
    setup = received(control)
    if not (forkable() and on_cpu(setup)):
        return tend(control, serve, [*FRESH, "serve"])
    first = wish(control)
    assert first
    link = Link(os.dup(first[2][0]))  # the first worker's, as nobody else is there to say how far the loading is
    engine = loaded(link, setup)
    link.close()
    tend(control, lambda wire: answer(engine, setup, Link(wire).listen()), [*FRESH, "serve"], [first])


def received(control: socket.socket) -> Setup:
    """What a nursery is to load."""
    (length,) = LENGTH.unpack(control.recv(LENGTH.size, socket.MSG_WAITALL))
    setup = order_of(control.recv(length, socket.MSG_WAITALL))
    assert isinstance(setup, Setup)
    return setup


def on_cpu(setup: Setup) -> bool:
    """Whether a model runs on the processor, so that it survives a fork."""
    from .loading import devices

    return setup.device == "cpu" or (setup.device == "auto" and devices()[0] == "cpu")


def serve(descriptor: int) -> None:
    """Load the model that the parent names, then answer for ever."""
    link = Link(descriptor).listen()
    setup = link.wait()
    assert isinstance(setup, Setup)
    engine = loaded(link, setup)
    settle()
    answer(engine, setup, link)


def answer(engine: Engine, setup: Setup, link: Link) -> None:
    """Answer for ever."""
    from .loading import share

    share(setup.workers)
    gc.enable()
    link.send(Ready(os.getpid()))
    while True:
        while engine.idle or link.pending():
            obey(engine, link.wait())
        news = engine.step()
        if news.answers or news.faults or link.quiet:
            link.send(news)


def loaded(link: Link, setup: Setup) -> Engine:
    """The engine for a model. Where it is known why there is none, the parent is told."""
    try:
        with link.loading():
            from .loading import load  # it imports torch, which may take seconds

            return load(setup, link.enter)
    except ModelError as error:
        link.send(Refused.by(error))
        sys.exit(1)


def obey(engine: Engine, order: Order) -> None:
    """Do what the parent wants."""
    if isinstance(order, Rows):
        engine.take([ask_of(row) for row in order.rows])
    elif isinstance(order, Cancel):
        engine.drop(order.ids)
