"""What streaming costs: tokens a second and memory of many streams at once, and microseconds an event of `deltas`.

    python benchmarks/streams.py [streams] [tokens]

A server in C on loopback (`mockserver.c`, built here with cc) sends the tokens. Beside the library a bare aiohttp loop reads
the same streams and only parses the events. Rounds alternate; each client has a process of its own. Compare ratios, not
seconds.
"""

import asyncio
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROUNDS = 5
FOLDER = Path(__file__).parent


def bare(base_url, streams, tokens):
    """Read all streams with aiohttp alone; the tokens that came."""
    import aiohttp
    import msgspec

    async def one(session, prompt):
        body = {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": True}
        seen, rest = 0, b""
        async with session.post(f"{base_url}/chat/completions", json=body) as response:
            async for part in response.content.iter_any():
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        choices = msgspec.json.decode(event[6:])["choices"]
                        seen += bool(choices and choices[0]["delta"].get("content"))
        return seen

    async def everything():
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            return sum(await asyncio.gather(*[one(session, f"prompt {i}") for i in range(streams)]))

    return asyncio.run(everything())


def ours(base_url, streams, tokens):
    """Read all streams with one `for` loop; the tokens that came."""
    import outlines_like as ol

    model = ol.models.openai("m", base_url=base_url, api_key="none", concurrency=streams)
    with ol.cache.disabled():
        texts = dict(model.stream([f"prompt {i}" for i in range(streams)], max_tokens=tokens) | ol.finished)
    assert len(texts) == streams
    return streams * tokens


def deltas(wide):
    """Microseconds an event, on the clock and of the processor, for 100,000 fake events.

    1,000 rows move together (``wide``), or one after the other.
    """
    import outlines_like as ol

    async def steps(rows):
        for k in range(100):
            yield [ol.Event(i, ol.Completion("x" * k), False) for i in range(len(rows))]
            await asyncio.sleep(0)
        yield [ol.Event(i, ol.Completion("x" * 100, "stop")) for i in range(len(rows))]

    together = ol.models.Model("steps", steps, endpoint="steps", defaults={})
    model = together if wide else ol.models.fake()
    prompts = [" ".join(["word"] * 100) + f" {i}" for i in range(1000)]
    with ol.cache.disabled():
        start, begun = time.perf_counter(), time.process_time()
        assert sum(1 for _ in model.stream(prompts) | ol.deltas)
        return (time.perf_counter() - start) / 101_000 * 1e6, (time.process_time() - begun) / 101_000 * 1e6


def measured(client, base_url, streams, tokens):
    """Tokens a second, and the peak of memory in MB, of a client in a process of its own."""
    out = subprocess.run(
        [sys.executable, __file__, client, base_url, str(streams), str(tokens)], capture_output=True, text=True, check=True
    )
    return tuple(map(float, out.stdout.split()))


def client(name, base_url, streams, tokens):
    """One round, in this process."""
    start = time.perf_counter()
    seen = {"bare": bare, "ours": ours}[name](base_url, streams, tokens)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(seen / (time.perf_counter() - start), peak, time.process_time() / seen * 1e6)


def server(folder, tokens):
    """The server's process and address."""
    program = Path(folder, "mockserver")
    subprocess.run(["cc", "-O2", "-o", program, FOLDER / "mockserver.c", "-lm"], check=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([program, f"--port={port}", f"--tokens={tokens}", "--interval=0"], stdout=subprocess.DEVNULL)
    for _ in range(100):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/stats", timeout=1).close()
            break
        except OSError:
            time.sleep(0.05)
    return process, f"http://127.0.0.1:{port}/v1"


def main(streams=1000, tokens=200):
    """Print all figures."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
    with tempfile.TemporaryDirectory() as folder:
        process, base_url = server(folder, tokens)
        try:
            rounds = [[measured(name, base_url, streams, tokens) for name in ("bare", "ours")] for _ in range(ROUNDS)]
        finally:
            process.kill()
            process.wait()
    ratio = statistics.median(mine[0] / other[0] for other, mine in rounds)
    for k, name in enumerate(("bare aiohttp", "outlines_like")):
        speed, peak, cost = (statistics.median(figure[k][j] for figure in rounds) for j in range(3))
        print(f"{name}: {speed:,.0f} tokens/s, {peak:.0f} MB at most, {cost:.1f} us of CPU a token, imports included")
    print(f"ratio {ratio:.2f}, {streams} streams of {tokens} tokens, {os.cpu_count()} processors")
    for wide, what in ((True, "1,000 rows in step"), (False, "the fake, one row after the other")):
        clock, cost = map(statistics.median, zip(*[deltas(wide) for _ in range(ROUNDS)], strict=True))
        print(f"deltas, {what}: {clock:.1f} us an event, {cost:.1f} us of CPU")


if __name__ == "__main__":
    if len(sys.argv) == 5:
        client(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(*map(int, sys.argv[1:]))
