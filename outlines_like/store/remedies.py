"""What went wrong with a database, and what to do about it."""

from __future__ import annotations

TIMEOUT = 10.0  # seconds for another process to let go of the database
BUSY, SICK, FULL = (5, 6, 15), (1, 11, 26), (10, 13)  # SQLite's: held by others; another schema, corrupt, no database; no room


class PlantedError(Exception):
    """The database holds tables or triggers that are not ours."""


def root(error: BaseException) -> BaseException:
    """The first error of a chain: diskcache's Timeout, and its failing rollback, hide what SQLite said."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def sqlite_code(error: BaseException) -> int:
    """SQLite's primary result code, or 0."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def remedy(error: BaseException) -> str:
    """What to do before the next try: "wait", "set aside", "reopen" or "give up".

    >>> remedy(OSError("no such folder"))
    'reopen'
    """
    if sqlite_code(error) in BUSY:
        return "wait"
    if sqlite_code(error) in FULL:
        return "give up"  # what is open can still be read, but perhaps not opened again
    return "set aside" if sqlite_code(error) in SICK or isinstance(error, (PlantedError, UnicodeError)) else "reopen"
