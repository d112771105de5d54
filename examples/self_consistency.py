"""Self-consistency: sample several reasoning paths for each question, read off the answers, and let them vote.

Source: X. Wang et al., "Self-Consistency Improves Chain of Thought Reasoning in Language Models", ICLR 2023,
arXiv:2203.11171. The model here is far too small to reason well; the pipeline is the same for a large one.
"""

import re

import outlines_like as ol

EXEMPLARS = """Q: A baker makes 12 loaves in the morning and 9 in the afternoon, and sells 15. How many are left?
A: He makes 12 + 9 = 21 loaves. After he sells 15 there are 21 - 15 = 6. The answer is 6.
Q: A train has 8 cars with 24 seats each, and 150 seats are taken. How many seats are free?
A: There are 8 * 24 = 192 seats. 150 are taken, so 192 - 150 = 42 are free. The answer is 42.
Q: Lena has 45 stamps and gives a third of them to her brother. How many does she keep?
A: A third of 45 is 45 / 3 = 15. She keeps 45 - 15 = 30 stamps. The answer is 30.
"""
QUESTIONS = [
    "Tom has 3 apples and buys 4 more. How many apples does he have?",
    "A farmer packs 24 eggs in boxes of 12. How many boxes does she need?",
    "Anna reads 10 pages on Monday and 15 on Tuesday. How many pages does she read in all?",
]
NUMBER = re.compile(r"The answer is [^\d-]*(-?\d[\d,]*(?:\.\d+)?)")


@ol.vectorize
def answer(path):
    """The first number after "The answer is"; None where a path has none."""
    match = NUMBER.search(path)
    return float(match[1].replace(",", "")) if match else None


def main(samples=10):
    model = ol.models.transformers("smollm2-135m", raw=True)
    prompts = [f"{EXEMPLARS}Q: {question}\nA:" for question in QUESTIONS]
    paths = model(prompts, samples=samples, temperature=0.5, top_k=40, max_tokens=48, stop="Q:")
    for question, vote in zip(QUESTIONS, ol.vote(answer(paths)), strict=True):
        print(f"{question}\n  {vote.answer} (share {vote.share:.0%}, votes {vote.counts})")


if __name__ == "__main__":
    main()
