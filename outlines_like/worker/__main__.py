"""``python -m outlines_like.worker``: ``nursery FD`` makes workers, ``serve FD`` is one, ``convert GGUF FOLDER`` converts."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from .nursery import die_with, tend
from .serving import serve

FRESH = [sys.executable, "-P", "-m", "outlines_like.worker", "serve"]


def main(task: str, *arguments: str) -> None:
    """Do what the parent started this process for."""
    die_with(os.getppid())
    if task == "serve":
        serve(int(arguments[0]))
    elif task == "nursery":
        if sys.platform == "linux":
            from . import loading  # noqa: F401 (the workers will find it imported)
        tend(socket.socket(fileno=int(arguments[0])), serve, FRESH)
    else:
        from .loading import convert

        convert(*map(Path, arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
