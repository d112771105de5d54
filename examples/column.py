"""Map a data frame's column: a Series in, a Series out, under the same labels; what is missing stays missing."""

import pandas as pd

import outlines_like as ol

SHOTS = """Review: I love this phone.
Sentiment: positive
Review: The screen cracked at once.
Sentiment: negative
Review: {}
Sentiment:"""


def main():
    model = ol.models.transformers("smollm2-135m", raw=True, temperature=0, max_tokens=2, stop="\n")

    @ol.elemwise
    def mood(review):
        return model(SHOTS.format(review)).strip()

    frame = pd.DataFrame({"review": ["My daughter loves it.", None, "It broke.", "Great sound."]}, index=[7, 8, 11, 12])
    frame["mood"] = mood(frame["review"])
    print(frame)


if __name__ == "__main__":
    main()
