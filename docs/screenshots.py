"""Pictures for the docs: `watch` in a terminal (tmux), and in an executed notebook, by a headless browser.

python docs/screenshots.py            needs tmux, chromium, nbconvert, nbclient and rich
"""

import io
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
ROOT = Path(__file__).parents[1]

DEMO = """
import asyncio, random
import outlines_like as ol

WORDS = "the quick brown fox jumps over the lazy dog while a small model tells a story".split()

async def tell(topic):
    dice = random.Random(topic)
    text = f"A story about {topic}:"
    for _ in range(dice.randint(20, 90)):
        text += " " + dice.choice(WORDS)
        yield text
        await asyncio.sleep(dice.random() / 20)
    if topic == "fog":
        raise ConnectionError("the line broke")

topics = ["fish", "rain", "trains", "a fox", "fog", "tea", "snow", "maps", "owls", "ships"]
"""
WATCH = 'answers = ol.vectorize(tell, on_error="return").stream(topics) | ol.watch'
PROGRAM = """
chat = ol.models.fake(lambda request: "Once upon a time there was a fish. <b>It</b> was small.", chat=True)
chat + ol.system("Be brief.") + ol.user("Tell me a story about a fish.") + ol.assistant(ol.gen("story"))
"""


def photographed(page, image, size):
    """A web page as a picture."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--window-size={size}"]
    command = ["chromium", *flags, f"--screenshot={image}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def terminal(folder):
    """`watch` in tmux, in the middle of its work."""
    from rich.console import Console
    from rich.text import Text

    script = Path(folder, "demo.py")
    script.write_text(DEMO + WATCH)
    tmux = ["tmux", "-L", "outlines_like_docs"]
    subprocess.run([*tmux, "new-session", "-d", "-x", "92", "-y", "18", f"{sys.executable} {script}"], check=True, cwd=ROOT)
    try:
        time.sleep(2.5)
        seen = subprocess.run([*tmux, "capture-pane", "-ep"], capture_output=True, text=True, check=True).stdout
    finally:
        subprocess.run([*tmux, "kill-server"], check=False)
    console = Console(record=True, width=92, file=io.StringIO())
    console.print(Text.from_ansi(seen.rstrip()))
    page = Path(folder, "terminal.html")
    page.write_text(console.export_html(inline_styles=True).replace("<body>", '<body style="background:#fff;zoom:1.3">'))
    photographed(page, IMAGES / "watch-terminal.png", "1050,390")


def notebook(folder):
    """An executed notebook: `watch`, and a program as a cell's result."""
    import nbformat
    from nbclient import NotebookClient
    from nbconvert import HTMLExporter

    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code.strip()) for code in (DEMO, WATCH, PROGRAM)])
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}}).execute()
    page = Path(folder, "notebook.html")
    page.write_text(HTMLExporter().from_notebook_node(book)[0])
    photographed(page, IMAGES / "watch-notebook.png", "1000,900")


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        terminal(folder)
        notebook(folder)
