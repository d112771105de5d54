"""Watch many answers at once, stop early, and let rows flow through a pipe. Runs offline; name a model's path to use it.

python examples/stream.py [smollm2-135m]
"""

import sys

import outlines_like as ol


def stories(request):
    """What the fake says."""
    hero = request.text.split()[-1]
    return f"once upon a time there was {hero} . it was small . then it grew and grew until everybody left ."


def main(path=None):
    """Print deltas, whole sentences, an early end, and a pipe's rows as they finish."""
    model = ol.models.transformers(path, max_tokens=40) if path else ol.models.fake(stories)
    topics = ["a fish", "a fox", "a fog"]
    ask = ol.pipe(lambda topic: f"Tell a story about {topic}", model)

    print("deltas:", end=" ")
    for _, text in ask.stream("a fish") | ol.deltas:
        print(text, end="|", flush=True)

    print("\n\nsentences as they are whole:")
    for index, sentence in ask.stream(topics) | ol.sentences:
        print(f"  {topics[index[0]]}: {sentence}")

    print("\nended after 30 letters:")
    with ol.cache.disabled():  # what the store knows comes whole
        print(ask.stream(topics) | ol.stop_when(lambda text: len(text) >= 30) | ol.collect)

    print("\nthe first two to finish, counted:")
    count = ol.pipe(ask, str.split, len)
    for index, words in count.stream(topics) | ol.first(2) | ol.finished:
        print(f"  {topics[index[0]]}: {words} words")


if __name__ == "__main__":
    main(*sys.argv[1:])
