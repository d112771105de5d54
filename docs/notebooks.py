"""Pages as executed notebooks: `python docs/notebooks.py` makes docs/programs.ipynb of docs/programs.md."""

import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
CODE = re.compile(r"```pycon\n(.*?)\n\n?```\n", re.DOTALL)


def code_of(session):
    """The cells of an interactive session: one for each of its statements that shows something."""
    cells, lines = [], []
    for line in session.splitlines():
        if line.startswith((">>> ", "... ", ">>>", "...")):
            lines.append(line[4:])
        elif lines:
            cells.append("\n".join(lines))
            lines = []
    return [*cells, "\n".join(lines)] if lines else cells


def book_of(page):
    """A page as a notebook: its text as it is, its sessions as cells; what raises on purpose is marked so."""
    import nbformat

    cells = []
    for place, part in enumerate(CODE.split(page)):
        if place % 2 == 0:
            cells.append(nbformat.v4.new_markdown_cell(part.strip(), id=f"text-{place}"))
            continue
        for number, code in enumerate(code_of(part)):
            tags = {"tags": ["raises-exception"]} if "Traceback" in part else {}
            cells.append(nbformat.v4.new_code_cell(code, id=f"code-{place}-{number}", metadata=tags))
    return nbformat.v4.new_notebook(cells=cells)


def executed(book, folder):
    """The same with what its cells show."""
    from nbclient import NotebookClient

    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}).execute()
    for cell in book.cells:
        cell.metadata.pop("execution", None)
    return book


if __name__ == "__main__":
    import tempfile

    import nbformat

    for name in sys.argv[1:] or ["programs"]:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["OUTLINES_LIKE_CACHE"] = folder  # nothing is known beforehand
            nbformat.write(executed(book_of((DOCS / f"{name}.md").read_text("utf-8")), folder), DOCS / f"{name}.ipynb")
