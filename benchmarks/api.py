"""Mapping chat completions over a server that is not the bottleneck: requests a second, and processor time for each.

The server is `mockserver.c`, pinned to one core where that can be done; the clients run on the others, in turn, several rounds.
Run it with `.venv/bin/python benchmarks/api.py [requests] [python]`. It needs gcc and uvloop. `python` is of an environment
that holds the peers (`pip install openai httpx-aiohttp litellm langchain-openai`); without it they are left out.
"""

import asyncio
import contextlib
import heapq
import math
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import msgspec

import outlines_like as ol

ROUNDS = 5
WINDOW = 256  # requests under way
MEAN = 0.4  # seconds, where the server takes its time
SEED = 7


@contextlib.contextmanager
def server(*settings):
    """The base URL of a running mock server."""
    source = Path(__file__).with_name("mockserver.c")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        subprocess.run(["gcc", "-O2", "-o", f"{folder}/server", source, "-lm"], check=True)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        with subprocess.Popen([f"{folder}/server", f"--port={port}", *settings], stdout=subprocess.DEVNULL) as process:
            try:
                split_cores(process.pid)
                wait_for(port)
                yield f"http://127.0.0.1:{port}/v1"
            finally:
                process.terminate()


def split_cores(server_pid):
    """The last core for the server, the others for this process."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(server_pid, cores[-1:])
        os.sched_setaffinity(0, cores[:-1])


def wait_for(port):
    """Until the server listens."""
    for _ in range(100):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise RuntimeError("the mock server did not start")


def bare(url, prompts, run=asyncio.run):
    """The least that aiohttp can do: a pool of workers over one iterator, msgspec, no errors handled."""

    async def ask():
        texts, shared = [None] * len(prompts), iter(enumerate(prompts))
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

            async def work():
                for i, prompt in shared:
                    body = msgspec.json.encode({"model": "m", "messages": [{"role": "user", "content": prompt}]})
                    headers = {"Content-Type": "application/json"}
                    async with session.post(f"{url}/chat/completions", data=body, headers=headers) as response:
                        answer = msgspec.json.decode(await response.read())
                    texts[i] = answer["choices"][0]["message"]["content"]

            await asyncio.gather(*(work() for _ in range(WINDOW)))
        return texts

    return run(ask())


def bare_uvloop(url, prompts):
    """The same on uvloop."""
    import uvloop

    return bare(url, prompts, uvloop.run)


def ours(url, prompts):
    """The whole default stack, the store off."""
    model = ol.models.openai("m", base_url=url, concurrency=WINDOW)
    with ol.cache.disabled():
        return model(prompts)


def ours_stored(url, prompts):
    """The same, every answer kept on disk."""
    with tempfile.TemporaryDirectory() as folder, ol.cache.at(folder):
        texts = ol.models.openai("m", base_url=url, concurrency=WINDOW)(prompts)
        ol.cache.clear()  # also waits until all of them are on disk
        return texts


def measured(work, url, prompts):
    """Requests a second, and milliseconds of processor time for each."""
    wall, processor = time.perf_counter(), time.process_time()
    texts = work(url, prompts)
    assert len(texts) == len(prompts)
    assert all(texts)
    return len(prompts) / (time.perf_counter() - wall), (time.process_time() - processor) / len(prompts) * 1e3


def compared(url, n, python):
    """Rounds of every client, in turn: names to lists of (requests a second, ms of CPU a request)."""
    figures = {name: [] for name in CLIENTS} | {name: [] for name in PEERS if python}
    for _ in range(ROUNDS):
        for name, rounds in figures.items():
            if name in CLIENTS:
                rounds.append(measured(CLIENTS[name], url, [f"prompt {i}" for i in range(n)]))
            else:
                command = [python, Path(__file__).with_name("api_peers.py"), name, url, str(n // 20), str(WINDOW)]
                out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                rounds.append(tuple(map(float, out.split()[-2:])))
    return figures


def table(figures):
    """The medians, in Markdown."""
    rates = {name: statistics.median(rate for rate, _ in rounds) for name, rounds in figures.items()}
    print("| client | requests/s | of bare aiohttp | CPU ms a request |\n|---|---|---|---|")
    for name, rounds in figures.items():
        cpu = statistics.median(cost for _, cost in rounds)
        print(f"| {name} | {rates[name]:,.0f} | {rates[name] / rates['bare aiohttp']:.2f} | {cpu:.3f} |")


def noise(state):
    """The next number of splitmix64, between 0 and 1, and the state after it."""
    state = (state + 0x9E3779B97F4A7C15) % 2**64
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return (((z ^ (z >> 31)) >> 11) + 0.5) / 2**53, state


def latency(text, sigma, mean=MEAN):
    """The seconds that the server took for this answer, which names the hash that they were drawn with."""
    one, state = noise(int(re.search("h([0-9a-f]{16})", text)[1], 16) ^ SEED)
    normal = math.sqrt(-2 * math.log(one)) * math.cos(2 * math.pi * noise(state)[0])
    return mean * math.exp(-sigma * sigma / 2 + sigma * normal)


def schedule(latencies):
    """The least time in which ``WINDOW`` requests at a time can do it, each begun when the first under way ends."""
    busy = [0.0] * WINDOW
    for seconds in latencies:
        heapq.heapreplace(busy, busy[0] + seconds)
    return max(busy)


def against_schedule(url, n=1000, sigma=0.5):
    """Our seconds for requests that take a lognormal time, and those of the ideal schedule."""
    start = time.perf_counter()
    texts = ours(url, [f"prompt {i}" for i in range(n)])
    return time.perf_counter() - start, schedule(latency(text, sigma) for text in texts)


SCRIPT = """
import re, sys, time
import outlines_like as ol
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
url, folder, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
prompts = [f"prompt {i}" for i in range(n)]
model = ol.models.openai("m", base_url=url, concurrency=256)  # imports aiohttp
before, start = peak(), time.perf_counter()
with ol.cache.at(folder) if folder else ol.cache.disabled():
    texts = model(prompts)
assert all(texts)
print(time.perf_counter() - start, peak() - before)
"""


def script(url, folder, n):
    """The seconds and MB that a call of ``n`` prompts takes in a fresh process."""
    command = [sys.executable, "-c", SCRIPT, url, folder, str(n)]
    return tuple(map(float, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()))


def warm(url, n=20_000):
    """Rows a second of later scripts, whose answers are all on disk."""
    with tempfile.TemporaryDirectory() as folder:
        script(url, folder, n)
        return n / statistics.median(script(url, folder, n)[0] for _ in range(ROUNDS))


CLIENTS = {"bare aiohttp": bare, "bare aiohttp, uvloop": bare_uvloop, "ours, store off": ours, "ours, store on": ours_stored}
PEERS = ("openai, httpx", "openai, aiohttp", "litellm", "LangChain")


def main(n="20000", python=""):
    with server() as url:
        table(compared(url, int(n), python))
        print(f"\nwarm store, in a fresh process: {warm(url):,.0f} rows/s")
        print(f"memory of a call of 100,000 prompts: {script(url, '', 100_000)[1]:.0f} MB")
    with server(f"--latency=lognormal:{1000 * MEAN:.0f}:0.5", f"--seed={SEED}") as url:
        runs = [against_schedule(url) for _ in range(3)]
        took, ideal = min(runs)
        print(f"1,000 requests of lognormal 400 ms: {took:.2f} s, ideal {ideal:.2f} s, ratio {took / ideal:.2f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
