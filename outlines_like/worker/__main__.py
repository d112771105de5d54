"""``python -m outlines_like.worker``: what the parent starts processes for.

``nursery FD`` makes nurseries of models, ``rear FD`` is one, ``serve FD`` is a worker, ``convert GGUF FOLDER`` converts, and
``fetch NAME`` says where the files of a model on the hub are.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
from pathlib import Path

from ..errors import ModelError
from .nursery import FORKS, die_with, tend
from .serving import FRESH, rear, serve
from .wire import Refused, pack


def nursery(descriptor: int) -> None:
    """Make nurseries of models, which will find imported what they need."""
    if FORKS:
        from .loading import share

        share(sys.maxsize)  # of many, a part is one thread, which is the one that there is
    tend(socket.socket(fileno=descriptor), rear, [*FRESH, "rear"])


def fetch(name: str, pickled: bool) -> None:
    """Say where the files of a model are, or why they can't be had."""
    from .fetching import fetched

    found: str | Refused
    try:
        found = str(fetched(name, pickled=pickled))
    except ModelError as error:
        found = Refused.by(error)
    sys.stdout.buffer.write(pack(found))


def main(task: str, *arguments: str) -> None:
    """Do what the parent started this process for."""
    die_with(os.getppid())
    gc.disable()  # hardly anything that is made at a start is garbage, and looking for it takes a quarter of the time
    if task == "convert":
        from .loading import convert

        convert(*map(Path, arguments))
    elif task == "fetch":
        fetch(arguments[0], "pickled" in arguments[1:])
    else:
        {"nursery": nursery, "rear": rear, "serve": serve}[task](*map(int, arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
