"""The OpenAI-compatible backend against a server that replays real servers' faults."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
import numpy as np
import pytest

import outlines_like as ol
from outlines_like import bridge
from outlines_like.errors import (
    AccessError,
    AuthenticationError,
    BadRequestError,
    ContentFilterError,
    ContextLengthError,
    MalformedError,
    ModelError,
    NotFoundError,
    QuotaError,
    RateLimitError,
    ServerError,
    TimedOutError,
    TruncatedError,
    UnreachableError,
)
from outlines_like.models import Model, openai, pacing
from outlines_like.requests import Completion, Request, Terms

from .remote_fixtures import free_port
from .replay import DATA, Arrival, Replay, Step, choices, events, piece, respond, streamed

KEY = "sk-test-SECRET-123"
PONG = respond(choices("pong"))


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server is asked as ever, however often it fails."""
    monkeypatch.setattr(pacing, "TRIP", 10**9)


def model_at(url: str, **settings: Any) -> Model:
    return openai("m", base_url=url, **settings)


def asked(model: Model, n: int = 1, *, live: bool = False, prompt: Any = "hi", **params: Any) -> list[Request]:
    return [Request(model.endpoint, model.name, prompt, params, 0, sample, Terms(live=live)) for sample in range(n)]


def told(model: Model, rows: Sequence[Request]) -> list[ol.Event]:
    """All events of the bare backend."""

    async def run() -> list[ol.Event]:
        async with aclosing(model.backend(rows)) as bursts:
            return [event async for burst in bursts for event in burst]

    return bridge.wait(run)


def outcomes(model: Model, rows: Sequence[Request]) -> list[Any]:
    """What each row came to: a text, or an error."""
    last = {event.row: event.value for event in told(model, rows) if event.done}
    assert sorted(last) == list(range(len(rows)))
    return [last[row].error if isinstance(last[row], ol.Failure) else last[row].text for row in range(len(rows))]


def outcome(model: Model, **params: Any) -> Any:
    return outcomes(model, asked(model, **params))[0]


def partials(model: Model, row: int = 0, n: int = 1, **params: Any) -> list[str]:
    """The texts shown of a row while it came."""
    return [
        event.value.text for event in told(model, asked(model, n, live=True, **params)) if not event.done and event.row == row
    ]


RECORDED_ERRORS = {
    "A03": (QuotaError, 429, "quota", False),
    "A09": (ContextLengthError, 400, "maximum context length is 2048", False),
    "A11": (ContentFilterError, None, "content_filter", False),
    "A11b": (ContentFilterError, None, "content_filter", False),
    "A12": (ServerError, 502, "502 Bad Gateway", True),
    "A14": (RateLimitError, 429, "Provider returned error", True),
    "A17": (TruncatedError, None, "length", False),
    "A24": (UnreachableError, None, "broke", True),
    "A24b": (MalformedError, None, "not the JSON", True),
    "A24c": (UnreachableError, None, "broke", True),
    "A29": (AuthenticationError, 401, "Incorrect API key", False),
}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("case", RECORDED_ERRORS)
def test_a_recorded_fault_is_an_error_of_its_kind(replay: Replay, case: str, live: bool) -> None:
    kind, status, words, retryable = RECORDED_ERRORS[case]
    error = outcome(model_at(replay.replay(case), api_key=KEY), live=live)
    assert type(error) is kind
    assert words in str(error)
    assert (error.status, error.retryable) == (status, retryable)
    assert len(replay.log(case)) == 1


@pytest.mark.parametrize("case", ["A12", "A14", "A23", "A24", "A24b", "A24c"])
def test_a_fault_that_passes_is_asked_again(replay: Replay, case: str) -> None:
    assert model_at(replay.replay(case))("hi") == "pong"
    assert len(replay.log(case)) == (1 if case == "A23" else 2)


@pytest.mark.parametrize(("case", "live"), [("A01", False), ("A01s", True)])
def test_retry_after_is_waited_for(replay: Replay, case: str, live: bool) -> None:
    model = model_at(replay.replay(case))
    text = [value for _, value, _ in model.stream("hi")][-1] if live else model("hi")
    assert text == ("Hello world" if live else "pong")
    times = [arrival.time for arrival in replay.log(case)]
    gaps = np.diff(times)
    assert len(times) == (2 if live else 3)
    assert ((gaps >= 0.99) & (gaps < 3)).all()


def test_one_prompt_that_is_too_long_fails_alone_and_once(replay: Replay) -> None:
    got = ol.vectorize(model_at(replay.replay("A07")), on_error="return")(["hi", "TOOLONG", "ho"])
    assert (got[0], got[2]) == ("pong", "pong")
    assert isinstance(got[1], ContextLengthError)
    assert "resulted in 9001 tokens" in str(got[1])
    assert sum(b"TOOLONG" in arrival.body for arrival in replay.log("A07")) == 1


def test_one_row_that_always_fails_costs_none_of_the_others(replay: Replay) -> None:
    model = model_at(replay.replay("A08"), retries=0)
    with pytest.raises(ol.RowErrors) as caught:
        model(["a", "b", "FAIL500", "c"])
    assert list(caught.value.errors) == [(2,)]
    assert caught.value.partial[[0, 1, 3]].tolist() == ["pong"] * 3
    sent = len(replay.log("A08"))
    assert ol.vectorize(model, on_error="missing")(["a", "b", "FAIL500", "c"]).tolist() == ["pong", "pong", None, "pong"]
    assert len(replay.log("A08")) == sent + 1


def test_samples_that_the_server_leaves_out_are_asked_for(replay: Replay) -> None:
    model = model_at(replay.replay("A18"))
    assert model("hi", samples=3).tolist() == ["only one"] * 3
    assert [body.get("n") for body in replay.bodies("A18")] == [3, None, None]
    assert model("ho", samples=3).shape == (3,)
    assert [body.get("n") for body in replay.bodies("A18")][3:] == [None, None, None]


def test_usage_counts_every_request(replay: Replay) -> None:
    got = model_at(replay.replay("A18", "A18-usage")).complete("hi", samples=3)
    assert sum(completion.usage.prompt_tokens for completion in got) == 9
    assert sum(completion.usage.completion_tokens for completion in got) == 6


def test_nothing_is_sent_that_was_not_set(replay: Replay) -> None:
    assert model_at(replay.replay("A19"))("hi") == "pong"
    assert replay.bodies("A19") == [{"model": "m", "messages": [{"role": "user", "content": "hi"}]}]


def test_the_name_of_the_token_limit_is_switched_once(replay: Replay) -> None:
    model = model_at(replay.replay("A20"), max_tokens=5)
    assert model(["a", "b"]).tolist() == ["pong"] * 2
    assert model("c") == "pong"
    last = replay.bodies("A20")[-1]
    assert last["max_completion_tokens"] == 5
    assert "max_tokens" not in last
    assert len(replay.log("A20")) <= 5  # two at once may both have to learn it


def test_a_limit_that_no_name_fits_is_an_error_after_one_switch(replay: Replay) -> None:
    refuse = [
        respond({"error": {"message": f"Unsupported parameter: '{name}'", "param": name}}, "400 Bad Request")
        for name in ("max_tokens", "max_completion_tokens")
    ]
    url = replay.play("A20-both", PONG, rules={'"max_tokens"': refuse[:1], '"max_completion_tokens"': refuse[1:]})
    error = outcome(model_at(url), max_tokens=5)
    assert type(error) is BadRequestError
    assert len(replay.log("A20-both")) == 2


def test_a_limit_that_is_too_large_is_no_reason_to_switch(replay: Replay) -> None:
    said = {"error": {"message": "max_tokens is too large: 99. This model supports at most 9.", "param": "max_tokens"}}
    url = replay.play("A20-large", respond(said, "400 Bad Request"))
    assert type(outcome(model_at(url), max_tokens=99)) is BadRequestError
    assert len(replay.log("A20-large")) == 1


def test_stops_that_the_server_refuses_in_number_are_its_own_error(replay: Replay) -> None:
    error = outcome(model_at(replay.replay("A21")), stop=list("vwxyz"))
    assert type(error) is BadRequestError
    assert "array too long" in str(error)
    assert len(replay.log("A21")) == 1


def test_of_five_stops_all_are_kept(replay: Replay) -> None:
    url = replay.play("A21-five", respond(choices("some text, yes")))
    model = model_at(url)
    assert model("hi", stop=["1", "2", "3", "4", ","]) == "some text"
    assert len(replay.bodies("A21-five")[0]["stop"]) == 4
    assert model.complete("hi", stop=["1", "2", "3", "4", ","]).finish_reason == "stop"


def test_stops_that_the_server_takes_none_of_are_cut_by_us(replay: Replay) -> None:
    said = {"error": {"message": "Unsupported parameter: 'stop' is not supported with this model.", "param": "stop"}}
    url = replay.play("A21-none", respond(choices("one. two")), rules={'"stop"': [respond(said, "400 Bad Request")]})
    model = model_at(url)
    assert model("hi", stop=".") == "one"
    assert model("ho", stop=".") == "one"
    assert ["stop" in body for body in replay.bodies("A21-none")] == [True, False, False]


def test_fewer_stops_are_sent_to_a_server_that_takes_fewer(replay: Replay) -> None:
    def answer(arrival: Arrival) -> Step:
        if len(arrival.json.get("stop", [])) > 2:
            return respond({"error": {"message": "'stop' takes at most 2", "param": "stop"}}, "400 Bad Request")
        return respond(choices("one. two"))

    url = replay.play("A21-two", answer)
    assert model_at(url)("hi", stop=["x", "y", "."]) == "one"
    assert [len(body["stop"]) for body in replay.bodies("A21-two")] == [3, 2]


def test_no_stop_and_an_empty_one(replay: Replay) -> None:
    model = model_at(replay.play("A21-empty", PONG))
    assert model("hi", stop=[]) == "pong"
    assert "stop" not in replay.bodies("A21-empty")[0]
    with pytest.raises(ValueError, match="stop"):
        model("hi", stop=[""])
    assert len(replay.log("A21-empty")) == 1


def test_n_that_is_refused_is_split_and_remembered(replay: Replay) -> None:
    said = respond({"error": {"message": "Only one completion choice is allowed", "param": "n"}}, "400 Bad Request")
    url = replay.play("A18-400", PONG, rules={'"n"': [said]})
    model = model_at(url)
    assert model(["a", "b"], samples=3).shape == (2, 3)
    assert model("c", samples=2).tolist() == ["pong"] * 2
    assert [body.get("n") for body in replay.bodies("A18-400")[-2:]] == [None, None]


def test_a_cap_on_n_is_kept_to(replay: Replay) -> None:
    def answer(arrival: Arrival) -> Step:
        n = arrival.json.get("n", 1)
        if n > 4:
            return respond({"error": {"message": "n must be less than or equal to 4", "param": "n"}}, "422 Unprocessable")
        return respond(choices(*(f"s{i}" for i in range(n))))

    url = replay.play("A18-cap", answer)
    model = model_at(url)
    assert model("hi", samples=10).shape == (10,)
    assert sorted(body.get("n", 1) for body in replay.bodies("A18-cap")) == [2, 4, 4, 10]
    assert model("ho", samples=8).shape == (8,)
    assert [body["n"] for body in replay.bodies("A18-cap")[4:]] == [4, 4]


def test_more_choices_than_asked_for_are_left_alone(replay: Replay) -> None:
    got = model_at(replay.play("A18-more", respond(choices("a", "b", "c")))).complete("hi")
    assert (got.text, got.usage.completion_tokens) == ("a", 2)


def test_choices_land_in_the_rows_of_their_samples(replay: Replay) -> None:
    def answer(arrival: Arrival) -> Step:
        word = arrival.json["messages"][0]["content"]
        return respond(choices(*(f"{word}{i}" for i in range(arrival.json["n"]))))

    model = model_at(replay.play("rows", answer))
    got = model([["a", "b", "c"], ["d", "e", "f"]], samples=4)
    assert got.shape == (2, 3, 4)
    assert got.tolist() == [[[f"{word}{i}" for i in range(4)] for word in row] for row in (["a", "b", "c"], ["d", "e", "f"])]
    assert len(replay.log("rows")) == 6


def test_more_samples_pay_for_the_new_ones_only(replay: Replay) -> None:
    model = model_at(replay.play("more", lambda arrival: respond(choices(*map(str, range(arrival.json.get("n", 1)))))))
    assert model("hi", samples=5).tolist() == list("01234")
    assert model("hi", samples=8).tolist() == list("01234012")
    assert [body["n"] for body in replay.bodies("more")] == [5, 3]


def test_each_sample_has_a_seed_of_its_own(replay: Replay) -> None:
    url = replay.replay("A32")
    with ol.cache.disabled():
        for _ in range(2):
            assert model_at(url)("hi", samples=3, seed=7).tolist() == ["Leo"] * 3
    bodies = replay.bodies("A32")
    seeds = [{body["seed"] for body in bodies[:3]}, {body["seed"] for body in bodies[3:]}]
    assert len(seeds[0]) == 3
    assert 7 in seeds[0]
    assert seeds[0] == seeds[1]
    assert all("n" not in body for body in bodies)


def test_no_seed_is_sent_unless_given(replay: Replay) -> None:
    model_at(replay.replay("A32"))("hi", samples=3)
    assert [("seed" in body, body["n"]) for body in replay.bodies("A32")] == [(False, 3)]


def test_what_was_set_is_sent(replay: Replay) -> None:
    params = {"temperature": 0, "top_p": 1, "top_k": 5, "max_tokens": 7, "stop": ["x"], "seed": 3, "user": "u"}
    params |= {"frequency_penalty": 0.5, "presence_penalty": -1}
    model_at(replay.play("params", PONG))("hi", **params, extra_body={"guided_regex": "a*", "top_p": 0.5})
    body = replay.bodies("params")[0]
    assert body == {"model": "m", "messages": [{"role": "user", "content": "hi"}], **params, "guided_regex": "a*", "top_p": 0.5}


def test_numpy_scalars_are_sent_as_plain_numbers(replay: Replay) -> None:
    model = model_at(replay.play("numpy", PONG))
    model(np.array(["ARPANET"]), max_tokens=np.int64(5), temperature=np.float32(0.5))
    body = replay.bodies("numpy")[0]
    assert (body["messages"][0]["content"], body["max_tokens"], body["temperature"]) == ("ARPANET", 5, 0.5)
    assert model("ARPANET", max_tokens=5, temperature=0.5) == "pong"
    assert len(replay.log("numpy")) == 1


def test_a_conversation_is_sent_turn_by_turn(replay: Replay) -> None:
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "u"}], "name": "n"}]
    model = model_at(replay.play("turns", PONG))
    assert model([turns, turns]).shape == (2,)
    assert replay.bodies("turns")[0]["messages"] == turns


def test_completions_take_text(replay: Replay) -> None:
    answer = {"choices": [{"text": " Paris. It", "index": 0, "finish_reason": "length"}], "usage": {"prompt_tokens": 5}}
    model = model_at(replay.play("text", respond(answer)), endpoint="completions")
    assert model("The capital of France is", stop=".") == " Paris"
    assert model.complete("x").finish_reason == "length"
    arrival = replay.log("text")[0]
    assert arrival.path == "/text/v1/completions"
    assert arrival.json == {"model": "m", "prompt": "The capital of France is", "stop": ["."]}


def test_completions_take_one_prompt_a_request(replay: Replay) -> None:
    model = model_at(
        replay.play("prompts", lambda arrival: respond({"choices": [{"text": arrival.json["prompt"] * 2}]})),
        endpoint="completions",
    )
    assert model(["a", "b", "c"]).tolist() == ["aa", "bb", "cc"]


def test_completions_take_no_conversation(replay: Replay) -> None:
    model = model_at(replay.play("no-turns", PONG), endpoint="completions")
    with pytest.raises(BadRequestError, match=r"endpoint=.chat."):
        model([{"role": "user", "content": "hi"}])
    assert replay.log("no-turns") == []


def test_proxies_of_the_environment_are_used_only_if_asked(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    url = replay.play("proxy", PONG)
    assert outcome(model_at(url)) == "pong"
    assert type(outcome(model_at(url, trust_env=True))) is UnreachableError


@pytest.fixture(scope="session")
def self_signed() -> Iterator[str]:
    """The address of a server whose certificate nobody vouches for."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(DATA.parent / "self_signed.pem")
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    with server.accept()[0] as connection, contextlib.suppress(OSError):
                        context.wrap_socket(connection, server_side=True).close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"https://localhost:{server.getsockname()[1]}/v1"
        server.shutdown(socket.SHUT_RDWR)


def test_a_certificate_that_nobody_vouches_for_is_refused(self_signed: str) -> None:
    error = outcome(model_at(self_signed, api_key=KEY))
    assert type(error) is UnreachableError
    assert error.retryable is False
    assert "no secure connection" in str(error)


def test_a_large_prompt_is_sent_without_a_warning(replay: Replay) -> None:
    model_at(replay.play("large", PONG))("\0é" * 1_000_000)
    assert replay.bodies("large")[0]["messages"][0]["content"] == "\0é" * 1_000_000


def test_the_key_and_headers_are_sent(replay: Replay) -> None:
    model_at(replay.play("headers", PONG), api_key=KEY, headers={"X-Title": "t", "User-Agent": "mine"})("hi")
    headers = replay.log("headers")[0].headers
    assert headers["authorization"] == f"Bearer {KEY}"
    assert (headers["x-title"], headers["user-agent"]) == ("t", "mine")
    assert (headers["content-type"], headers["accept-encoding"]) == ("application/json", "gzip")


def test_the_environment_names_server_and_key(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", replay.play("environment", PONG) + "/")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    model = openai("m")
    monkeypatch.delenv("OPENAI_API_KEY")
    assert model("hi") == "pong"
    arrival = replay.log("environment")[0]
    assert (arrival.path, arrival.headers["authorization"]) == ("/environment/v1/chat/completions", f"Bearer {KEY}")


def test_a_query_in_the_address_is_kept(replay: Replay) -> None:
    model = model_at(replay.play("azure", PONG) + "?api-version=2024-10-21&key=" + KEY, headers={"api-key": KEY})
    assert model("hi") == "pong"
    arrival = replay.log("azure")[0]
    assert arrival.path == f"/azure/v1/chat/completions?api-version=2024-10-21&key={KEY}"
    assert arrival.headers["api-key"] == KEY
    assert KEY not in model.endpoint
    assert "api-version=2024-10-21" in model.endpoint


def test_models_on_two_servers_do_not_share_answers(replay: Replay) -> None:
    first, second = (model_at(replay.play(name, respond(choices(name)))) for name in ("here", "there"))
    assert (first("hi"), second("hi")) == ("here", "there")


@pytest.mark.parametrize("url", ["localhost:8000/v1", "ftp://x/v1", "http://", "/v1"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="http://"):
        model_at(url)


def test_secrets_that_can_not_be_sent_are_refused_unseen() -> None:
    for settings in ({"api_key": "sk-SECRET\n1"}, {"api_key": "sk-SECRETé"}, {"headers": {"api-key": "SECRET\r\nX: y"}}):
        with pytest.raises(ValueError) as caught:
            model_at("http://localhost/v1", **settings)
        assert "SECRET" not in str(caught.value)
    with pytest.raises(ValueError) as caught:
        model_at("http://me:SECRET@localhost/v1")
    assert "SECRET" not in str(caught.value)


def test_a_misspelt_parameter_is_named() -> None:
    with pytest.raises(TypeError, match="temperature"):
        model_at("http://localhost/v1", temprature=0)
    with pytest.raises(ValueError, match="completions"):
        model_at("http://localhost/v1", endpoint="embeddings")


def test_openai_without_a_key_is_told_before_anything_is_sent() -> None:
    error = outcome(openai("gpt-4o-mini"))
    assert type(error) is AuthenticationError
    assert "OPENAI_API_KEY" in str(error)


def test_a_key_in_the_open_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="without encryption"):
        model_at("http://models.example/v1", api_key=KEY)
    model_at("http://127.0.0.1/v1", api_key=KEY)
    model_at("http://models.example/v1")


ECHOES = {
    "status": lambda key: respond({"error": {"message": f"bad key {key}"}}, "401 Unauthorized"),
    "inner": lambda key: respond({"error": {"message": f"bad key {key}", "code": 401}}),
    "choice": lambda key: respond({"choices": [{"error": {"message": f"bad key {key}", "code": 502}, "message": {}}]}),
    "html": lambda key: respond(f"<html>{key}", "503 Unavailable", "Content-Type: text/html"),
    "not json": lambda key: respond(f"you sent {key}", "200 OK", "Content-Type: text/plain"),
    "id": lambda key: respond({"error": "x"}, "500 Oops", f"x-request-id: {key}"),
    "type": lambda key: respond("x", "500 Oops", f"Content-Type: text/{key}"),
    "redirect": lambda key: respond("", "307 There", f"Location: http://127.0.0.1:9/?key={key}"),
    "redirect path": lambda key: respond("", "302 There", f"Location: http://127.0.0.1:9/{key}"),
    "header": lambda key: Step(f"HTTP/1.1 200 OK\r\nbad header {key}\r\n\r\n".encode(), end="close"),
    "status line": lambda key: Step(f"HTTQ {key}\r\n\r\n".encode(), end="close"),
    "stream": lambda key: streamed(events(piece("a"), {"error": {"message": f"bad key {key}"}})),
    "encoding": lambda key: respond("", "200 OK", f"Content-Encoding: {key}"),
}


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize("echo", ECHOES)
def test_a_key_that_is_echoed_is_not_shown(replay: Replay, echo: str, live: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model = model_at(replay.play("echo", ECHOES[echo](KEY)), api_key=KEY, retries=0)
    with pytest.raises(ModelError) as caught:
        list(model.stream("hi")) if live else model("hi")
    error = caught.value
    shown = "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    for text in (str(error), repr(error), repr(error.args), repr(vars(error)), shown, caplog.text, repr(vars(model))):
        assert KEY not in text
    chain = error
    while chain := chain.__cause__ or chain.__context__:
        assert KEY not in repr(chain)
        assert KEY not in repr(vars(chain))


def test_a_key_in_the_address_is_not_shown(replay: Replay) -> None:
    url = replay.play("address", lambda arrival: respond(f"what is {arrival.path}?", "404 Not Found"))
    error = outcome(model_at(f"{url}?key={KEY}"))
    assert type(error) is NotFoundError
    assert KEY not in str(error)
    assert KEY not in str(outcome(model_at(f"http://127.0.0.1:{free_port()}/v1?key={KEY}")))


def test_no_key_is_stored(replay: Replay, tmp_path: Any) -> None:
    url = f"{replay.play('stored', PONG)}?key={KEY}"
    with ol.cache.at(tmp_path):
        assert model_at(url, api_key=KEY)("hi") == "pong"
        assert model_at(url, api_key=KEY)("hi") == "pong"
    assert len(replay.log("stored")) == 1
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert all(KEY.encode() not in file.read_bytes() for file in files)


REFUSALS = [
    ("400 Bad Request", BadRequestError, False),
    ("401 Unauthorized", AuthenticationError, False),
    ("402 Payment Required", QuotaError, False),
    ("403 Forbidden", AccessError, False),
    ("404 Not Found", NotFoundError, False),
    ("405 Method Not Allowed", BadRequestError, False),
    ("408 Request Timeout", TimedOutError, True),
    ("409 Conflict", ServerError, True),
    ("413 Too Large", BadRequestError, False),
    ("422 Unprocessable Entity", BadRequestError, False),
    ("425 Too Early", ServerError, True),
    ("429 Too Many Requests", RateLimitError, True),
    ("500 Internal Server Error", ServerError, True),
    ("501 Not Implemented", ServerError, False),
    ("502 Bad Gateway", ServerError, True),
    ("503 Service Unavailable", ServerError, True),
    ("504 Gateway Timeout", ServerError, True),
    ("529 Overloaded", ServerError, True),
    ("204 No Content", MalformedError, False),
]


@pytest.mark.parametrize("body", ["", "<html>oops</html>", '{"error":{"message":"oops"}}', '"oops"', "[]", "{", "null"])
@pytest.mark.parametrize(("status", "kind", "retryable"), REFUSALS)
def test_a_status_is_an_error_of_its_kind(
    replay: Replay, status: str, kind: type[ModelError], retryable: bool, body: str
) -> None:
    if status.startswith("204"):
        body = ""
    error = outcome(model_at(replay.play("status", respond(body, status, "x-request-id: r1"))))
    assert (type(error), error.retryable, error.status, error.request_id) == (kind, retryable, int(status[:3]), "r1")
    assert ("oops" in str(error)) == ("oops" in body)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    ("advice", "status", "retryable"), [("true", "400 No", True), ("false", "503 No", False), ("maybe", "503 No", True)]
)
def test_a_server_may_advise_on_trying_again(replay: Replay, advice: str, status: str, retryable: bool) -> None:
    url = replay.play("advice", respond({"error": "x"}, status, f"x-should-retry: {advice}"))
    assert outcome(model_at(url)).retryable is retryable


def test_a_long_wait_is_not_waited_for(replay: Replay) -> None:
    error = outcome(model_at(replay.play("long", respond({}, "429 Wait", "Retry-After: 3600"))))
    assert error.retryable is False
    assert "3600 s" in str(error)


@pytest.mark.parametrize("code", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"])
@pytest.mark.parametrize(
    "host",
    [
        "http://127.0.0.1:{port}/elsewhere/v1",
        "//localhost:{port}/elsewhere",
        "/elsewhere/v1",
        "http://u:p@localhost:{port}/elsewhere",
    ],
)
def test_a_redirect_is_not_followed(replay: Replay, code: str, host: str) -> None:
    replay.play("elsewhere", PONG)
    url = replay.play("redirect", respond("", code, f"Location: {host.format(port=replay.port)}"))
    error = outcome(model_at(url, api_key=KEY))
    assert type(error) is NotFoundError
    assert error.retryable is False
    assert replay.log("elsewhere") == []


BAD_ANSWERS = {
    "empty": ("", MalformedError),
    "html": ("<html>login</html>", MalformedError),
    "list": ("[1]", MalformedError),
    "no choices": ("{}", MalformedError),
    "null choices": ('{"choices":null}', MalformedError),
    "empty choices": ('{"choices":[]}', MalformedError),
    "odd choice": ('{"choices":[3]}', MalformedError),
    "no message": ('{"choices":[{"index":0}]}', MalformedError),
    "null message": ('{"choices":[{"message":null}]}', MalformedError),
    "number": ('{"choices":[{"message":{"content":3}}]}', MalformedError),
    "tool call": ('{"choices":[{"message":{"content":null},"finish_reason":"tool_calls"}]}', MalformedError),
    "refusal": ('{"choices":[{"message":{"content":null,"refusal":"I will not"},"finish_reason":"stop"}]}', ContentFilterError),
    "filtered midway": ('{"choices":[{"message":{"content":"so"},"finish_reason":"content_filter"}]}', ContentFilterError),
    "error text": ('{"error":"overloaded"}', ServerError),
    "error code text": ('{"error":{"message":"x","code":"503"}}', ServerError),
    "error kind": ('{"error":{"message":"x","type":"rate_limit_error"}}', RateLimitError),
    "quota": ('{"error":{"message":"x","code":"insufficient_quota"}}', QuotaError),
    "flat error": ('{"object":"error","message":"maximum context length is 8","code":400}', ContextLengthError),
    "detail": ('{"detail":"no such thing"}', ServerError),
    "choice error": ('{"choices":[{"error":{"message":"x","code":429},"message":{"content":""}}]}', RateLimitError),
    "deep": ('{"a":' * 5000 + "1" + "}" * 5000, MalformedError),
    "nan": ('{"choices":[{"message":{"content":"x"},"p":NaN}]}', MalformedError),
    "bad utf-8": (b'{"choices":[{"message":{"content":"\xff"}}]}', MalformedError),
    "surrogate": ('{"choices":[{"message":{"content":"\\ud83d"}}]}', MalformedError),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_bad_answer_is_an_error_and_not_stored(replay: Replay, name: str) -> None:
    body, kind = BAD_ANSWERS[name]
    url = replay.play("bad", respond(body), PONG)
    model = model_at(url, retries=0)
    with pytest.raises(ModelError) as caught:
        model("hi")
    assert type(caught.value) is kind
    assert model("hi") == "pong"


GOOD_ANSWERS = {
    "parts": '{"choices":[{"message":{"content":[{"type":"text","text":"po"},{"type":"x"},{"type":"text","text":"ng"}]}}]}',
    "null error": '{"error":null,"choices":[{"message":{"content":"pong"},"finish_reason":null}]}',
    "big integers": '{"choices":[{"message":{"content":"pong"}}],"created":123456789012345678901234567890}',
    "odd usage": '{"choices":[{"message":{"content":"pong"}}],"usage":{"prompt_tokens":null,"completion_tokens":"3"}}',
    "reasoning": '{"choices":[{"message":{"content":"pong","reasoning_content":"hm"},"finish_reason":"eos"}]}',
}


@pytest.mark.parametrize("name", GOOD_ANSWERS)
def test_an_odd_answer_is_understood(replay: Replay, name: str) -> None:
    got = model_at(replay.play("good", respond(GOOD_ANSWERS[name]))).complete("hi")
    assert (got.text, got.finish_reason) == ("pong", "stop")


def test_an_answer_cut_by_the_limit_says_so(replay: Replay) -> None:
    got = model_at(replay.play("cut", respond(choices("po", finish="length")))).complete("hi")
    assert (got.text, got.finish_reason) == ("po", "length")


def test_integers_in_an_answer_are_kept_exactly(replay: Replay) -> None:
    text = model_at(replay.replay("J08"))("hi")
    assert msgspec.json.decode(text) == {"id": 2512292042121000001, "n": 9007199254740993}


def zipped(body: bytes, **step: Any) -> Step:
    return respond(gzip.compress(body), "200 OK", "Content-Encoding: gzip", **step)


def test_gzip_is_understood(replay: Replay) -> None:
    body = msgspec.json.encode(choices("pong"))
    assert outcome(model_at(replay.play("gzip", zipped(body, every=7)))) == "pong"
    members = gzip.compress(body[:20]) + gzip.compress(body[20:])
    assert outcome(model_at(replay.play("members", respond(members, "200 OK", "Content-Encoding: gzip")))) == "pong"


def test_a_bomb_is_not_unpacked(replay: Replay) -> None:
    bomb = gzip.compress(b" " * 200_000_000, 9)
    error = outcome(model_at(replay.play("bomb", respond(bomb, "200 OK", "Content-Encoding: gzip"))))
    assert isinstance(error, MalformedError)
    assert error.retryable is False


@pytest.mark.parametrize("encoding", ["br", "deflate", "zstd", "gzip, gzip", "???"])
def test_an_encoding_that_was_not_asked_for_is_an_error(replay: Replay, encoding: str) -> None:
    error = outcome(model_at(replay.play("encoding", respond("x", "200 OK", f"Content-Encoding: {encoding}"))))
    assert type(error) is MalformedError


def test_a_broken_gzip_is_an_error(replay: Replay) -> None:
    for body in (b"nothing of the kind", gzip.compress(b"{}")[:-9]):
        error = outcome(model_at(replay.play("broken", respond(body, "200 OK", "Content-Encoding: gzip"))))
        assert isinstance(error, ModelError)
        assert error.retryable


@pytest.mark.parametrize("end", ["close", "reset"])
def test_an_answer_cut_anywhere_is_an_error(replay: Replay, unbroken: None, end: str) -> None:
    whole = respond(choices("pong")).data
    url = replay.play("cuts", *(Step(whole[:k], end=end) for k in range(len(whole))))
    model = model_at(url, concurrency=1)
    errors = outcomes(model, asked(model, len(whole), seed=1))
    assert all(isinstance(error, ModelError) for error in errors)
    assert all(error.retryable for error in errors[:12])  # no whole status line: a connection that broke


@pytest.mark.parametrize(
    "junk",
    [
        b"",
        b"\r\n\r\n",
        b"HELLO",
        b"HTTP/9.9 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA" + b"a" * 100_000,
        b"\0" * 100,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 99999 x\r\n\r\n",
    ],
)
@pytest.mark.parametrize("live", [False, True])
def test_what_is_not_http_is_an_error_of_ours(replay: Replay, junk: bytes, live: bool) -> None:
    assert isinstance(outcome(model_at(replay.play("junk", Step(junk, end="close"))), live=live), ModelError)


def test_a_server_that_is_not_there_is_said_so() -> None:
    port = free_port()
    error = outcome(model_at(f"http://127.0.0.1:{port}/v1"))
    assert type(error) is UnreachableError
    assert f"nothing listens at http://127.0.0.1:{port}/v1" in str(error)


def test_a_name_that_is_not_known_is_said_so() -> None:
    error = outcome(model_at("http://no-such-host.invalid/v1"))
    assert type(error) is UnreachableError
    assert "name is not known" in str(error)


def test_connections_are_used_again(replay: Replay) -> None:
    url = replay.play("kept", PONG)
    model = model_at(url, concurrency=4)
    opened = replay.opened
    assert model([str(i) for i in range(100)]).tolist() == ["pong"] * 100
    assert replay.opened - opened <= 4


def test_streams_give_their_connections_back(replay: Replay) -> None:
    model = model_at(replay.play("stream-kept", streamed(events(piece("a"), piece(None, finish="stop"), "[DONE]"))))
    outcome(model, live=True)
    opened = replay.opened
    for _ in range(5):
        assert outcome(model, live=True) == "a"
    assert replay.opened == opened


def test_a_kept_connection_that_the_server_closed_is_no_error(replay: Replay) -> None:
    model = model_at(replay.play("closing", respond(choices("pong"), end="close")))
    assert [model(str(i)) for i in range(20)] == ["pong"] * 20


def test_no_more_requests_are_under_way_than_the_limit(replay: Replay) -> None:
    slow = respond(choices("pong"), wait=0.01)
    models = [model_at(replay.play("limit", slow), concurrency=3) for _ in range(2)]
    now = replay.open_now
    replay.open_max = now

    async def both() -> None:
        await asyncio.gather(*(model.acall([f"{i}{k}" for k in range(30)], samples=2) for i, model in enumerate(models)))

    asyncio.run(both())
    assert replay.open_max <= now + 3


def test_the_limit_holds_where_samples_are_split(replay: Replay) -> None:
    model = model_at(replay.play("split", respond(choices("pong"), wait=0.01)), concurrency=3)
    now = replay.open_now
    replay.open_max = now
    assert model([str(i) for i in range(5)], samples=8).shape == (5, 8)
    assert replay.open_max <= now + 3


def test_waiting_for_a_turn_is_not_held_against_a_request(replay: Replay) -> None:
    model = model_at(replay.play("A25", respond(choices("pong"), wait=0.1)), concurrency=2, timeout=1.0, retries=0)
    assert model([str(i) for i in range(30)]).tolist() == ["pong"] * 30


def test_requests_that_time_out_leave_the_others_alone(replay: Replay) -> None:
    url = replay.play("A25b", PONG, rules={"slow": [respond(choices("late"), wait=30)]})
    model = model_at(url, concurrency=2, timeout=0.3, retries=0)
    got = ol.vectorize(model, on_error="return")([("slow" if i % 5 == 0 else "fast") + str(i) for i in range(20)])
    assert [isinstance(value, TimedOutError) for value in got] == [i % 5 == 0 for i in range(20)]
    assert model("fast again") == "pong"


@pytest.mark.parametrize("live", [False, True])
def test_a_deadline_ends_an_answer_that_drips(replay: Replay, live: bool) -> None:
    body = events(*(piece("a") for _ in range(1000)))
    step = streamed(body, every=20, delay=0.05) if live else respond(choices("a" * 1000), every=1, delay=0.05)
    model = model_at(replay.play("drip", step), timeout=0.5)
    begun = time.monotonic()
    assert type(outcome(model, live=live)) is TimedOutError
    assert time.monotonic() - begun < 3
    assert replay.log("drip")[0].gone.wait(5)


@pytest.mark.parametrize("live", [False, True])
def test_a_cancelled_call_closes_its_connection(replay: Replay, live: bool) -> None:
    model = model_at(replay.play("cancel", Step(b"", end="hang")))

    async def run() -> None:
        async with asyncio.timeout(0.2):
            async with aclosing(model.backend(asked(model, live=live))) as bursts:
                async for _ in bursts:
                    pass

    with pytest.raises(TimeoutError):
        bridge.wait(run)
    assert replay.log("cancel")[0].gone.wait(5)
    assert len(replay.log("cancel")) == 1


STREAMS = ["T00", "T01", "T02", "T03", "T06", "T08b"]


@pytest.mark.parametrize("case", STREAMS)
def test_a_recorded_stream_is_read(replay: Replay, case: str) -> None:
    model = model_at(replay.replay(case))
    shown = told(model, asked(model, live=True))
    assert [(event.value.text, event.done) for event in shown] == [
        ("Hel", False),
        ("Hello", False),
        ("Hello wor", False),
        ("Hello world", False),
        ("Hello world", True),
    ]
    assert shown[-1].value.finish_reason == "stop"
    assert replay.bodies(case) == [{"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}]


def test_the_counts_of_a_stream_are_kept(replay: Replay) -> None:
    model = model_at(replay.replay("T06"))
    last = told(model, asked(model, live=True))[-1].value
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 4)


def test_an_early_end_of_a_stream_is_an_error_after_the_pieces(replay: Replay) -> None:
    stream, shown = model_at(replay.replay("T08")).stream("hi"), list[str]()
    with pytest.raises(UnreachableError, match="ended before"):
        shown.extend(text for _, text, _ in stream)
    assert shown == ["Hel", "Hello"]
    assert len(replay.log("T08")) == 1  # what was shown can't be taken back, so it is not asked again


def test_an_error_in_mid_stream_follows_the_pieces(replay: Replay) -> None:
    model = model_at(replay.replay("T11"))
    assert partials(model) == ["Hel", "Hello"]
    error = outcome(model, live=True)
    assert (type(error), error.status) == (ServerError, 500)
    assert "had an error processing your request" in str(error)


def test_characters_split_over_reads_are_whole(replay: Replay) -> None:
    text = "naïve 你好 🌍🏽 ✅"
    model = model_at(replay.replay("T12"))
    assert outcome(model, live=True) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in shown for shown in partials(model_at(replay.replay("T12"))))


def test_a_very_long_line_is_read(replay: Replay) -> None:
    assert outcome(model_at(replay.replay("T14")), live=True) == "x" * 700_000


def test_samples_in_one_stream_are_kept_apart(replay: Replay) -> None:
    model = model_at(replay.replay("T15"))
    last = {event.row: event.value for event in told(model, asked(model, 2, live=True)) if event.done}
    assert [(last[row].text, last[row].finish_reason) for row in (0, 1)] == [("A1A2A3", "length"), ("B1B2", "stop")]
    assert partials(model, 0, 2) == ["A1", "A1A2", "A1A2A3"]
    assert partials(model, 1, 2) == ["B1", "B1B2"]


def test_leaving_a_stream_closes_its_connection(replay: Replay) -> None:
    model = model_at(replay.replay("T16"))
    shown = []
    for _, text, _ in model.stream("hi"):
        shown.append(text)
        if len(shown) == 3:
            break
    left = replay.log("T16")[0]
    assert left.gone.wait(5)
    assert left.gone_at - left.time < 3
    assert shown == ["w0 ", "w0 w1 ", "w0 w1 w2 "]


def test_silence_in_mid_stream_is_an_error_but_a_long_stream_is_not(replay: Replay) -> None:
    model = model_at(replay.replay("T22"), idle_timeout=0.5)
    error = outcome(model, live=True)
    assert type(error) is TimedOutError
    assert "silent" in str(error)
    assert replay.log("T22")[0].gone.wait(5)
    slow = streamed(events(*(piece("a") for _ in range(6)), piece(None, finish="stop"), "[DONE]"), every=120, delay=0.2)
    assert outcome(model_at(replay.play("slow", slow), idle_timeout=0.6), live=True) == "a" * 6


def fifty() -> bytes:
    return events(*(piece(f"w{i} ") for i in range(10)), piece(None, finish="stop"), "[DONE]")


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("end", ["close", "reset"])
def test_a_stream_cut_anywhere_is_never_taken_for_whole(replay: Replay, unbroken: None, chunked: bool, end: str) -> None:
    body = fifty()
    text = "".join(f"w{i} " for i in range(10))
    whole = streamed(body, chunked=chunked).data
    finish = len(whole) - whole[::-1].index(b'"stop"'[::-1])  # from here on all of the text, and its end, was said
    cuts = [*range(0, finish - 8, 7), *range(finish - 8, len(whole))]
    model = model_at(replay.play("cut-stream", *(Step(whole[:k], end=end) for k in cuts)), concurrency=1)
    for k in cuts:
        got = outcome(model, live=True)
        assert isinstance(got, ModelError) if k <= finish else got == text or isinstance(got, ModelError)
    assert outcome(model_at(replay.play("whole-stream", Step(whole, end="close"))), live=True) == text


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n", "\r\r"])
@pytest.mark.parametrize("every", [1, 2, 3, 50, 10_000])
def test_any_line_ends_in_any_pieces(replay: Replay, end: str, every: int) -> None:
    body = events(piece("é"), {"choices": []}, piece("🌍"), piece(None, finish="stop"), "[DONE]", end=end)
    assert outcome(model_at(replay.play("ends", streamed(body, chunked=False, every=every))), live=True) == "é🌍"


def test_a_watched_answer_that_comes_whole_is_taken(replay: Replay) -> None:
    model = model_at(replay.play("whole", respond(choices("pong"))))
    assert outcome(model, live=True) == "pong"
    assert outcomes(model, asked(model, 3, live=True)) == ["pong"] * 3


def test_samples_left_out_of_a_stream_are_asked_for(replay: Replay) -> None:
    model = model_at(replay.play("stream-n", streamed(events(piece("a"), piece(None, finish="stop"), "[DONE]"))))
    assert outcomes(model, asked(model, 3, live=True)) == ["a"] * 3
    assert [body.get("n") for body in replay.bodies("stream-n")] == [3, None, None]


def test_what_may_become_a_stop_is_held_back(replay: Replay) -> None:
    body = events(*(piece(text) for text in ("one", "\n", "\nQ", ": no", "more")), piece(None, finish="stop"), "[DONE]")
    model = model_at(replay.play("held", streamed(body)))
    assert partials(model, stop=["\n\nQ:"]) == ["one"]
    assert outcome(model, live=True, stop=["\n\nQ:"]) == "one"
    assert partials(model, stop=["Q!"]) == ["one", "one\n", "one\n\n", "one\n\nQ: no", "one\n\nQ: nomore"]


def test_a_stop_that_we_see_ends_the_stream(replay: Replay) -> None:
    unfinished = streamed(events(piece("one. "), piece("two"))).data[:-5]
    model = model_at(replay.play("ended", Step(unfinished, end="hang")))
    last = told(model, asked(model, live=True, stop=["."]))[-1].value
    assert last == Completion("one", "stop")
    assert replay.log("ended")[0].gone.wait(5)


def test_a_stream_without_an_end_ends_soon_after_its_last_choice(replay: Replay) -> None:
    model = model_at(
        replay.play("endless", Step(streamed(events(piece("a"), piece(None, finish="stop"))).data[:-5], end="hang"))
    )
    assert outcome(model, live=True) == "a"


def test_a_stream_that_says_nothing_is_an_error(replay: Replay) -> None:
    assert type(outcome(model_at(replay.play("nothing", streamed(events("[DONE]")))), live=True)) is MalformedError
    silent = streamed(events(piece(None, finish="stop"), "[DONE]"))
    assert isinstance(outcome(model_at(replay.play("silent", silent)), live=True), MalformedError)
    html = respond("<html>login</html>", "200 OK", "Content-Type: text/html")
    assert isinstance(outcome(model_at(replay.play("login", html)), live=True), ModelError)


def test_a_finished_stream_is_stored_and_replayed(replay: Replay) -> None:
    model = model_at(replay.replay("T00"))
    assert [value for _, value, _ in model.stream("hi")][-1] == "Hello world"
    assert [value for _, value, _ in model.stream("hi")] == ["Hello world"]
    assert model("hi") == "Hello world"
    assert len(replay.log("T00")) == 1


def test_streams_of_many_prompts_keep_their_rows(replay: Replay) -> None:
    def answer(arrival: Arrival) -> Step:
        word = arrival.json["messages"][0]["content"]
        return streamed(events(piece(word), piece("!"), piece(None, finish="stop"), "[DONE]"), every=90)

    model = model_at(replay.play("many", answer), concurrency=8)
    last = {index: text for index, text, done in model.stream([[str(i), str(-i)] for i in range(20)]) if done}
    assert last == {(i, k): f"{(-1) ** k * i}!" for i in range(20) for k in range(2)}


def test_a_script_that_leaves_a_stream_ends_cleanly(replay: Replay) -> None:
    url = replay.replay("T16", "T16-script")
    script = f"""
import outlines_like as ol
model = ol.models.openai("m", base_url={url!r})
for _, text, _ in model.stream("hi"):
    break
stream = iter(model.stream("ho"))
next(stream)
print(text)
"""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "w0 \n", "")
    assert all(arrival.gone.wait(5) for arrival in replay.log("T16-script"))
