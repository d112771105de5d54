"""Map a data frame's column: a Series in, a Series out, under the same labels; what is missing stays missing."""

import pandas as pd

import outlines_like as ol

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


def main():
    model = ol.models.transformers("smollm2-135m", raw=True, deterministic=True, temperature=0, max_tokens=2, stop="\n")

    @ol.elemwise
    def mood(review):
        return model(SHOTS.format(review)).strip()

    frame = pd.DataFrame({"review": ["My daughter loves it.", None, "It broke.", "Great sound."]}, index=[7, 8, 11, 12])
    frame["mood"] = mood(frame["review"])
    print(frame)


if __name__ == "__main__":
    main()
