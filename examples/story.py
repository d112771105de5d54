"""A program watched while it runs, on a small real model, all on this machine: `python examples/story.py`."""

import outlines_like as ol


@ol.program
def title(lm):
    """Asks for a title of what was told."""
    lm += ol.user("Give this story a title of a few words.")
    return lm + ol.assistant(ol.gen("title", max_tokens=12, stop="\n", temperature=0))


@ol.program
def tell(lm, animal):
    """Tells a story, and gives it a title if it became one."""
    with ol.user():
        lm += f"Tell me a story about a {animal} in two sentences."
    with ol.assistant():
        lm += ol.gen("story", max_tokens=60, temperature=0)
    return lm + title() if animal in lm["story"] else lm


def main():
    lm = ol.models.transformers("smollm2-135m", deterministic=True)
    for part in lm.stream() + tell("fish"):
        print(part.delta, end="", flush=True)
    print(f"\n\ncaptured: {', '.join(part.captures)}; tokens written: {part.usage.completion_tokens}")


if __name__ == "__main__":
    main()
