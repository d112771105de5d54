"""What a model's maker can't do: run code, take all time or memory, or bring an engine down by an odd error."""

from __future__ import annotations

import json
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from outlines_like.errors import ModelError, NotFoundError, PromptError, UnreachableError, WorkerError
from outlines_like.worker import bounds, fetching
from outlines_like.worker.loading import load
from outlines_like.worker.prompting import Reader
from outlines_like.worker.turns import in_turn
from outlines_like.worker.wire import Ask, Setup

from .models_for_tests import byte_level, saved, tiny
from .test_worker import drain, engine_for

BOMBS = {
    "endless loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10**10 }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(64) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x|length }}",
    "a wide number": "{{ '%2000000000d' % 1 }}",
    "a large power": "{{ 9 ** (9 ** 9) }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a file": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_that_takes_too_much_fails_its_row_and_leaves_no_trace(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.2)
    with pytest.raises(PromptError, match="chat template refuses"):
        Reader(byte_level(chat_template=BOMBS[name])).ids("hi")
    assert len("a" * (100 << 20)) == 100 << 20
    assert Reader(byte_level(chat_template="{{ messages[0].content }}")).ids("hi")


def spin() -> None:
    while True:
        pass


def test_bounds_say_what_was_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.05)
    with pytest.raises(bounds.OutOfBounds, match=r"more than 0\.05 s"), bounds.bounded():
        spin()
    with pytest.raises(bounds.OutOfBounds, match="64 MiB"), bounds.bounded():
        bytearray(1 << 30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("models") / "tiny", tiny(), byte_level())


def pickled(folder: Path, target: Path, mark: Path) -> Path:
    """The same model with its weights in a pickle that touches ``mark`` when it is loaded."""
    shutil.copytree(folder, target)
    (target / "model.safetensors").unlink()

    class Payload:
        def __reduce__(self) -> Any:
            return (open, (str(mark), "w"))

    torch.save({"weight": Payload()}, target / "pytorch_model.bin")
    return target


def test_weights_in_pickle_files_are_loaded_only_when_asked_and_then_run_no_code(folder: Path, tmp_path: Path) -> None:
    place = pickled(folder, tmp_path / "pickled", tmp_path / "mark")
    with pytest.raises(NotFoundError, match=r"pickle files only.*give pickled=True"):
        load(Setup(str(place), "cpu", "float64", False, 1))
    with pytest.raises(Exception, match=r"(?i)weights_only|unpickl|unsupported"):
        load(Setup(str(place), "cpu", "float64", False, 1, pickled=True))
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_that_a_model_brings_is_not_run(folder: Path, tmp_path: Path, file: str) -> None:
    place = shutil.copytree(folder, tmp_path / "own")
    kinds = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model", "AutoTokenizer": ["own.Words", None]}
    settings = json.loads((place / file).read_text())
    (place / file).write_text(json.dumps({**settings, "auto_map": kinds, "model_type": "owned"}))
    (place / "own.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    with suppress(ValueError):  # where only the tokenizer has code of its own, it is left out
        load(Setup(str(place), "cpu", "float64", False, 1))
    assert not (tmp_path / "mark").exists()


def test_a_folder_that_is_half_there_is_a_clear_error(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "half")
    (place / "config.json").unlink()
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        fetching.checked(place, pickled=False)


def test_an_unknown_name_without_a_hub_is_a_clear_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    start = time.perf_counter()
    with pytest.raises(UnreachableError, match="not on this machine"):
        fetching.fetched("nobody/nothing-at-all", pickled=False)
    assert time.perf_counter() - start < 30  # it waited for a minute once


class Unspeakable(Exception):
    """Has no text, no plain arguments and no way through a pickle."""

    def __init__(self, *things: object, needed: object) -> None:
        self.things = things

    def __str__(self) -> str:
        raise RuntimeError("not this either")

    def __reduce__(self) -> Any:
        raise TypeError("never")


class Looping(Exception):
    """Is its own cause and its own argument."""

    def __init__(self) -> None:
        super().__init__(self)
        self.__cause__ = self


class Nameless(Exception):
    """Has neither a name nor a representation."""

    def __repr__(self) -> str:
        raise RecursionError("no end")

    __str__ = __repr__


Nameless.__name__ = Nameless.__qualname__ = ""


def chained(length: int) -> Exception:
    """The last one of a long chain of errors."""
    error = Exception("the first")
    for number in range(length):
        later = Exception(f"link {number}")
        later.__cause__, error = error, later
    return error


AWKWARD = [
    Looping(),
    Nameless(),
    chained(3000),
    ExceptionGroup("deep", [ExceptionGroup("deeper", [ExceptionGroup("deepest", [ValueError(1)] * 500)])]),
    ValueError(b"\xff" * 100_000_000),
    ValueError("x" * 100_000_000),
    SyntaxError("no", ("file", 1, 2, "text", 3, 4)),
    SyntaxError(None),
    OSError(),
    OSError(2, "no such file", Path("a"), None, Path("b")),
    UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogate"),
    ImportError("no", name="torch", path="/"),
    KeyError(),
    KeyError("\0\x1b[31m"),
    AttributeError("no", name="x", obj=lambda: 0),
    StopAsyncIteration(),
    ArithmeticError(threading.Lock()),
    LookupError(x for x in ()),
    TimeoutError(object()),
    type("A" * 100_000, (Exception,), {})("long name"),
    Unspeakable(needed=1),
    KeyError(lambda: 0),
    RecursionError("deep"),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "odd"),
    ExceptionGroup("many", [ValueError("\ud800")]),
    OSError(5, "x" * 10_000_000),
    type("Local", (Exception,), {"__module__": None})("x"),
    StopIteration(3),
    MemoryError(),
    AssertionError(),
]


def test_whatever_a_row_provokes_crosses_as_plain_data_and_costs_only_that_row(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny(), byte_level())
    errors, real = iter(AWKWARD), engine._open

    def opened(ask: Ask) -> None:
        if ask.prompt == "odd":
            raise next(errors)
        real(ask)

    monkeypatch.setattr(engine, "_open", opened)
    engine.take([Ask(n, "odd" if n < len(AWKWARD) else "the", {"max_tokens": 2}, str(n), False) for n in range(32)])
    news = drain(engine)
    assert len(AWKWARD) == 30
    assert [fault.id for fault in news.faults] == list(range(len(AWKWARD)))
    assert all(fault.kind == WorkerError.__name__ and 0 < len(fault.message) <= 2000 for fault in news.faults)
    assert {answer.id for answer in news.answers} == {30, 31}


def test_a_call_of_one_row_is_next_however_many_rows_another_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outlines_like.worker.engine.ROWS", 4)
    engine = engine_for(tiny(eos_token_id=None), byte_level(), fast=True)
    engine.take([Ask(n, f"the cat {n}", {"max_tokens": 5}, str(n), False, call=1) for n in range(40)])
    engine.step()
    engine.take([Ask(99, "a dog", {"max_tokens": 5}, "99", False, call=2)])
    order = [answer.id for answer in drain(engine).answers]
    assert order.index(99) < 9


class Called:
    def __init__(self, call: int, name: str = "") -> None:
        self.call, self.name = call, name


def test_turns_give_every_call_as_many_running_rows() -> None:
    waiting = [Called(call, f"{call}{k}") for call in (1, 2) for k in range(3)]
    assert [row.name for row in in_turn(waiting)] == ["10", "20", "11", "21", "12", "22"]
    assert [row.name for row in in_turn(waiting, [Called(1), Called(1)])] == ["20", "21", "10", "22", "11", "12"]
    assert in_turn([]) == []


def test_our_own_errors_keep_their_kind() -> None:
    from outlines_like.worker.engine import fault

    assert fault(1, PromptError("no")).kind == "PromptError"
    assert issubclass(PromptError, ModelError)
