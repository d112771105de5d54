"""Local models against transformers' own ways of running them: tokens a second, side by side. Run it with `make bench-local`.

`python benchmarks/local.py [ROUNDS] [--vllm=FOLDER] [--llama=FOLDER] [--odd]`. Figures are medians of rounds in turn, ours
and theirs one after the other on the same two cores; compare ratios, not seconds. Where a peer is slow it answers only some
of the prompts, since its rate does not depend on how many there are. The fifth column is what is left when the processor is
shared with others: rates by the processor time that each side took; the last one is the most memory that our worker took.
W1: 128 prompts of 10 to 200 tokens, greedy, up to 64 new tokens. W2: 16 questions after one prefix of about 700 tokens, 20
samples each. W3: 512 yes-or-no questions, scores only. W4: W1's first 32 prompts, watched. `--vllm` names a virtual
environment with vLLM in it (see `vllm_peer.py`), `--llama` a folder with the npm package node-llama-cpp (see
`llama_peer.mjs`); both are asked last, beside a round of ours each. `--odd` runs W1's first 32 prompts on a small random
GPT-NeoX too.
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPTNeoXConfig
from workloads import few_shot, short_prompts, yes_or_no

import outlines_like as ol
from outlines_like.models.boxes import smollm2, wheel_file
from outlines_like.models.local import precision

PARAMETERS = 135e6
ENDS = [2, 198]  # <|im_end|> and a line break


class Peer:
    """The same model in this process, as transformers runs it."""

    def __init__(self, dtype, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", pad_token="<|im_end|>")
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))

    def padded(self, prompts):
        """Batches of 32, sorted by length and padded."""
        ids = sorted(self.tokenizer(prompts)["input_ids"], key=len)
        for k in range(0, len(ids), 32):
            yield self.tokenizer.pad({"input_ids": ids[k : k + 32]}, return_tensors="pt")

    @torch.inference_mode()
    def greedy(self, prompts):
        """New tokens of sorted, padded batches."""
        count = 0
        for batch in self.padded(prompts):
            out = self.model.generate(**batch, max_new_tokens=64, do_sample=False)
            count += sum(written(row, ENDS[:1]) for row in out[:, batch["input_ids"].shape[1] :].tolist())
        return count

    @torch.inference_mode()
    def samples(self, prompts):
        """New tokens of 20 samples for each prompt."""
        count, settings = 0, {"temperature": 0.7, "top_k": 0, "top_p": 1.0, "eos_token_id": ENDS}
        for prompt in prompts:
            batch = self.tokenizer(prompt, return_tensors="pt")
            out = self.model.generate(**batch, max_new_tokens=64, do_sample=True, num_return_sequences=20, **settings)
            count += sum(written(row, ENDS) for row in out[:, batch["input_ids"].shape[1] :].tolist())
        return count

    @torch.inference_mode()
    def scores(self, prompts):
        """Rows scored in padded batches."""
        for batch in self.padded(prompts):
            positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
            out = self.model(**batch, position_ids=positions, use_cache=False, logits_to_keep=1)
            out.logits[:, -1].float().log_softmax(-1)
        return len(prompts)


class Ours:
    """The model of this library, in its worker."""

    def __init__(self, dtype, folder):
        self.model = ol.models.transformers(folder, raw=True, dtype=dtype, max_tokens=64)

    def greedy(self, prompts):
        """New tokens."""
        return tokens(self.model.complete(prompts, temperature=0))

    def samples(self, prompts):
        """New tokens of 20 samples for each prompt."""
        return tokens(self.model.complete(prompts, samples=20, temperature=0.7, stop="\n"))

    def scores(self, prompts):
        """Rows scored."""
        return len(self.model.scores(prompts, [" Yes", " No"]))

    def watched(self, prompts):
        """Seconds until every row has shown something, and until the end."""
        start, seen, first = time.perf_counter(), set(), 0.0
        for index, text, _ in self.model.stream(prompts, temperature=0):
            if text and index not in seen:
                seen.add(index)
                first = time.perf_counter() - start
        return first, time.perf_counter() - start


def written(row, ends):
    """How many tokens of a row were written before and with its end."""
    return next((k + 1 for k, token in enumerate(row) if token in ends), len(row))


def tokens(completions):
    """New tokens of completions."""
    return sum(completion.usage.completion_tokens for completion in completions.ravel())


def processes():
    """This process and its workers."""
    here = psutil.Process()
    return [here, *here.children(recursive=True)]


def busy():
    """Processor seconds taken so far."""
    return sum(process.cpu_times().user + process.cpu_times().system for process in processes())


def rates(work, prompts):
    """Things a second, and things by two processor seconds."""
    gc.collect()
    start, used = time.perf_counter(), busy()
    count = work(prompts)
    return count / (time.perf_counter() - start), 2 * count / (busy() - used)


@contextmanager
def watched_memory(found):
    """Add to ``found`` the most MiB that a worker took meanwhile."""
    done, most = threading.Event(), [0]

    def watch():
        while not done.wait(0.05):
            most.append(max((process.memory_info().rss for process in processes()[1:]), default=0))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found.append(max(most) / 2**20)


def gemm(dtype):
    """Multiplications and additions a second, in the shape of the model's largest layer."""
    left, right = torch.randn(256, 576, dtype=dtype), torch.randn(576, 1536, dtype=dtype)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(20):
            left @ right
        best = min(best, (time.perf_counter() - start) / 20)
    return 2 * 256 * 576 * 1536 / best


def compare(name, ours, theirs, rounds):
    """A line of the table: medians of both, taken in turn."""
    pairs, memory = [], []
    for _ in range(rounds):
        their_rates = rates(*theirs)
        with watched_memory(memory):
            pairs.append((*their_rates, *rates(*ours)))
    peer, peer_cpu, own, own_cpu = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"| {name} | {own:.1f} | {peer:.1f} | {own / peer:.1f} | {own_cpu / peer_cpu:.1f} | {max(memory):.0f} |", flush=True)
    return own


def watch(ours, prompts):
    """Two lines about a stream."""
    start = time.perf_counter()
    ours.model(prompts, temperature=0, max_tokens=1)
    once = time.perf_counter() - start
    eager = rates(ours.greedy, prompts)
    first, whole = ours.watched(prompts)
    print(f"W4: all {len(prompts)} rows began within {first:.2f} s ({first / once:.1f} times a call for one token each)")
    print(f"W4: {tokens(ours.model.complete(prompts, temperature=0)) / whole:.1f} tokens/s watched, {eager[0]:.1f} not")


def odd(dtype, prompts):
    """A line about another kind of model."""
    with tempfile.TemporaryDirectory() as folder:
        words = AutoTokenizer.from_pretrained(smollm2())
        words.save_pretrained(folder)
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8}
        config = GPTNeoXConfig(vocab_size=len(words), max_position_embeddings=1024, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        peer, ours = Peer(dtype, folder), Ours(dtype, folder)
        compare("W1 tokens/s on a random GPT-NeoX; `generate`", (ours.greedy, prompts), (peer.greedy, prompts), 1)
        ours.model.close()


def beside(title, command, asked):
    """Lines about a peer in a process of its own: ours is measured again, just before."""
    own = {name: rates(work, prompts)[0] for name, (work, prompts) in asked.items()}
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    for found in map(json.loads, filter(lambda line: line.startswith("{"), done.stdout.splitlines())):
        mine, rate = own[found["name"]], found["rate"]
        print(f"| {title} {found['name']} | {mine:.1f} | {rate:.1f} | {mine / rate:.1f} |", flush=True)


def llama_workloads(folder, asked):
    """A file of what llama.cpp is asked."""
    settings = {
        "W1": {"temperature": 0, "max_tokens": 64},
        "W2": {"temperature": 0.7, "max_tokens": 64, "n": 20, "stop": ["\n"]},
    }
    path = Path(folder) / "workloads.json"
    path.write_text(json.dumps([{"name": name, "prompts": asked[name][1], **told} for name, told in settings.items()]))
    return path


def main(rounds, vllm, llama, more):
    """Print the table."""
    dtype = precision("auto", False)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    peer, ours = Peer(dtype, smollm2()), Ours(dtype, smollm2())
    asked = {
        "W1": (ours.greedy, short_prompts()),
        "W2": (ours.samples, few_shot()),
        "W3": (ours.scores, yes_or_no()),
    }
    theirs = {
        "W1": ("`generate`, sorted, padded, 32", peer.greedy, None),
        "W2": ("`num_return_sequences=20`", peer.samples, 1),
        "W3": ("padded batches of 32", peer.scores, 64),
    }
    with ol.cache.disabled():
        ours.greedy(asked["W1"][1][:4]), peer.greedy(asked["W1"][1][:4])
        rate = gemm(getattr(torch, dtype))
        most = rate / PARAMETERS / 2
        print(f"{dtype}, {rate / 1e9:.0f} GFLOP/s here now: at most {most:.0f} tokens/s; load {os.getloadavg()[0]:.1f}")
        print("| workload | ours | peer | ratio | by processor time | MiB |\n|---|---|---|---|---|---|")
        own = {
            name: compare(f"{name}; {title}", asked[name], (work, asked[name][1][:count]), rounds)
            for name, (title, work, count) in theirs.items()
        }
        watch(ours, asked["W1"][1][:32])
        if more:
            odd(dtype, asked["W1"][1][:32])
        print(f"W1 is {own['W1'] / most:.2f} of what the processor can do; load at the end {os.getloadavg()[0]:.1f}")
        del peer, theirs
        for _ in range(rounds):
            if vllm:
                command = [Path(vllm) / "bin" / "python", Path(__file__).with_name("vllm_peer.py"), smollm2(), dtype]
                beside("vLLM", [*command, ",".join(asked)], asked)
            if llama:
                command = ["node", Path(__file__).with_name("llama_peer.mjs"), llama, wheel_file()]
                beside("llama.cpp", [*command, llama_workloads(llama, asked)], {name: asked[name] for name in ("W1", "W2")})
    ours.model.close()


if __name__ == "__main__":
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("rounds", nargs="?", type=int, default=3)
    given.add_argument("--vllm")
    given.add_argument("--llama")
    given.add_argument("--odd", action="store_true")
    main(*vars(given.parse_args()).values())
