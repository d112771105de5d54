"""How a worker process is started, and what is to be said when it ends badly."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEEDED = ("CUDA", "HF_", "LD_", "MKL", "OMP", "PYTORCH", "TORCH", "TRANSFORMERS")
NOTHING = " nothing"
LAST_WORDS = 12  # lines of a dead worker's log that go into an error


def command(*arguments: str | Path) -> list[str]:
    """What starts a worker. ``-P``: a file named torch.py in the user's folder is none of its business."""
    return [sys.executable, "-P", "-m", "outlines_like.worker", *map(str, arguments)]


def environment() -> dict[str, str]:
    """A worker's environment: this package can be found, the user's warning filters don't reach it, and it is quiet."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONWARNINGS", "PYTHONDEVMODE")}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    # PyTorch's threads wait for each other by spinning: where other work has a core, a step takes ten times as long.
    calm = {"OMP_WAIT_POLICY": "PASSIVE"}
    # A nursery can't be forked with threads, which NumPy's linear algebra and tokenizers start, nor once it has touched CUDA.
    single = {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    quiet = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return {**calm, **kept, **single, **quiet, "PYTHONPATH": path}


def told() -> tuple[tuple[str, str], ...]:
    """What of the environment is read when torch and the like are imported: another nursery is needed where it is another."""
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(HEEDED)))


def ending(code: int) -> str:
    """How a process ended, in words.

    >>> ending(-9)
    'killed by SIGKILL; out of memory?'
    >>> ending(1)
    'exit code 1'
    """
    if code >= 0:
        return f"exit code {code}"
    name = signal.Signals(-code).name
    return f"killed by {name}{'; out of memory?' if name == 'SIGKILL' else ''}"


def last_words(log: bytes) -> str:
    """The last lines of a log, to stand at the end of an error message."""
    lines = log.decode("utf-8", "replace").rstrip().splitlines()[-LAST_WORDS:]
    return "".join(f"\n    {line}" for line in lines) if lines else NOTHING
