"""1,000 programs of three gens each over a model that takes 50 ms: against the ideal time and hand-made threads."""

import asyncio
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import outlines_like as ol

COUNT, GENS, DELAY = 1000, 3, 0.05


@ol.program
def plain(lm, topic):
    """A sync program: a thread of its own."""
    for k in range(GENS):
        lm += f" {topic} {k}: " + ol.gen(f"g{k}")
    return lm


@ol.program
async def waiting(lm, topic):
    """An async one."""
    for k in range(GENS):
        lm += f" {topic} {k}: " + ol.gen(f"g{k}")
    return lm


def block(topic):
    """A plain building block."""
    return sum((f" {topic} {k}: " + ol.gen(f"g{k}") for k in range(1, GENS)), f" {topic} 0: " + ol.gen("g0"))


def by_hand(model, topic):
    """The same in one's own thread, a blocking call after the other."""
    text = ""
    for k in range(GENS):
        text += f" {topic} {k}: "
        text += model(text)
    return text


def timed(title, work):
    """Print how long it took, against the ideal."""
    start = time.perf_counter()
    result = work()
    took = time.perf_counter() - start
    print(f"{title:34} {took:6.3f} s   {took / (GENS * DELAY):5.2f} of ideal")
    return result


def answer(request):
    """Something that depends on the prompt."""
    return f"answer {len(request.text)}"


def compare(make):
    """All ways to run the same programs, each on a fresh model."""
    for name, made in (("building blocks", block), ("async programs", waiting), ("sync programs", plain)):
        lms = timed(name, lambda made=made: make().run_batched([made(f"t{i}") for i in range(COUNT)], concurrency=COUNT))
        assert all(lm.usage.requests == GENS for lm in lms)
    rounds = [[f"t{i} {k}" for i in range(COUNT)] for k in range(GENS)]
    model = make()
    timed("as many calls as three arrays", lambda: [model(prompts) for prompts in rounds])
    model = make()
    with ThreadPoolExecutor(COUNT) as pool:
        timed("hand-made threads", lambda: list(pool.map(lambda i: by_hand(model, f"t{i}"), range(COUNT))))


def bare():
    """A model whose backend takes all rows at once, without layers."""

    async def run(rows):
        await asyncio.sleep(DELAY)
        yield [ol.Event(i, ol.Completion(answer(row), "stop")) for i, row in enumerate(rows)]

    return ol.models.Model("bare", run, endpoint="bare", defaults={})


def main():
    print(f"{COUNT} programs of {GENS} gens of {DELAY:g} s; ideal {GENS * DELAY:.3f} s")
    with tempfile.TemporaryDirectory() as folder, ol.cache.at(folder):
        for title, make in (
            ("a bare backend", bare),
            ("the fake with its layers, every answer stored", lambda: ol.models.fake(answer, delay=DELAY, concurrency=COUNT)),
        ):
            (make() + plain("warm")).run()
            print(f"\n{title}")
            with ol.cache.refresh():
                compare(make)
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
