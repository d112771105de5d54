"""From a name on the hub to a folder: a process of its own fetches what is missing, and needs no torch for that."""

from __future__ import annotations

import asyncio
from asyncio.subprocess import DEVNULL, PIPE
from contextlib import suppress
from pathlib import Path

from ..errors import WorkerError
from ..worker.wire import Refused, folder_of
from .processes import command, ending, environment, last_words


async def fetched(name: str, *, pickled: bool) -> str:
    """The folder of a model: ``name`` itself, or where the hub's files are now."""
    if Path(name).is_absolute():
        return name
    words = command("fetch", name, *["pickled"] * pickled)
    child = await asyncio.create_subprocess_exec(
        *words, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, env=environment(), start_new_session=True
    )
    try:
        said, log = await child.communicate()
    finally:
        with suppress(ProcessLookupError):
            child.kill()
    if child.returncode:
        raise WorkerError(f"{name} could not be fetched ({ending(child.returncode)}):{last_words(log)}")
    found = folder_of(said)
    if isinstance(found, Refused):
        raise found.error()
    return found
