"""What the local benchmark asks: short prompts (W1), samples of few-shot questions (W2), yes-or-no questions (W3)."""

import random

COUNTRIES = [
    "France",
    "Germany",
    "Italy",
    "Spain",
    "Portugal",
    "Japan",
    "China",
    "India",
    "Egypt",
    "Kenya",
    "Brazil",
    "Canada",
    "Mexico",
    "Peru",
    "Chile",
    "Norway",
    "Sweden",
    "Poland",
    "Greece",
    "Turkey",
]
THINGS = [
    "apple",
    "carrot",
    "tiger",
    "violin",
    "river",
    "mountain",
    "computer",
    "bicycle",
    "butter",
    "lamp",
    "shark",
    "eagle",
    "candle",
    "bridge",
    "tomato",
    "rocket",
    "hammer",
    "garden",
    "island",
    "pencil",
]
NAMES = ["Anna", "Ben", "Carla", "Dan", "Eva", "Frank", "Gina", "Hugo"]
SENTENCES = [
    "The package arrived two days late and the box was torn at one corner.",
    "I have used this kettle every morning for a year and it still looks new.",
    "The battery lasts about six hours, which is less than the seller promised.",
    "Customer service answered within an hour and sent me a replacement part.",
    "My daughter loves the color, but the buttons feel cheap and loose.",
    "It was easy to set up, although the manual is only in German.",
    "The sound is clear even at low volume, and the bass is warm.",
    "After three weeks the screen began to flicker and then went dark.",
    "We took it on a long trip and it handled rain and mud without trouble.",
    "For this price I would buy it again and tell my friends about it.",
    "The handle broke when I dropped it from the table, so I sent it back.",
    "The software update fixed the crash that I saw in the first week.",
]
EXEMPLARS = [
    (
        "A baker makes 12 loaves in the morning and 9 in the afternoon, and sells 15 of them. How many loaves are left?",
        "He makes 12 + 9 = 21 loaves in all, and after he sells 15 there are 21 - 15 = 6 left. The answer is 6.",
    ),
    (
        "A train has 8 cars with 24 seats each, and 150 seats are taken. How many seats are free?",
        "There are 8 * 24 = 192 seats, and 150 are taken, so 192 - 150 = 42 are free. The answer is 42.",
    ),
    (
        "Lena has 45 stamps and gives a third of them to her brother. How many stamps does she keep?",
        "A third of 45 is 45 / 3 = 15, so she keeps 45 - 15 = 30 stamps. The answer is 30.",
    ),
    (
        "A tank holds 60 liters and loses 4 liters each hour. How many liters are in it after 5 hours?",
        "It loses 4 * 5 = 20 liters in 5 hours, so 60 - 20 = 40 liters are left. The answer is 40.",
    ),
    (
        "There are 5 rows of 14 trees and 3 trees near the gate. How many trees are there?",
        "The rows have 5 * 14 = 70 trees, and with the 3 near the gate there are 73 trees. The answer is 73.",
    ),
]
INSTRUCTION = (
    "You read reviews of household products that buyers wrote on a shop's web page, and you decide for each one whether the "
    "shop should write back to the buyer. Write back when the buyer reports that something broke, arrived late, was missing, "
    "did not match its description, or when the buyer asks a question that the page does not answer. Do not write back when "
    "the buyer is content, when the review only praises or compares the product, or when the buyer says that the trouble has "
    "already been solved. If a review holds both praise and an unsolved complaint, the complaint decides. A complaint about "
    "the price alone does not count, nor does a remark about the color. Reviews in other languages are judged by the same "
    "rules. Jokes and irony are read the way a careful person would read them. When you are not sure, write back, since "
    "a needless letter costs less than an angry buyer. Answer with Yes if the shop should write back and "
    "with No if it should not.\n"
)


def short_prompts(count=128):
    """Chat turns of 10 to 200 tokens, whose answers end early or late."""
    dice = random.Random(0)
    return [f"<|im_start|>user\n{short(dice, k % 8)}<|im_end|>\n<|im_start|>assistant\n" for k in range(count)]


def short(dice, kind):
    """One of eight kinds of question."""
    country, thing = dice.choice(COUNTRIES), dice.choice(THINGS)
    few, some, many = (" ".join(dice.sample(SENTENCES, dice.randint(*span))) for span in ((1, 4), (4, 10), (8, 12)))
    return [
        f"What is the capital of {country}?",
        f"Hi {thing}",
        f"Review: {few}\nIs this review positive or negative? Answer with one word.",
        f"Write a short story about a {thing} in {country}.",
        f"Review: {some}\nSummarize the review in one sentence.",
        f"Name one color of a {thing}.",
        f"Review: {many}\nWhat does the buyer like most?",
        f"Is a {thing} a kind of food? Answer yes or no, then give a reason in a few words.",
    ][kind]


def few_shot(count=16):
    """Questions after the same ten worked examples, about 700 tokens of them."""
    head = "Solve each problem step by step in one line, and end the line with the answer.\n"
    head += "".join(f"Question: {question}\nAnswer: {answer}\n" for question, answer in EXEMPLARS * 2)
    return [f"{head}Question: {riddle(random.Random(n))}\nAnswer:" for n in range(count)]


def riddle(dice):
    """A small sum in words."""
    name, thing = dice.choice(NAMES), dice.choice(THINGS)
    most, each, gone, more = (dice.randint(*span) for span in ((5, 40), (3, 20), (2, 9), (2, 6)))
    story = f"{name} has {most} boxes with {each} {thing}s in each box, gives away {gone} of them to a friend, and then buys"
    return f"{story} {more} more at the market. How many does {name} have at the end?"


def yes_or_no(count=512):
    """Reviews under one instruction of about 200 tokens."""
    dice = random.Random(2)
    return [f"{INSTRUCTION}Review: {' '.join(dice.sample(SENTENCES, dice.randint(1, 3)))} ({n})\nAnswer:" for n in range(count)]
