"""1,000 programs of three gens each over a model that takes 50 ms: against the ideal time and hand-made threads."""

import asyncio
import resource
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import outlines_like as ol

COUNT, GENS, DELAY, ROUNDS = 1000, 3, 0.05, 5


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
    """Print how long it took at best, against the ideal, and the processor time of one program."""
    rounds = [once(work) for _ in range(ROUNDS)]
    took, cost = (min(figures[k] for figures in rounds) for k in (0, 1))
    print(f"{title:34} {took:6.3f} s   {took / (GENS * DELAY):5.2f} of ideal   {cost / COUNT * 1e6:5.0f} us of CPU a program")


def once(work):
    """Seconds on the clock and of the processor."""
    start, begun = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - begun


def answer(request):
    """Something that depends on the prompt."""
    return f"answer {len(request.text)}"


def batch(made, model):
    """All programs of one kind at once."""
    lms = model.run_batched([made(f"t{i}") for i in range(COUNT)], concurrency=COUNT)
    assert all(lm.usage.requests == GENS for lm in lms)


def threads(model):
    """The same by hand."""
    with ThreadPoolExecutor(COUNT) as pool:
        list(pool.map(lambda i: by_hand(model, f"t{i}"), range(COUNT)))


def compare(make):
    """All ways to run the same programs, each on fresh models."""
    for name, made in (("building blocks", block), ("async programs", waiting), ("sync programs", plain)):
        timed(name, lambda made=made: batch(made, make()))
    rounds = [[f"t{i} {k}" for i in range(COUNT)] for k in range(GENS)]
    timed("as many calls as three arrays", lambda: [model(prompts) for model in [make()] for prompts in rounds])
    timed("hand-made threads", lambda: threads(make()))


def bare():
    """A model whose backend takes all rows at once, without layers."""

    async def run(rows):
        await asyncio.sleep(DELAY)
        yield [ol.Event(i, ol.Completion(answer(row), "stop")) for i, row in enumerate(rows)]

    return ol.models.Model("bare", run, endpoint="bare", defaults={})


def main():
    fake = partial(ol.models.fake, answer, delay=DELAY, concurrency=COUNT)
    print(f"{COUNT} programs of {GENS} gens of {DELAY:g} s; ideal {GENS * DELAY:.3f} s; the best of {ROUNDS} rounds")
    with tempfile.TemporaryDirectory() as folder, ol.cache.at(folder):
        for title, make, store in (
            ("a bare backend", bare, ol.cache.disabled),
            ("the fake with its layers, store off", fake, ol.cache.disabled),
            ("the fake with its layers, every answer stored", fake, ol.cache.refresh),
        ):
            print(f"\n{title}")
            with store():
                (make() + plain("warm")).run()
                compare(make)
        ol.cache.clear()
    print(f"\npeak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
