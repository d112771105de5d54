"""Asking by batch: the same answers at half the price, paid for once whatever becomes of the script."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outlines_like as ol
from outlines_like import bridge
from outlines_like.errors import (
    AccessError,
    AuthenticationError,
    BadRequestError,
    BatchError,
    ContentFilterError,
    MalformedError,
    ModelError,
    ServerError,
    TimedOutError,
)
from outlines_like.models import lines, openai, orders, pacing

from .batch_server import Bureau, Said, right, shout, unreached, wrong
from .replay import Replay, Step, respond

COUNT = iter(range(10**6))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "TRIP", 10**9)
    for name, value in {"FIRST": 0.001, "MOST": 0.01, "backoff": lambda attempt, errors: 0.0}.items():
        monkeypatch.setattr(orders, name, value)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def bureau(replay: Replay) -> Bureau:
    return Bureau(replay, f"batches{next(COUNT)}")


def model_at(bureau: Bureau, **settings: Any) -> Any:
    return openai("m", base_url=bureau.url, **settings)


def by_batch(bureau: Bureau, on_error: str = "raise", **settings: Any) -> Any:
    return ol.vectorize(model_at(bureau, **settings), via="batch", on_error=on_error)


def forget_models(folder: Path) -> None:
    """As a new process would begin: without what this one holds of the store."""
    if store := bridge.disown(("store", str(folder))):
        bridge.wait(store.aclose)


# The same call.


def test_a_batch_answers_as_the_server_would(bureau: Bureau) -> None:
    answers = by_batch(bureau)([["a", "b"], ["c", None]], temperature=0.5)
    assert answers.tolist() == [["A", "B"], ["C", None]]
    (sent,) = bureau.sent
    assert sent[0]["body"] == {"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": 0.5}
    assert bureau.asked[:2] == ["POST files", "POST batches"]
    assert bureau.asked[-1] == "GET files"


def test_samples_of_a_prompt_share_a_line(bureau: Bureau) -> None:
    assert by_batch(bureau)(["a", "b"], samples=3).tolist() == [["A 0", "A 1", "A 2"], ["B 0", "B 1", "B 2"]]
    assert [line["body"]["n"] for line in bureau.sent[0]] == [3, 3]


def test_answers_stored_by_a_batch_are_free_online_and_the_other_way_round(bureau: Bureau) -> None:
    model = model_at(bureau)
    assert model("a") == "A"
    assert ol.vectorize(model, via="batch")(["a", "b"]).tolist() == ["A", "B"]
    assert [[line["body"]["messages"][0]["content"] for line in sent] for sent in bureau.sent] == [["b"]]
    before = len(bureau.asked)
    assert model(["a", "b"]).tolist() == by_batch(bureau)(["b", "a"]).tolist()[::-1] == ["A", "B"]
    assert len(bureau.asked) == before


def test_completions_conversations_and_stops_are_the_same(bureau: Bureau) -> None:
    complete = ol.vectorize(model_at(bureau).complete, via="batch")
    told = complete([[{"role": "user", "content": "one stop two"}]], stop=" STOP")
    assert (told[0].text, told[0].finish_reason, told[0].usage.completion_tokens) == ("ONE", "stop", 2)


def test_azure_keeps_files_and_batches_outside_of_deployments(replay: Replay) -> None:
    """Its lines name the endpoint without a version, and a file is read before a batch is made of it."""
    bureau = Bureau(replay, "azure-batches", route="/chat/completions", status="pending")
    model = openai("my-gpt", base_url=bureau.url.removesuffix("/v1"), api_key="k" * 20, api_version="2024-10-21")
    assert ol.vectorize(model, via="batch")(["a", "b"]).tolist() == ["A", "B"]
    assert bureau.sent[0][0]["body"]["model"] == "my-gpt"
    paths = [arrival.path for arrival in replay.log("azure-batches")]
    assert [path.partition("?")[0].removeprefix("/azure-batches") for path in paths] == [
        "/openai/files",
        "/openai/files/file-0",
        "/openai/batches",
        "/openai/batches/batch-0",
        "/openai/batches/batch-0",
        "/openai/files/file-1/content",
    ]
    assert all(path.endswith("?api-version=2024-10-21") for path in paths)
    assert all(arrival.headers["api-key"] == "k" * 20 for arrival in replay.log("azure-batches"))


def test_a_stream_tells_rows_when_their_batch_has_ended(bureau: Bureau) -> None:
    assert [tuple(s) for s in by_batch(bureau).stream(["a", "b"])] == [((0,), "A", True), ((1,), "B", True)]


def test_layers_round_the_model_stay_round_it(bureau: Bureau) -> None:
    seen: list[Any] = []
    model = ol.through(model_at(bureau), ol.tapped(seen.extend))
    ol.vectorize(model, via="batch")(["a"])
    assert [event.value.text for event in seen] == ["A"]


async def test_it_can_be_awaited(bureau: Bureau) -> None:
    assert (await by_batch(bureau).acall(["a"])).tolist() == ["A"]


# What can go wrong with the call.


@pytest.mark.parametrize(
    ("ask", "error", "word"),
    [
        (lambda m: ol.vectorize(ol.models.fake(), via="batch"), ValueError, "only models.openai"),
        (lambda m: ol.vectorize(lambda x: x, via="batch"), TypeError, "give via= to the model"),
        (lambda m: ol.vectorize(m, via="mail"), ValueError, "via 'batch'"),
        (lambda m: ol.vectorize(m, via="batch", concurrency=3), ValueError, "leave it out"),
        (lambda m: ol.vectorize(ol.vectorize(m, via="batch"), concurrency=3), ValueError, "leave it out"),
    ],
)
def test_what_has_no_batch_api_says_so(ask: Callable[[Any], Any], error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        ask(openai("m", base_url="http://127.0.0.1:9/v1"))


def test_asking_twice_for_the_way_is_asking_once(bureau: Bureau) -> None:
    assert ol.vectorize(by_batch(bureau), via="batch")("a") == "A"


# Rows that fail.


def test_failed_rows_fail_alone_each_with_its_error(bureau: Bureau) -> None:
    said = {
        "ok": right("fine"),
        "bad": wrong(400, "temperature is odd"),
        "filtered": right("", finish="content_filter"),
        "late": unreached("batch_expired"),
        "broken": {"response": {"status_code": 200, "body": "oops"}, "error": None},
        "inner": {"response": None, "error": {"code": "server_error", "message": "we fell"}},
        "busy": wrong(500, "we fell"),
        "silent": {},
    }
    bureau.answer = lambda body: said[body["messages"][0]["content"]]
    answers = dict(zip(said, by_batch(bureau, "return")(list(said)), strict=True))
    assert answers.pop("ok") == "fine"
    kinds = [BadRequestError, ContentFilterError, BatchError, MalformedError, ServerError, ServerError, BatchError]
    assert [type(error) for error in answers.values()] == kinds
    assert "temperature is odd" in str(answers["bad"])
    assert answers["bad"].request_id == "req-2"
    assert "Call again" in str(answers["late"])


def test_calling_again_orders_only_what_failed(bureau: Bureau) -> None:
    bureau.answer = lambda body: (
        shout(body) if "a" in body["messages"][0]["content"] or len(bureau.batches) > 1 else wrong(500, "")
    )
    assert isinstance(by_batch(bureau, "return")(["a", "b"])[1], ServerError)
    assert by_batch(bureau)(["a", "b"]).tolist() == ["A", "B"]
    assert [[line["body"]["messages"][0]["content"] for line in sent] for sent in bureau.sent] == [["a", "b"], ["b"]]


@pytest.mark.parametrize("ending", ["expired", "cancelled"])
def test_a_batch_that_ends_early_keeps_what_was_done(bureau: Bureau, ending: str) -> None:
    bureau.ending, bureau.answer = ending, lambda body: shout(body) if body["messages"][0]["content"] == "a" else {}
    told = by_batch(bureau, "return")(["a", "b"])
    assert told[0] == "A"
    assert ending in str(told[1])
    bureau.ending, bureau.answer = "completed", shout
    assert by_batch(bureau)(["a", "b"]).tolist() == ["A", "B"]
    assert [len(sent) for sent in bureau.sent] == [2, 1]


def test_a_batch_that_is_refused_says_why(bureau: Bureau) -> None:
    bureau.ending = "failed"
    bureau.faults["GET batches"] = [
        respond({"id": "batch-0", "status": "failed", "errors": {"data": [{"message": "Enqueued token limit reached"}]}})
    ]
    with pytest.raises(BatchError, match="Enqueued token limit reached"):
        by_batch(bureau)("a")


def test_a_lesson_of_one_batch_is_heeded_by_the_next(bureau: Bureau) -> None:
    """The token limit's other name, and the choices that a server leaves out."""

    def answer(body: Said) -> Said:
        if "max_tokens" in body:
            return wrong(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead.", param="max_tokens")
        return right(f"{len(bureau.batches)}")

    bureau.answer = answer
    assert by_batch(bureau)(["a"], max_tokens=5, samples=2).tolist() == [["2", "3"]]
    assert [["max_tokens" in line["body"] for line in sent] for sent in bureau.sent] == [[True], [False], [False]]


def test_one_refusal_that_stays_is_an_error(bureau: Bureau) -> None:
    bureau.answer = lambda body: wrong(
        400, "Unsupported parameter: 'max_tokens', unknown field max_completion_tokens", param="max_tokens"
    )
    with pytest.raises(BadRequestError):
        by_batch(bureau)("a", max_tokens=5)
    assert len(bureau.batches) == 2


# Large calls.


def test_calls_are_cut_into_files_of_the_size_that_the_format_allows(bureau: Bureau, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [f"row {i}" for i in range(25)]
    monkeypatch.setattr(lines.parcels, "__defaults__", (10, 10**6))
    assert by_batch(bureau)(prompts).tolist() == [p.upper() for p in prompts]
    assert [len(sent) for sent in bureau.sent] == [10, 10, 5]


def test_no_parcel_is_larger_than_it_may_be() -> None:
    parcels = list(lines.parcels((lines.Line("", [0], b"x" * size) for size in (5, 5, 11, 1, 1, 1, 1)), 3, 10))
    assert [[len(line.data) for line in parcel] for parcel in parcels] == [[5, 5], [11], [1, 1, 1], [1]]
    assert (lines.MOST_LINES, lines.MOST_BYTES) == (50_000, 200_000_000)


@pytest.mark.parametrize("n", [1000, pytest.param(60_000, marks=pytest.mark.long)])
def test_many_rows_come_back_each_to_its_own_cell(bureau: Bureau, n: int) -> None:
    prompts = np.array([f"row {i} é" for i in range(n)], dtype=object).reshape(-1, 10)
    answers = by_batch(bureau)(prompts)
    assert (answers == np.char.upper(prompts.astype(str)).astype(object)).all()
    assert [len(sent) for sent in bureau.sent] == [50_000] * (n // 50_000) + [n % 50_000]


# Faults of the wire.


@pytest.mark.parametrize("place", ["POST files", "POST batches", "GET batches", "GET files"])
@pytest.mark.parametrize(
    "fault",
    [
        respond({"error": {"message": "slow down"}}, "429 Too Many", "Retry-After: 0"),
        respond("<html>oops", "502 Bad Gateway"),
        Step(end="abort"),
        Step(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", end="close"),
    ],
    ids=["429", "502", "reset", "cut"],
)
def test_a_fault_that_passes_is_tried_again(bureau: Bureau, place: str, fault: Step) -> None:
    bureau.faults[place] = [fault] * 2
    assert by_batch(bureau)(["a", "b"]).tolist() == ["A", "B"]
    assert len(bureau.batches) == 1


def test_a_batch_whose_making_was_not_heard_of_is_found_and_not_made_twice(bureau: Bureau, replay: Replay) -> None:
    """Among others, on a later page of the list."""
    other = [{"id": f"batch-{k}", "input_file_id": "other", "status": "completed"} for k in range(10, 15)]
    bureau.batches |= {batch["id"]: batch for batch in other}

    def made_but_broken(arrival: Any) -> Step:
        if arrival.head.startswith("POST") and bureau.parts(arrival) == ["batches"] and "batch-0" not in bureau.batches:
            bureau.batches["batch-0"] = {"id": "batch-0", "status": "validating", **arrival.json}
            return Step(end="abort")
        return bureau.step(arrival)

    replay.play(bureau.name, made_but_broken)
    assert by_batch(bureau)("a") == "A"
    assert bureau.asked.count("POST batches") == 1


def test_a_server_without_a_list_is_asked_again(bureau: Bureau) -> None:
    bureau.lists, bureau.faults["POST batches"] = False, [Step(end="abort")]
    assert by_batch(bureau)("a") == "A"


@pytest.mark.parametrize("place", ["POST files", "POST batches", "GET batches", "GET files"])
@pytest.mark.parametrize(("status", "kind"), [("401 No", AuthenticationError), ("403 No", AccessError), ("404 No", ModelError)])
def test_a_fault_that_stays_is_the_error_of_all_rows(bureau: Bureau, place: str, status: str, kind: type[Exception]) -> None:
    bureau.faults[place] = [respond({"error": {"message": "sk-no"}}, status)] * 9
    told = by_batch(bureau, "return")(["a", "b"])
    assert [isinstance(error, kind) for error in told] == [True, True]
    assert bureau.asked.count(place) == 1


def test_a_server_without_a_batch_api_is_told_apart_from_a_wrong_name(replay: Replay) -> None:
    url = replay.play("nobatches", respond({"error": {"message": "Not Found"}}, "404 Not Found"))
    answer = ol.vectorize(openai("m", base_url=url), via="batch", on_error="return")("a")
    assert isinstance(answer, ol.errors.NotFoundError)
    assert answer.hint == "Asked for /nobatches/v1/files; via='batch' needs a server with a Batch API."


def test_a_key_is_shown_by_no_error_and_a_missing_one_is_missed(bureau: Bureau, recwarn: Any) -> None:
    bureau.faults["POST files"] = [respond({"error": {"message": "bad key sk-SECRET-1"}}, "401 No")]
    error = by_batch(bureau, "return", api_key="sk-SECRET-1")(["a"])[0]
    assert "bad key ***" in str(error)
    told = ol.vectorize(openai("m"), via="batch", on_error="return")(["a"])
    assert isinstance(told[0], AuthenticationError)


@pytest.mark.parametrize("name", [None, 3, "", "../secrets", "a/b", "x" * 999])
def test_a_name_that_would_lead_elsewhere_is_refused(bureau: Bureau, name: Any) -> None:
    bureau.faults["POST files"] = [respond({"id": name, "object": "file"})]
    with pytest.raises(MalformedError, match="usable id"):
        by_batch(bureau)("a")


def test_a_server_that_is_gone_for_too_long_is_given_up_but_not_the_batch(
    bureau: Bureau, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "LOST", 0.0)
    bureau.faults["GET batches"] = [respond("", "500 No")]
    with pytest.raises(ServerError):
        by_batch(bureau)("a")
    assert by_batch(bureau)("a") == "A"
    assert len(bureau.batches) == 1


def test_a_key_that_is_refused_while_a_batch_is_under_way_loses_no_batch(bureau: Bureau) -> None:
    bureau.faults["GET batches"] = [respond({"error": "no"}, "401 No")]
    with pytest.raises(AuthenticationError):
        by_batch(bureau)("a")
    assert by_batch(bureau)("a") == "A"
    assert len(bureau.batches) == 1


def test_a_batch_that_does_not_end_is_waited_for_no_longer_than_its_window(
    bureau: Bureau, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "WINDOW", 0.02)
    bureau.polls = 10**9
    with pytest.raises(TimedOutError, match="did not end"):
        by_batch(bureau)("a")


async def test_a_batch_is_looked_at_ever_less_often(bureau: Bureau, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def noted(seconds: float) -> None:
        pauses.append(seconds)

    for name, value in {"FIRST": 1.0, "MOST": 60.0}.items():
        monkeypatch.setattr(orders, name, value)
    monkeypatch.setattr(orders.asyncio, "sleep", noted)
    monkeypatch.setattr(orders.random, "uniform", lambda low, high: high)
    bureau.polls = 15
    made = orders.Bureau(model_at(bureau).ways["batch"].backend.__self__._remote, 0)
    file = await bridge.ask(made.upload(*lines.form([lines.Line("", [0], b"")])))
    await bridge.ask(made.ended(await bridge.ask(made.batch(file, fresh=True))))
    waited = [pause for pause in pauses if pause >= 1.0]
    assert waited[:3] == [1.0, 1.5, 2.25]
    assert waited[-3:] == [60.0, 60.0, 60.0]


# Coming back.


def leave(bureau: Bureau, rows: list[str], **params: Any) -> None:
    """Order rows and leave as soon as the batch is there."""
    bureau.polls = 10**9

    async def order() -> None:
        work = asyncio.ensure_future(by_batch(bureau).acall(rows, **params))
        while not bureau.looks:
            await asyncio.sleep(0.001)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    asyncio.run(order())
    bureau.polls = 0


def test_who_leaves_early_cancels_nothing_and_finds_the_batch_again(bureau: Bureau, store_folder: Path) -> None:
    leave(bureau, ["a", "b"])
    assert [name for name in bureau.asked if name.startswith("POST")] == ["POST files", "POST batches"]
    forget_models(store_folder)
    assert by_batch(bureau)(["a", "b"]).tolist() == ["A", "B"]
    assert len(bureau.batches) == 1


def test_rows_of_another_call_are_found_in_the_batch_too(bureau: Bureau, store_folder: Path) -> None:
    """Of an array that has grown and changed its order, with more samples: only the new ones are ordered."""
    leave(bureau, ["a", "b"], samples=2)
    forget_models(store_folder)
    answers = by_batch(bureau)(["c", "b", "a"], samples=3)
    assert answers[1:, :2].tolist() == [["B 0", "B 1"], ["A 0", "A 1"]]
    assert [sorted(line["body"].get("n", 1) for line in sent) for sent in bureau.sent] == [[2, 2], [1, 1, 3]]


def test_what_is_gone_at_the_provider_is_ordered_again(bureau: Bureau, store_folder: Path) -> None:
    leave(bureau, ["a"])
    del bureau.batches["batch-0"]
    forget_models(store_folder)
    assert by_batch(bureau)(["a", "b"]).tolist() == ["A", "B"]
    assert [line["body"]["messages"][0]["content"] for sent in bureau.sent for line in sent] == ["b", "a"]


def test_nothing_is_left_in_the_store_but_answers(bureau: Bureau, store_folder: Path) -> None:
    by_batch(bureau)(["a", "b"])
    store = bridge.disown(("store", str(store_folder)))
    assert len(store) == 2  # type: ignore[arg-type]
    bridge.wait(store.aclose)  # type: ignore[union-attr]


def test_without_a_store_a_batch_works_and_with_refresh_it_is_made_anew(bureau: Bureau) -> None:
    with ol.cache.disabled():
        assert by_batch(bureau)(["a", "b"]).tolist() == ["A", "B"]
    with ol.cache.refresh():
        assert by_batch(bureau)("a") == "A"
        assert by_batch(bureau)("a") == "A"
    assert [len(sent) for sent in bureau.sent] == [2, 1, 1]


def test_an_online_call_does_not_wait_for_a_batch(bureau: Bureau) -> None:
    bureau.polls = 10**9
    started = threading.Thread(target=lambda: by_batch(bureau, "return")(["a"]))
    started.start()
    while not bureau.looks:
        pass
    assert model_at(bureau)("a") == "A"
    bureau.polls = 0
    started.join()


KILLED = """
import os, signal, sys
import outlines_like as ol
from outlines_like.models import orders
url, kind, name = sys.argv[1:]
whole = getattr(getattr(orders, kind), name)
def last(*args, **settings):
    if name.startswith("note"):
        whole(*args, **settings)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(getattr(orders, kind), name, last)
ol.vectorize(ol.models.openai("m", base_url=url), via="batch")(["a", "b", "c"])
"""
MOMENTS = [
    "Book.note",
    "Bureau.read",
    *(pytest.param(m, marks=pytest.mark.long) for m in ("Bureau.ended", "Book.note_batch", "Book.settle")),
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_script_killed_at_any_moment_pays_once(bureau: Bureau, moment: str) -> None:
    """With SIGKILL: before the batch is made, before its name is stored, before its answers are read, before they are told."""
    bureau.polls = 0
    script = subprocess.run(
        [sys.executable, "-c", KILLED, bureau.url, *moment.split(".")], capture_output=True, text=True, timeout=60
    )
    assert (script.returncode, script.stderr) == (-signal.SIGKILL, "")
    assert by_batch(bureau)(["a", "b", "c"]).tolist() == ["A", "B", "C"]
    assert [len(sent) for sent in bureau.sent] == [3]
    assert bureau.asked.count("POST files") == 1
