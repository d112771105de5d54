"""From a model folder to an engine that answers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from ..errors import WorkerError
from .batches import Net
from .cohorts import Cohorts
from .engine import Engine, Runner
from .fetching import checked
from .linears import reorder
from .pairs import Pair
from .prompting import Reader
from .rows import Habits
from .sampling import Taste
from .slots import Slots, packable
from .wire import Setup

CONTEXTS = ("max_position_embeddings", "n_positions")  # where a configuration says how far a model reads
ELSE = "Give one of these, leave device= out, or install a PyTorch built for that device."
SHARE = 4  # keys and values of all workers may take one part in so many of the memory that is free at the start


def load(setup: Setup, enter: Callable[[str], None] = lambda stage: None) -> Engine:
    """The engine for a model. ``enter`` is told what is being done."""
    torch.set_grad_enabled(False)
    place = device(setup.device)
    folder = checked(Path(setup.path), pickled=setup.pickled)
    enter("reading its weights")
    safe: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(folder, **safe)
    paired = AutoConfig.from_pretrained(folder, **safe).is_encoder_decoder
    kind: Any = AutoModelForSeq2SeqLM if paired else AutoModelForCausalLM
    weights = {"dtype": dtype(setup.dtype), "use_safetensors": None if setup.pickled else True}
    model = kind.from_pretrained(folder, **weights, **safe).to(place)
    enter("trying it out")
    said = habits(model, tokenizer)
    net = Pair(model, said.starts) if paired else Net(model)
    room = spare(net.device) // (SHARE * setup.workers)
    weight = max(1, net.batch([((0,), (0,))]).weight)
    return Engine(runner(net, room // 8), Reader(tokenizer, setup.raw), tokenizer, said, room // weight)


def runner(net: Net | Pair, room: int) -> Runner:
    """What runs rows of a model fastest. Prefixes kept for later calls may take ``room`` bytes."""
    if isinstance(net, Pair):
        return Cohorts(net)
    packed = packable(net)
    reorder(net.model)
    return Slots(packed, room) if packed else Cohorts(net)


def share(workers: int) -> None:
    """Compute with one worker's part of the processor."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS") or cores) // workers))


def device(name: str) -> str:
    """Where to run: the name the user gave, or the best there is."""
    there = devices()
    if name != "auto" and name not in there:
        known = ", ".join(map(repr, there))
        raise WorkerError(f"device={name!r}: PyTorch {torch.__version__} finds no such device here, only {known}", hint=ELSE)
    return there[0] if name == "auto" else name


def devices() -> list[str]:
    """What there is to run on, the best first."""
    cards = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    numbered = ["cuda", *(f"cuda:{card}" for card in cards)] if cards else []
    return [*numbered, *(["mps"] if torch.backends.mps.is_available() else []), "cpu"]


def dtype(name: str) -> torch.dtype:
    """The precision to compute in. What "auto" means was settled by the parent."""
    found: torch.dtype = getattr(torch, "float32" if name == "auto" else name)
    return found


def spare(place: torch.device) -> int:
    """Bytes of memory that are free where the model runs."""
    if place.type == "cuda":
        return torch.cuda.mem_get_info(place)[0]
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def habits(model: Any, tokenizer: Any) -> Habits:
    """What the checkpoint's own files say."""
    wishes, config = model.generation_config, model.config.get_text_config()
    context = next((size for name in CONTEXTS if (size := getattr(config, name, None))), tokenizer.model_max_length)
    ends = wishes.eos_token_id if isinstance(wishes.eos_token_id, list) else [wishes.eos_token_id]
    known = frozenset(token for token in (*ends, tokenizer.eos_token_id) if token is not None)
    penalty = wishes.repetition_penalty or 1.0
    drawn = (wishes.temperature or 1.0, wishes.top_k or 0, wishes.top_p or 1.0, wishes.min_p or 0.0)
    taste = Taste(*drawn, penalty) if wishes.do_sample else Taste(penalty=penalty)
    return Habits(int(context), known, taste, starts(model) if model.config.is_encoder_decoder else ())


def starts(model: Any) -> tuple[int, ...]:
    """What an encoder-decoder model's answers begin after."""
    wishes, config = model.generation_config, model.config
    first = [wishes.decoder_start_token_id, config.decoder_start_token_id, wishes.bos_token_id, config.pad_token_id]
    begun = [next((token for token in first if token is not None), 0), wishes.forced_bos_token_id]
    return tuple(token for token in begun if token is not None)


def convert(gguf: Path, target: Path) -> None:
    """Write the model in a GGUF file as a folder of safetensors.

    The weights are kept in float32, as they come out of the quantised file: any smaller kind would change them again.
    """
    given: dict[str, Any] = {"gguf_file": gguf.name, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **given)
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **given)
    # transformers 5 refuses to save a model that came from GGUF, so a fresh one takes over its weights.
    config = type(read.config).from_dict({k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    model = type(read)(config)
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.tie_weights()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
