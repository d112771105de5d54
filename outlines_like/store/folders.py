"""The folder of a store, which is this user's alone, and the one file in it."""

from __future__ import annotations

import os
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path

DATABASE = "cache.db"


def default_folder() -> Path:
    """Where answers are kept if nobody says otherwise: OUTLINES_LIKE_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("OUTLINES_LIKE_CACHE"):
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("outlines_like")) / "answers"


def secure(folder: Path) -> None:
    """Make ``folder`` and the database in it for this user alone; an OSError if someone else has a hand in them."""
    path = folder / DATABASE
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_owner(folder)
    if path.exists() or not os.listdir(folder):  # a folder with other things in it keeps its mode
        narrow(folder, 0o700)
    if folder.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        raise PermissionError(f"everybody may write to {folder}")
    for name in (path, folder / f"{DATABASE}-wal", folder / f"{DATABASE}-shm"):
        if name.is_symlink():
            raise PermissionError(f"{name} is a link")
    if not path.exists():
        create(path)
    check_owner(path)
    narrow(path, 0o600)


def check_owner(path: Path) -> None:
    """An OSError if ``path`` belongs to someone else."""
    if os.name == "posix" and path.stat().st_uid != os.geteuid():
        raise PermissionError(f"{path} belongs to another user (uid {path.stat().st_uid})")


def narrow(path: Path, mode: int) -> None:
    """Set the mode of ``path`` where it is another one."""
    if os.name == "posix" and stat.S_IMODE(path.stat().st_mode) != mode:
        path.chmod(mode)


def create(path: Path) -> None:
    """An empty file for this user alone, whatever the umask; SQLite gives its other files the same mode.

    It gets its name once it is closed: closing a database by hand would drop the locks SQLite holds on it
    (sqlite.org/howtocorrupt.html, section 2.2).
    """
    fresh = path.with_name(f"{path.name}.new-{os.getpid()}-{threading.get_ident()}")
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT, 0o600))
    narrow(fresh, 0o600)
    try:
        with suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink()


def inode(path: Path) -> tuple[int, int] | None:
    """Which file ``path`` names just now."""
    try:
        facts = os.stat(path)
    except OSError:
        return None
    return facts.st_dev, facts.st_ino


def set_aside(path: Path) -> None:
    """Rename a database, its log first: a fresh database must not meet an old log."""
    label = f"damaged-{time.time_ns()}"
    for name in (f"{path.name}-wal", f"{path.name}-shm", path.name):
        with suppress(FileNotFoundError):
            os.replace(path.with_name(name), path.with_name(f"{name}.{label}"))
