"""The library at work on a small real model, all on this machine. Run it with `make demo`."""

import tempfile

import outlines_like as ol

REVIEWS = [
    "The kettle still looks new after a year.",
    "The box was torn and the lamp inside was broken.",
    "My daughter loves it.",
    "It stopped working after two days.",
    "Great sound for the price.",
    "The manual is missing and nobody answers.",
    "Easy to set up, works at once.",
    "The buttons feel cheap and loose.",
    "I would buy it again.",
    "It arrived two weeks late.",
    "The battery lasts all day.",
    "A waste of money.",
]
SHOTS = """Review: I love this phone. It was a good buy.
Sentiment: positive
Review: The screen cracked at once.
Sentiment: negative
Review: It smells bad.
Sentiment: negative
Review: The best chair I ever had.
Sentiment: positive
Review: They never sent my order.
Sentiment: negative
Review: It works well and my son is happy with it.
Sentiment: positive
Review: {}
Sentiment:"""
PLACES = ["France", "Japan", "Egypt"]
QUESTIONS = [[f"What is the capital of {place}?" for place in PLACES], [f"Where is {place}?" for place in PLACES]]
SEA = "Tell me about the sea in one sentence."
NAMES = ["Name a color.", "Name an animal.", "Name a city."]


def tour(base, chat):
    """Ask everything there is in this demo; return the texts and how many of them a model had to write."""
    parts = [
        base.complete([SHOTS.format(review) for review in REVIEWS], temperature=0, max_tokens=2, stop="\n"),
        chat.complete(QUESTIONS, temperature=0, max_tokens=16),
        chat.complete(NAMES, samples=5, temperature=0.7, max_tokens=6),
    ]
    written = sum(not completion.cached for part in parts for completion in part.flat)
    return [ol.vectorize(lambda completion: completion.text)(part) for part in parts], written


def show(title, array):
    """Print an array's shape and its first values."""
    print(f"\n{title}: shape {array.shape}")
    for row in array:
        print("  ", row if isinstance(row, str) else list(row))


def main():
    with tempfile.TemporaryDirectory() as folder, ol.cache.at(folder):
        base = ol.models.transformers("smollm2-135m", raw=True, deterministic=True)
        chat = ol.models.transformers("smollm2-135m", deterministic=True)
        (moods, answers, names), written = tour(base, chat)
        print(f"A column of reviews: shape {moods.shape}")
        for review, mood in zip(REVIEWS, moods, strict=True):
            print(f"  {mood.strip():9} {review}")
        show("A grid of prompts", answers)
        show("Five samples of each prompt", names)
        print("\nOne answer as it comes:\n  ", end="")
        shown = ""
        for _, text, _ in chat.stream(SEA, temperature=0, max_tokens=40):
            print(text[len(shown) :], end="", flush=True)
            shown = text
        again, rewritten = tour(base, chat)
        sea = chat.complete(SEA, temperature=0, max_tokens=40)
        rewritten += not sea.cached
        same = (
            all((one == other).all() for one, other in zip(again, (moods, answers, names), strict=True)) and sea.text == shown
        )
        print(f"\n\nThe first run wrote {written + 1} answers.")
        print(f"The same again, from the store: {rewritten} model calls, equal answers: {same}.")


if __name__ == "__main__":
    main()
