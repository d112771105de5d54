"""Whole scripts, ended in every way: what is kept, what is left behind, what is said."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

import outlines_like as ol

STRICT = [sys.executable, "-X", "dev", "-W", "error"]


def run(code, *, expect=0):
    """Run a script to its end; its output."""
    ended = subprocess.run([*STRICT, "-c", code], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (expect, "")
    return ended.stdout


def started(code, **settings):
    """A script that has printed its first line."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    script = subprocess.Popen([*STRICT, "-c", code], **pipes, **settings)
    assert script.stdout.readline()
    return script


MAP = """
import outlines_like as ol
asked = []
def answer(request):
    asked.append(request.text)
    print(len(asked), flush=True)
    return request.text.upper()
model = ol.models.fake(answer, delay=0.02, concurrency=4)
answers = model([f"row {i}" for i in range(200)])
print("asked", len(asked), answers[0], answers[199])
"""

LOOPS = {
    "asyncio": "import sys\nsys.modules['uvloop'] = None\n",
    "uvloop": "import outlines_like.bridge as b\nassert type(b.home().loop).__module__ == 'uvloop', type(b.home().loop)",
}


def test_a_second_run_of_a_script_asks_nothing_and_gives_the_same():
    """All 200 answers come from the store."""
    first, second = run(MAP), run(MAP)
    assert first.splitlines()[-1] == "asked 200 ROW 0 ROW 199"
    assert second.splitlines() == ["asked 0 ROW 0 ROW 199"]


def test_kill_9_loses_only_what_was_in_flight():
    """What a killed script had answered 50 ms before is not asked again; at most 4 calls are in flight."""
    script = started(MAP)
    told = [time.monotonic()]
    while len(told) < 100:
        script.stdout.readline()
        told.append(time.monotonic())
    script.send_signal(signal.SIGKILL)
    rest = script.stdout.read().splitlines()
    script.communicate()
    safe = sum(moment < told[-1] - 0.07 for moment in told)  # the 50 ms that a row may take, and the way to here
    again = int(re.search(r"asked (\d+)", run(MAP))[1])
    assert 200 - again >= safe - 4
    assert 200 - again <= len(told) + len(rest)
    assert safe > 50


@pytest.mark.parametrize(("to_group", "loop"), [(False, "uvloop"), (True, "asyncio")])
def test_ctrl_c_ends_a_script_and_keeps_what_is_done(to_group, loop):
    """A KeyboardInterrupt comes through, the answers until then are kept, nothing else is said."""
    code = LOOPS[loop] + MAP.replace("answers = model(", "import sys\ntry:\n    answers = model(").replace(
        "\nprint(", "\nexcept KeyboardInterrupt:\n    sys.exit(130)\nprint("
    )
    script = subprocess.Popen(
        [*STRICT, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    for _ in range(60):
        script.stdout.readline()
    (os.killpg if to_group else os.kill)(script.pid, signal.SIGINT)
    _, said = script.communicate(timeout=30)
    assert (script.returncode, said) == (130, "")
    assert int(re.search(r"asked (\d+)", run(MAP))[1]) <= 200 - 60 + 4


LOCAL = """
import sys
import outlines_like as ol
model = ol.models.transformers("smollm2-135m")
try:
    for event in model.stream(["Tell me a long story."] * 4, max_tokens=400, temperature=0.5):
        print(event[2], flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_ctrl_c_leaves_no_worker(smollm2):
    """The worker of an interrupted script is gone with it."""
    script = started(LOCAL, start_new_session=True)
    workers = psutil.Process(script.pid).children(recursive=True)
    assert workers
    os.killpg(script.pid, signal.SIGINT)  # as a terminal sends it
    _, said = script.communicate(timeout=30)
    assert (script.returncode, said) == (130, "")
    assert not psutil.wait_procs(workers, timeout=10)[1]


ENDINGS = {
    "to its end": ("model(['a b', 'c'])", 0),
    "by sys.exit": ("model('a b'); import sys; sys.exit(3)", 3),
    "from a thread": ("import threading; t = threading.Thread(target=model, args=('a b',)); t.start(); t.join()", 0),
    "with a stream left open": ("s = iter(model.stream(['a b c', 'd e f'])); next(s)", 0),
    "with a stream left by break": ("for _ in model.stream(['a b c', 'd e f']): break", 0),
    "within asyncio.run": ("import asyncio; asyncio.run(model.acall(['a', 'b'])); asyncio.run(model.acall('a'))", 0),
    "with an async stream left by break": (
        "import asyncio\nasync def main():\n    async for _ in model.stream(['a b c', 'd']): break\nasyncio.run(main())",
        0,
    ),
    "after a fork": ("import os; model('a'); pid = os.fork(); model('b'); os.waitpid(pid, 0) if pid else os._exit(0)", 0),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_scripts_end_without_a_word(ending):
    """No unclosed thing, no task, no thread is complained about."""
    code, status = ENDINGS[ending]
    fork = "import warnings; warnings.simplefilter('ignore', DeprecationWarning)\n" if "fork" in ending else ""
    assert run(f"{fork}import outlines_like as ol\nmodel = ol.models.fake()\n{code}", expect=status) == ""


def test_an_error_ends_a_script_with_its_own_traceback_alone():
    """The user's error is what is seen."""
    code = "import outlines_like as ol\nol.vectorize(int)(['1', 'two'])"
    ended = subprocess.run([*STRICT, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "RowErrors: 1 of 2 rows failed; the first, at (1,): ValueError: invalid literal" in ended.stderr
    assert not re.search("never|Unclosed|Exception ignored|Task", ended.stderr)


def test_importing_is_light_and_silent():
    """No optional package is loaded, nor any that only a call needs."""
    heavy = "('torch', 'transformers', 'pandas', 'polars', 'narwhals', 'aiohttp', 'diskcache')"
    assert run(f"import sys, outlines_like; print([name for name in {heavy} if name in sys.modules])") == "[]\n"


def test_keys_are_the_same_in_every_process(monkeypatch):
    """Neither the seed of hashing, nor keyword order, nor NumPy's scalars change the name of an answer."""
    code = """
import numpy as np, outlines_like as ol
log = []
model = ol.models.fake(log=log, seed=3)
model(["a", np.str_("b")], temperature=np.float64(0.5), stop={"x", "y", "z"}, max_tokens=np.int64(5))
print(len(log))
"""
    other = code.replace(
        'temperature=np.float64(0.5), stop={"x", "y", "z"}, max_tokens=np.int64(5)',
        'max_tokens=5, stop={"z", "x", "y"}, temperature=0.5, seed=3',
    )
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert run(code) == "2\n"
    monkeypatch.setenv("PYTHONHASHSEED", "2")
    assert (run(code), run(other)) == ("0\n", "0\n")


def test_it_works_in_a_notebook(smollm2):
    """Sync calls, awaited calls, streams and the local model run in a kernel's own event loop."""
    nbformat = pytest.importorskip("nbformat")
    from nbclient import NotebookClient

    cells = [
        "import outlines_like as ol\nmodel = ol.models.fake()\nmodel(['a', 'b']).tolist()",
        "(await model.acall(['a', 'b'], samples=2)).tolist()",
        "[text async for _, text, _ in model.stream('so it goes')]",
        "ol.models.transformers('smollm2-135m')('What is the capital of France?', temperature=0, max_tokens=8)",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(book, timeout=120, kernel_name="python3").execute()
    shown = [cell.outputs[-1]["data"]["text/plain"] for cell in book.cells]
    assert shown == [
        "['A', 'B']",
        "[['A', 'A'], ['B', 'B']]",
        "['SO', 'SO IT', 'SO IT GOES']",
        "'The capital of France is Paris.'",
    ]


def test_the_store_is_shared_with_what_a_script_wrote():
    """A second process finds what this one has kept."""
    model = ol.models.fake()
    with ol.cache.refresh():
        model(["x", "y"])
    out = run("import outlines_like as ol\nprint(ol.models.fake().plan(['x', 'y', 'z']))")
    assert out == "Plan(rows=3, cached=2, unique=3, calls=1)\n"
