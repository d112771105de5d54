"""The live table."""

import subprocess
import sys
from pathlib import Path

import pytest

import outlines_like as ol
from outlines_like import Failure, Snapshot
from outlines_like.watching import Board, tail, words


def test_a_board_shows_what_runs_and_what_came_last():
    board = Board(total=4, height=2)
    board.note([Snapshot((0,), "one two", False), Snapshot((1,), "done\nhere"), Snapshot((2,), Failure(LookupError("x")))])
    board.note([Snapshot((0,), "one two three", False)])
    assert board.lines() == [("(0,)", "running", "one two three"), ("(2,)", "failed", "LookupError: x")]
    assert board.title.startswith("4 rows: 1 done, 1 failed, 1 running; about ")
    assert board.letters == len("one two three") + len("done here")
    assert "<td>(0,)</td>" in board.html()


def test_what_rows_say_is_no_markup():
    board = Board(1, 5)
    board.note([Snapshot((0,), "<b>[red]x", True)])
    assert "&lt;b&gt;[red]x" in board.html()


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (None, "None"), (ol.Completion("a\nb"), "a b"), (ValueError("v"), "ValueError: v")]
)
def test_every_value_has_words(value, text):
    assert words(value) == text


def test_long_texts_show_their_last_words():
    assert tail("short") == "short"
    assert tail("word " * 50).startswith("…word")


def test_watching_gives_the_array(capsys):
    assert (ol.models.fake().stream(["a", "b"]) | ol.watch).tolist() == ["A", "B"]
    assert "2 rows: 2 done, 0 failed, 0 running" in capsys.readouterr().out


def test_failures_are_shown_then_raised(capsys):
    with pytest.raises(ol.RowErrors):
        ol.vectorize(lambda x: 1 / x).stream([1, 0]) | ol.watch(height=5)
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_watching_without_rich_says_what_to_install():
    script = """
import sys
sys.modules["rich.live"] = None
import outlines_like as ol
try:
    ol.models.fake().stream("a") | ol.watch
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert "outlines_like[watch]" in done.stdout


def test_a_notebook_shows_a_table_that_is_updated(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cell = "import outlines_like as ol\n(ol.models.fake().stream(['a b', 'c']) | ol.watch).tolist()"
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = book.cells[0].outputs
    assert "2 rows: 2 done" in outputs[0]["data"]["text/html"]
    assert outputs[-1]["data"]["text/plain"] == "['A B', 'C']"


def test_the_notebook_of_the_docs_runs(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.read(Path(__file__).parents[1] / "docs" / "streaming.ipynb", 4)
    shown = [cell.get("outputs") for cell in book.cells if cell.cell_type == "code"]
    assert all(shown)
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
