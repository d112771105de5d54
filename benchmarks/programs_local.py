"""Programs of three gens on SmolLM2: here, side by side; and by guidance (PyPI), if it is installed, one after the other.

guidance 0.3.1 was written for an older transformers: `crop` below lets it run on transformers 5.
"""

import sys
import tempfile
import time

import outlines_like as ol
from outlines_like.models.boxes import smollm2

COUNT, GENS, TOKENS = int(sys.argv[1]) if sys.argv[1:] else 16, 3, 8
TOPICS = [
    "rain",
    "bread",
    "ships",
    "music",
    "stars",
    "cats",
    "snow",
    "tea",
    "trains",
    "books",
    "bees",
    "chess",
    "rivers",
    "clocks",
]
TOPICS += ["salt", "glass"]


def asked(lm, topic, gen):
    """The program, in the words that both libraries know."""
    for k, question in enumerate(("is", "was", "will be")):
        lm += f"\nThe best thing about {topic} {question}"
        lm += gen(name=f"g{k}", max_tokens=TOKENS, temperature=0.0)
    return lm


@ol.program
def plain(lm, topic):
    """The same as a step."""
    return asked(lm, topic, ol.gen)


def ours(concurrency):
    """All programs, so many at a time, on a worker that has already answered once."""
    model = ol.models.transformers("smollm2-135m", raw=True, deterministic=True)
    model("warm", max_tokens=1)
    with tempfile.TemporaryDirectory() as folder, ol.cache.at(folder):
        start = time.perf_counter()
        lms = model.run_batched([plain(topic) for topic in TOPICS[:COUNT]], concurrency=concurrency)
        return time.perf_counter() - start, [str(lm) for lm in lms]


def theirs():
    """The same by guidance."""
    import transformers.cache_utils as caches
    from guidance import gen, models

    shrink = caches.DynamicCache.crop

    def crop(cache, size):
        if 0 < size < cache.get_seq_length():
            shrink(cache, size - cache.get_seq_length())

    caches.DynamicCache.crop = crop
    model = models.Transformers(str(smollm2()), echo=False)
    str(model + "warm" + gen(max_tokens=1))
    start = time.perf_counter()
    texts = [str(asked(model, topic, gen)) for topic in TOPICS[:COUNT]]
    return time.perf_counter() - start, texts


def main():
    print(f"{COUNT} programs of {GENS} gens of {TOKENS} tokens, greedy, float32")
    apart, texts = ours(1)
    print(f"here, one after the other  {apart:6.2f} s")
    together, same = ours(COUNT)
    print(f"here, side by side         {together:6.2f} s; equal texts: {sum(map(str.__eq__, same, texts))} of {COUNT}")
    try:
        took, others = theirs()
    except ImportError:
        print("guidance is not installed")
        return
    print(f"guidance                   {took:6.2f} s; equal texts: {sum(map(str.__eq__, same, others))} of {COUNT}")


if __name__ == "__main__":
    sys.exit(main())
