"""A local model: one prefix for many questions, samples of each, and scores instead of words."""

import time

import outlines_like as ol

EXAMPLES = "Answer with one word.\n" + "".join(
    f"Question: {question}\nAnswer: {answer}\n"
    for question, answer in [
        ("What is the capital of Japan?", "Tokyo"),
        ("Which animal says moo?", "Cow"),
        ("What color is the sky?", "Blue"),
        ("How many legs has a spider?", "Eight"),
        ("What do bees make?", "Honey"),
    ]
)
QUESTIONS = ["What is the capital of France?", "Which animal barks?", "What color is grass?", "What do cows give?"]
model = ol.models.transformers("smollm2-135m", raw=True, stop="\n", max_tokens=8)


def timed(what, work):
    """The result of ``work``, and a line about how long it took."""
    start = time.perf_counter()
    result = work()
    print(f"{what}: {time.perf_counter() - start:.1f} s")
    return result


def main():
    """Ask, ask again, and score."""
    prompts = [f"{EXAMPLES}Question: {question}\nAnswer:" for question in QUESTIONS]
    with ol.cache.disabled():
        timed("the worker starts and answers", lambda: model("hello", max_tokens=1))
        samples = timed("4 questions, 10 samples each, the examples read once", lambda: model(prompts, samples=10))
        scores = timed(
            "the same questions scored, the examples not read again", lambda: model.scores(prompts, [" Paris", " Dog"])
        )
    for question, votes, row in zip(QUESTIONS, ol.vote(samples), scores, strict=True):
        print(f"{question:32} {votes.answer.strip():10} {votes.share:4.0%}   log p(Paris, Dog) = {row[0]:.1f}, {row[1]:.1f}")


if __name__ == "__main__":
    main()
