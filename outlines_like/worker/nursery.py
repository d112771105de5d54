"""A process that holds what workers have in common and makes them: one that is forked from it is there at once.

One nursery holds the imports. A nursery for each model is forked from it, loads the model, and makes that model's workers,
which so share the weights and are there without loading them.

A nursery has no threads, since the fork of a process with threads may find a lock taken for ever. Where there are some
nevertheless, or the system does not fork safely (macOS), what is made is a fresh process.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain

from .wire import HATCH, ORDER, REAPED

PR_SET_PDEATHSIG = 1
FORKS = sys.platform == "linux"
Serve = Callable[[int], None]  # what a child does: it takes the descriptor of its end of a socket
Wish = tuple[bytes, int, Sequence[int]]  # what to do, for which child, and its socket and log


def wish(control: socket.socket) -> Wish | None:
    """What the parent wants next; None when it is gone."""
    message, descriptors, *_ = socket.recv_fds(control, ORDER.size, 2)
    return (*ORDER.unpack(message), descriptors) if message else None


def tend(control: socket.socket, serve: Serve, fresh: Sequence[str] = (), first: Sequence[Wish] = ()) -> None:
    """Make and bury children as the parent says; when it is gone, end them all.

    ``fresh`` is the command of a child that is not forked, but for the descriptor. ``first`` is what was wished before.
    """
    children: dict[int, int] = {}
    settle()
    control.sendall(REAPED.pack(0, 0))
    for kind, ticket, descriptors in chain(first, iter(lambda: wish(control), None)):
        if kind == HATCH:
            children[ticket] = hatched(control, descriptors, serve, fresh)
        else:
            control.sendall(REAPED.pack(ticket, reaped(children.pop(ticket))))
    for child in children.values():
        reaped(child)


def settle() -> None:
    """Give memory back that a start took, and let nobody look for garbage among what stays, so that its pages stay shared."""
    gc.collect()
    gc.freeze()
    with suppress(AttributeError):  # other systems than Linux have no such function
        ctypes.CDLL(None).malloc_trim(0)


def forkable() -> bool:
    """Whether the fork of this process is safe."""
    return FORKS and len(os.listdir("/proc/self/task")) == 1


def hatched(control: socket.socket, descriptors: Sequence[int], serve: Serve, fresh: Sequence[str]) -> int:
    """The process number of a new child, whose socket and log are given."""
    wire, log = descriptors
    again = not forkable()
    here = os.getpid()
    child = os.fork()
    if not child:
        control.close()
        born(wire, log, here, serve, fresh if again else ())
    os.close(wire)
    os.close(log)
    return child


def born(wire: int, log: int, parent: int, serve: Serve, fresh: Sequence[str]) -> None:
    """Be a child until the end."""
    code = 1
    try:
        for stream in (1, 2):
            os.dup2(log, stream)
        if fresh:
            os.set_inheritable(wire, True)
            os.execv(fresh[0], [*fresh, str(wire)])
        die_with(parent)
        serve(wire)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def reaped(child: int) -> int:
    """How a child ended; one that has not is killed."""
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_with(parent: int) -> None:
    """End when the parent does, even if something else keeps its end of the socket open (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
