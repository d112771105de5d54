"""Time and memory that code of a model's maker may take: its chat template is a program, if one in a sandbox."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

SECONDS = 1.0
BYTES = 64 << 20


class OutOfBounds(Exception):
    """What runs takes too much."""


def interrupt(*_: Any) -> NoReturn:
    """End what runs."""
    raise OutOfBounds(f"it takes more than {SECONDS:g} s")


@contextmanager
def bounded() -> Iterator[None]:
    """End what runs inside with an error when it takes too long or too much memory (which is known on Linux only)."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals do not come here
        return
    limits = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        confine(limits[1])
        signal.setitimer(signal.ITIMER_REAL, SECONDS, SECONDS / 10)  # again, should the template have swallowed it
        yield
    except MemoryError:
        raise OutOfBounds(f"it takes more than {BYTES >> 20} MiB of memory") from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def confine(most: int) -> None:
    """Let this process grow by so many bytes and no more."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        wanted = pages * os.sysconf("SC_PAGE_SIZE") + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))
