"""What users see and what an interpreter that imports us sees."""

import inspect
import os
import subprocess
import sys

import pytest

import outlines_like as ol

OPTIONAL = (
    "torch",
    "transformers",
    "aiohttp",
    "diskcache",
    "platformdirs",
    "pandas",
    "polars",
    "narwhals",
    "ray",
    "safetensors",
    "gguf",
    "jinja2",
)


def python(script, folder, *options, seconds=30):
    """A script under ``-X dev -W error``."""
    env = {**os.environ, "OUTLINES_LIKE_CACHE": str(folder / "answers")}
    command = [sys.executable, "-X", "dev", "-W", "error", *options, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=env, cwd=folder)


def public():
    for name in ol.__all__:
        yield name, getattr(ol, name)
    for room in (ol.models, ol.errors, ol.cache):
        for name in getattr(room, "__all__", [name for name in vars(room) if not name.startswith("_")]):
            thing = getattr(room, name)
            if getattr(thing, "__module__", "").startswith(room.__name__):
                yield f"{room.__name__}.{name}", thing


ALIASES = {"Elementwise", "Layer"}


@pytest.mark.parametrize(
    ("name", "thing"),
    [pair for pair in public() if pair[0] not in ALIASES],
    ids=[name for name, _ in public() if name not in ALIASES],
)
def test_every_public_name_says_what_the_caller_gets(name, thing):
    assert inspect.getdoc(thing)
    for method, member in vars(thing).items() if inspect.isclass(thing) else ():
        if inspect.isfunction(member) and not method.startswith("_") and not hasattr(BaseExceptionGroup, method):
            assert inspect.getdoc(member), f"{name}.{method}"


def test_the_list_of_public_names_is_whole_and_sorted():
    assert ol.__all__ == sorted(ol.__all__)
    assert all(hasattr(ol, name) for name in ol.__all__)
    seen = {name for name, thing in vars(ol).items() if not name.startswith("_") and not inspect.ismodule(thing)}
    assert seen <= set(ol.__all__)
    assert set(ol.models.__all__) <= set(dir(ol.models))
    with pytest.raises(AttributeError, match="no 'opnai'"):
        ol.models.opnai  # noqa: B018


def test_every_error_is_ours_and_on_the_drawing():
    tree = ol.errors.__doc__
    for name, thing in vars(ol.errors).items():
        if inspect.isclass(thing) and issubclass(thing, BaseException):
            assert name in tree
            assert issubclass(thing, ol.OutlinesError) or issubclass(thing, Warning)


def test_importing_loads_nothing_optional_and_prints_nothing(tmp_path):
    done = python(
        f"import outlines_like, sys, threading; print([m for m in {OPTIONAL} if m in sys.modules], threading.active_count())",
        tmp_path,
    )
    assert (done.stdout, done.stderr) == ("[] 1\n", "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["fake", "Model"])
def test_a_model_of_one_kind_loads_no_other(name, tmp_path):
    done = python(
        f"import outlines_like as ol, sys; ol.models.{name}; print([m for m in {OPTIONAL} if m in sys.modules])", tmp_path
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


START = """
import asyncio, sys, threading
import outlines_like as ol
model = ol.models.fake()
async def hang(x):
    if x == "slow":
        await asyncio.Event().wait()
    return x
"""
ENDINGS = {
    "normally": ("print(model(['a', 'b'], samples=2).tolist())", 0, "[['A', 'A'], ['B', 'B']]\n", ""),
    "unused": ("", 0, "", ""),
    "by sys.exit": ("print(model('a')); sys.exit(3)", 3, "A\n", ""),
    "by sys.exit in a function": ("ol.vectorize(lambda x: sys.exit(4))(['a', 'b'])", 4, "", ""),
    "by an error": ("model('a'); raise LookupError('mine')", 1, "", "LookupError: mine"),
    "by a row's error": ("ol.vectorize(lambda x: 1 / 0)(['a'])", 1, "", "ZeroDivisionError: division by zero"),
    "from a thread": ("t = threading.Thread(target=lambda: print(model('a'))); t.start(); t.join()", 0, "A\n", ""),
    "with a stream left": ("for part in ol.vectorize(hang).stream(['a', 'slow']): print(part[1]); break", 0, "a\n", ""),
    "with a stream held": ("s = iter(ol.vectorize(hang).stream(['a', 'slow'])); print(next(s)[1])", 0, "a\n", ""),
    "with an async stream left": (
        "async def main():\n"
        "    async for part in ol.vectorize(hang).stream(['a', 'slow']): print(part[1]); break\n"
        "asyncio.run(main())",
        0,
        "a\n",
        "",
    ),
    "after asyncio.run": ("print(asyncio.run(model.acall('a'))); print(asyncio.run(model.acall('b')))", 0, "A\nB\n", ""),
    "with a call cancelled": (
        "async def main():\n"
        "    try:\n        async with asyncio.timeout(0.05): await ol.vectorize(hang).acall(['slow'])\n"
        "    except TimeoutError: print('late')\nasyncio.run(main())",
        0,
        "late\n",
        "",
    ),
    "with a thread in a call": (
        "threading.Thread(target=lambda: ol.vectorize(hang)('slow'), daemon=True).start(); model('a')",
        0,
        "",
        "",
    ),
    "with nested calls": ("print(ol.vectorize(lambda x: model([x, x])[0])(['a', 'b']).tolist())", 0, "['A', 'B']\n", ""),
}


@pytest.mark.parametrize("way", ENDINGS)
def test_a_script_ends_without_a_word_of_ours(way, tmp_path):
    """C06."""
    script, code, out, last = ENDINGS[way]
    done = python(START + script, tmp_path, seconds=20)
    assert (done.returncode, done.stdout) == (code, out)
    if not last:
        assert done.stderr == ""
    else:
        assert last in done.stderr
        assert not any(
            word in done.stderr
            for word in ("Unclosed", "never retrieved", "Exception ignored", "was destroyed", "never awaited", "Warning")
        )


def test_a_call_from_a_forked_child_has_a_loop_of_its_own(tmp_path):
    script = START + (
        "import os, warnings\nwarnings.simplefilter('ignore', DeprecationWarning)\nprint(model('a'), flush=True)\n"
        "pid = os.fork()\nif not pid: print(model('b'), flush=True); os._exit(0)\nos.waitpid(pid, 0)\nprint(model('c'))"
    )
    done = python(script, tmp_path)
    assert (done.stdout, done.stderr) == ("A\nB\nC\n", "")
