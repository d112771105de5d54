"""Stands for a worker process: speaks its language without torch, and does what prompts tell it.

"echo ..." is answered at once, "slow echo ..." after a moment, "hold" never, "count N" with a text that grows. "die" ends
the process, "die once FILE WAY" only if FILE is not there yet, "die by WAY" in that way, "stop" lets it hang. "how many?"
tells how many rows it was given and how many of them were cancelled; "partial FILE" shows some text, dies the first time,
and shows less before it answers the second time. The model "/refused" can't be loaded, "/never" takes for ever.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

from outlines_like.requests import Completion
from outlines_like.worker.nursery import tend
from outlines_like.worker.serving import received
from outlines_like.worker.wire import (
    LENGTH,
    Answer,
    Ask,
    Cancel,
    Fault,
    News,
    Ready,
    Refused,
    Rows,
    Setup,
    ask_of,
    frame,
    order_of,
)


def first_time(file: str) -> bool:
    """Whether nobody has come this way before."""
    try:
        Path(file).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def die(way: str = "kill") -> None:
    """End, by default as the out-of-memory killer would have it."""
    match way:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(3)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
    raise RuntimeError("as the script says")


class Actor:
    """Plays the worker."""

    def __init__(self, wire: socket.socket) -> None:
        self.wire = wire
        self.rows = self.cancelled = 0

    def say(self, ask: Ask, text: str, done: bool = True) -> None:
        """Tell a text."""
        self.wire.sendall(frame(News([Answer(ask.id, Completion(text, "stop" if done else None))])))

    def obey(self, ask: Ask) -> None:
        """Do what a prompt says."""
        assert isinstance(ask.prompt, str)
        match ask.prompt.split():
            case ["die"]:
                die()
            case ["die", "once", file, *way]:
                die(*way) if first_time(file) else self.say(ask, "alive")
            case ["die", "by", way]:
                die(way)
            case ["die", "after", count, "lines"]:
                print(*(f"line {number}" for number in range(int(count))), sep="\n", file=sys.stderr, flush=True)
                die("exit")
            case ["stop"]:
                die("stop")
            case ["stop", "once", file]:
                die("stop") if first_time(file) else self.say(ask, "alive")
            case ["slow", *_]:
                time.sleep(0.003)
                self.say(ask, ask.prompt)
            case ["count", _]:
                for number in range(100):
                    self.say(ask, " ".join(map(str, range(number + 1))), done=number == 99)
            case ["partial", file]:
                self.show(ask, first_time(file))
            case ["how", "many?"]:
                self.say(ask, f"{self.rows} rows, {self.cancelled} cancelled")
            case ["fault"]:
                self.wire.sendall(frame(News([], [Fault(ask.id, "ContextLengthError", "too long")])))
            case ["echo", *_]:
                self.say(ask, f"{ask.prompt} by {os.getpid()}" if "who" in ask.prompt else ask.prompt)

    def show(self, ask: Ask, first: bool) -> None:
        """Show a text that grows, and die in the middle of it the first time."""
        for text in ("one", "one two") if first else ("one", "one two three"):
            self.say(ask, text, done=False)
        die() if first else self.say(ask, "one two three four")


def rear(descriptor: int) -> None:
    """Make workers of one model."""
    control = socket.socket(fileno=descriptor)
    received(control)
    tend(control, main)


def main(descriptor: int) -> None:
    """Serve."""
    wire = socket.socket(fileno=descriptor)
    stream, actor = wire.makefile("rb"), Actor(wire)
    while len(head := stream.read(LENGTH.size)) == LENGTH.size:
        order = order_of(stream.read(*LENGTH.unpack(head)))
        if isinstance(order, Rows):
            actor.rows += len(order.rows)
            for row in order.rows:
                actor.obey(ask_of(row))
        elif isinstance(order, Cancel):
            actor.cancelled += len(order.ids)
        elif isinstance(order, Setup) and order.path == "/refused":
            wire.sendall(frame(Refused("NotFoundError", "no such model", "Look again.")))
            break
        elif isinstance(order, Setup) and order.path != "/never":
            wire.sendall(frame(Ready(os.getpid())))


if __name__ == "__main__":
    tend(socket.socket(fileno=int(sys.argv[1])), rear)
