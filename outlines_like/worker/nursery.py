"""A process that holds the imports and makes workers: one that is forked from it is there at once.

It has no threads, since the fork of a process with threads may find a lock taken for ever. Where there are some
nevertheless, or the system does not fork safely (macOS), a worker is a fresh process.
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

from .wire import HATCH, ORDER, REAPED

PR_SET_PDEATHSIG = 1
Serve = Callable[[int], None]  # what a worker does: it takes the descriptor of its end of a socket


def tend(control: socket.socket, serve: Serve, fresh: Sequence[str] = ()) -> None:
    """Make and bury workers as the parent says; when it is gone, end them all.

    ``fresh`` is the command of a worker that is not forked, but for the descriptor.
    """
    children: dict[int, int] = {}
    gc.collect()
    gc.freeze()  # what is there already is never looked at again, so that its pages stay shared
    control.sendall(REAPED.pack(0, 0))
    while (message := socket.recv_fds(control, ORDER.size, 2))[0]:
        kind, ticket = ORDER.unpack(message[0])
        if kind == HATCH:
            children[ticket] = hatched(control, message[1], serve, fresh)
        else:
            control.sendall(REAPED.pack(ticket, reaped(children.pop(ticket))))
    for child in children.values():
        reaped(child)


def hatched(control: socket.socket, descriptors: Sequence[int], serve: Serve, fresh: Sequence[str]) -> int:
    """The process number of a new worker, whose socket and log are given."""
    wire, log = descriptors
    again = not (sys.platform == "linux" and len(os.listdir("/proc/self/task")) == 1)
    here = os.getpid()
    child = os.fork()
    if not child:
        control.close()
        born(wire, log, here, serve, fresh if again else ())
    os.close(wire)
    os.close(log)
    return child


def born(wire: int, log: int, parent: int, serve: Serve, fresh: Sequence[str]) -> None:
    """Be a worker until the end."""
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
    """How a worker ended; one that has not is killed."""
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_with(parent: int) -> None:
    """End when the parent does, even if something else keeps its end of the socket open (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
