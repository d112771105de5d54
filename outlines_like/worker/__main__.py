"""``python -m outlines_like.worker``: what the parent starts processes for.

``nursery FD`` makes nurseries of models, ``rear FD`` is one, ``serve FD`` is a worker, ``convert GGUF FOLDER`` converts.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from pathlib import Path

from .nursery import FORKS, die_with, tend
from .serving import FRESH, rear, serve


def nursery(descriptor: int) -> None:
    """Make nurseries of models, which will find imported what they need."""
    if FORKS:
        from .loading import share

        share(sys.maxsize)  # of many, a part is one thread, which is the one that there is
    tend(socket.socket(fileno=descriptor), rear, [*FRESH, "rear"])


def main(task: str, *arguments: str) -> None:
    """Do what the parent started this process for."""
    die_with(os.getppid())
    gc.disable()  # hardly anything that is made at a start is garbage, and looking for it takes a quarter of the time
    if task == "convert":
        from .loading import convert

        convert(*map(Path, arguments))
    else:
        {"nursery": nursery, "rear": rear, "serve": serve}[task](*map(int, arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
