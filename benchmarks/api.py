"""Mapping chat completions over a server that is not the bottleneck: requests a second, and processor time for each.

The server is `mockserver.c`, pinned to one core where that can be done; the clients run on the others, in turn, several rounds.
Run it with `.venv/bin/python benchmarks/api.py [requests]`. It needs gcc, and openai for the comparison.
"""

import asyncio
import contextlib
import os
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


@contextlib.contextmanager
def server():
    """The base URL of a running mock server."""
    source = Path(__file__).with_name("mockserver.c")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        subprocess.run(["gcc", "-O2", "-o", f"{folder}/server", source, "-lm"], check=True)
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        with subprocess.Popen([f"{folder}/server", f"--port={port}"], stdout=subprocess.DEVNULL) as process:
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


def bare(url, prompts):
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

    return asyncio.run(ask())


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


def openai_python(url, prompts):
    """openai-python's async client, as its documentation shows it."""
    import openai

    async def ask():
        limit = asyncio.Semaphore(WINDOW)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:

            async def one(prompt):
                async with limit:
                    answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt}])
                return answer.choices[0].message.content

            return await asyncio.gather(*(one(prompt) for prompt in prompts))

    return asyncio.run(ask())


def measured(work, url, prompts):
    """Requests a second, and milliseconds of processor time for each."""
    wall, processor = time.perf_counter(), time.process_time()
    texts = work(url, prompts)
    assert len(texts) == len(prompts)
    assert all(texts)
    return len(prompts) / (time.perf_counter() - wall), (time.process_time() - processor) / len(prompts) * 1e3


def main(n=5000):
    clients = {"bare aiohttp": bare, "ours, store off": ours, "ours, store on": ours_stored, "openai-python": openai_python}
    figures = {name: [] for name in clients}
    with server() as url:
        for _ in range(ROUNDS):
            for name, work in clients.items():
                size = n if name != "openai-python" else n // 10
                figures[name].append(measured(work, url, [f"prompt {i}" for i in range(size)]))
    rates = {name: statistics.median(rate for rate, _ in rounds) for name, rounds in figures.items()}
    print("| client | requests/s | of bare aiohttp | CPU ms a request |\n|---|---|---|---|")
    for name, rounds in figures.items():
        cpu = statistics.median(cost for _, cost in rounds)
        print(f"| {name} | {rates[name]:,.0f} | {rates[name] / rates['bare aiohttp']:.2f} | {cpu:.3f} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
