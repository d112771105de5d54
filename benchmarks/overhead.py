"""What the library itself costs: time and memory for each row, and the time of an import. Run it with `make bench`.

Every figure is the median of several rounds, taken in turn, on whatever machine this is; compare ratios, not seconds.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

import outlines_like as ol

ROUNDS = 5


def seconds(work):
    """How long ``work`` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def per_row(rows=100_000):
    """Microseconds a row of the full default stack over the fake model, the store off; and of a lifted plain function."""
    prompts, model, plain = [f"prompt {i}" for i in range(rows)], ol.models.fake(), ol.vectorize(str.upper)
    with ol.cache.disabled():
        pairs = [(seconds(lambda: model(prompts)), seconds(lambda: plain(prompts))) for _ in range(ROUNDS)]
    return [statistics.median(column) / rows * 1e6 for column in zip(*pairs, strict=True)]


def warm(rows=20_000):
    """Seconds for ``rows`` answers of about 1 KB from a warm store, and how many calls the model got."""
    log = []
    model = ol.models.fake(lambda request: request.text * 100, log=log)
    prompts = [f"prompt {i}" for i in range(rows)]
    with tempfile.TemporaryDirectory() as folder, ol.cache.at(folder):
        model(prompts)
        first = len(log)
        times = [seconds(lambda: model(prompts)) for _ in range(ROUNDS)]
    return statistics.median(times), len(log) - first


def side_by_side():
    """The time of 20 prompts over the time of one, for a model that takes 100 ms."""
    model = ol.models.fake(delay=0.1)
    with ol.cache.disabled():
        pairs = [(seconds(lambda: model("one")), seconds(lambda: model([f"{i}" for i in range(20)]))) for _ in range(ROUNDS)]
    return statistics.median(many / one for one, many in pairs)


MEMORY = """
import resource, sys, outlines_like as ol
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
model, n = ol.models.fake(), int(sys.argv[1])
prompts = [str(i) for i in range(n)]
before = peak()
with ol.cache.disabled():
    answers = model(prompts)
print((peak() - before) / n)
"""


def memory(rows=1_000_000):
    """Bytes a row at the peak of one call, the answers included."""
    out = subprocess.run([sys.executable, "-c", MEMORY, str(rows)], capture_output=True, text=True, check=True)
    return float(out.stdout)


def importing():
    """Seconds that `import outlines_like` takes beyond `import numpy`."""

    def start(code):
        return seconds(lambda: subprocess.run([sys.executable, "-c", code], check=True))

    pairs = [(start("import numpy"), start("import numpy, outlines_like")) for _ in range(ROUNDS)]
    return statistics.median(more - less for less, more in pairs)


def main():
    model, plain = per_row()
    took, calls = warm()
    print("| what | measured | goal |\n|---|---|---|")
    print(f"| the whole stack over the fake model, store off, 100,000 rows | {model:.1f} µs a row | 20 |")
    print(f"| a lifted plain function, 100,000 rows | {plain:.1f} µs a row | a few |")
    print(f"| 20,000 rows from a warm store ({calls} model calls) | {took:.2f} s | under 1 |")
    print(f"| 20 prompts over 1, at 100 ms each | {side_by_side():.2f} | under 1.2 |")
    print(f"| memory of a call of 1,000,000 rows | {memory():.0f} bytes a row | under 1,000 |")
    print(f"| `import outlines_like` beyond `import numpy` | {importing():.2f} s | under 0.25 |")
    print(f"\n{os.cpu_count()} cores, Python {sys.version.split()[0]}, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
