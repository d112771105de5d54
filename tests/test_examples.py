"""The examples run, and show what they promise."""

import importlib.util
from pathlib import Path

import pytest

import outlines_like as ol

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name):
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_column_keeps_its_labels_and_gaps(smollm2, capsys):
    example("column").main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["7", "8", "11", "12"]
    assert [line.split()[-1] for line in lines[1:]] == ["positive", "NaN", "negative", "positive"]


def test_paths_vote(smollm2, capsys):
    example("self_consistency").main(samples=2)
    out = capsys.readouterr().out
    assert out.count("share") == 3
    assert "How many apples does he have?" in out


def test_a_server_is_mapped_through_its_faults(capsys):
    example("map_api").main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "200 answers, the first 'WORD 0', the last 'WORD 199'"
    assert lines[1] == "three samples each: [['WORD 0', 'WORD 0', 'WORD 0!'], ['WORD 1', 'WORD 1', 'WORD 1!']]"
    assert lines[2:4] == [
        "str: SHORT",
        "ContextLengthError: the request is longer than the model can read: This model's ",
    ]
    assert lines[4] == "what a rerun would do: Plan(rows=200, cached=200, unique=200, calls=0)"


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("She has 23 - 15 = $8. The answer is $8.", 8),
        ("The answer is 1,234.5 and The answer is 7.", 1234.5),
        ("The answer is -3", -3),
        ("So 14 of them.", None),
        ("The answer is no number.", None),
    ],
)
def test_answers_are_the_first_number_after_the_phrase(path, number):
    assert example("self_consistency").answer(path) == number


def test_votes_are_read_off_paths():
    answer = example("self_consistency").answer
    paths = [["The answer is 18.", "The answer is 26.", "It is 18. The answer is 18."], ["Hm.", "Hm.", "The answer is 5."]]
    votes = ol.vote(answer(paths))
    assert [(vote.answer, vote.share) for vote in votes] == [(18, 2 / 3), (5, 1)]
