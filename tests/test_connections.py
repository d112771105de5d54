"""Requests over aiohttp's connections, as a server sees them."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import aiohttp
import pytest
import yarl

import outlines_like as ol
from outlines_like.models.connections import Prepared, Response, session

from .replay import Replay, Step, choices, respond

PONG = respond(choices("pong"))


def answer(url: str, **settings: object) -> object:
    with ol.cache.disabled():
        return ol.models.openai("m", base_url=url, **settings)("hi")


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def test_a_request_holds_what_it_needs_and_no_more(replay: Replay) -> None:
    assert answer(replay.play("plain", PONG)) == "pong"
    (arrival,) = replay.log("plain")
    assert arrival.head.startswith("POST /plain/v1/chat/completions HTTP/1.1\r\n")
    body = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    assert arrival.body == body
    assert arrival.headers == {
        "host": f"127.0.0.1:{replay.port}",
        "content-type": "application/json",
        "accept": "*/*",
        "accept-encoding": "gzip",
        "user-agent": "outlines_like",
        "content-length": str(len(body)),
    }


def test_a_proxy_gets_the_whole_address_and_its_password(replay: Replay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://me:word@127.0.0.1:{replay.port}")
    replay.play("", PONG)
    model = ol.models.openai("m", base_url="http://model.test/v1?x=1", trust_env=True)
    with ol.cache.disabled():
        assert [model("a"), model("b")] == ["pong", "pong"]
    for arrival in replay.log(""):
        assert arrival.path == "http://model.test/v1/chat/completions?x=1"
        assert arrival.headers["host"] == "model.test"
        assert arrival.headers["proxy-authorization"] == basic("me", "word")


@pytest.mark.parametrize("trusted", [True, False])
def test_passwords_of_netrc_are_used_only_if_asked(
    replay: Replay, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trusted: bool
) -> None:
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password word\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    answer(replay.play("netrc", PONG), trust_env=trusted)
    shown = replay.log("netrc")[0].headers.get("authorization")
    assert shown == (basic("me", "word") if trusted else None)


def test_headers_of_the_user_go_out_but_for_those_that_frame_the_body(replay: Replay) -> None:
    mine = {
        "content-type": "application/x-mine",
        "Content-Length": "3",
        "transfer-encoding": "gzip",
        "X-Mine": "a: b",
    }
    assert answer(replay.play("mine", PONG), headers=mine) == "pong"
    (arrival,) = replay.log("mine")
    assert arrival.headers["content-type"] == "application/x-mine"
    assert arrival.headers["x-mine"] == "a: b"
    assert "transfer-encoding" not in arrival.headers
    assert arrival.json["model"] == "m"


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\r\nb", "é", "a\x00"])
def test_what_is_no_name_of_a_header_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a header"):
        ol.models.openai("m", base_url="http://localhost:1/v1", headers={name: "x"})


def test_notices_before_the_answer_are_passed_over(replay: Replay) -> None:
    notices = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    assert answer(replay.play("notices", Step(notices + PONG.data))) == "pong"
    assert answer(replay.play("notices-cut", Step(notices + PONG.data, every=7))) == "pong"


def test_a_connection_serves_again_once_its_answer_was_read(replay: Replay) -> None:
    url = replay.play("kept", PONG)
    model = ol.models.openai("m", base_url=url, concurrency=1)
    before = replay.opened
    with ol.cache.disabled():
        assert model(["a", "b", "c"]).tolist() == ["pong"] * 3
    assert replay.opened == before + 1


async def asked(method: str, url: str, body: bytes = b"") -> tuple[aiohttp.ClientSession, Response]:
    connections = session({}, trust_env=False)
    return connections, await (await Prepared.of(connections, method, yarl.URL(url))).send(body)


async def test_a_get_says_nothing_of_a_body(replay: Replay) -> None:
    connections, response = await asked("GET", replay.play("got", PONG))
    async with connections:
        assert await response.content.read() == PONG.data.partition(b"\r\n\r\n")[2]
    (arrival,) = replay.log("got")
    assert arrival.head.startswith("GET /got/v1 HTTP/1.1\r\n")
    assert "content-length" not in arrival.headers


async def test_who_waits_for_more_of_what_is_closed_is_told(replay: Replay) -> None:
    connections, response = await asked("POST", replay.play("half", Step(PONG.data[:-5], end="hang")), b"{}")
    async with connections:
        assert await response.content.readany()
        reading = asyncio.ensure_future(response.content.readany())
        await asyncio.sleep(0)
        response.close()
        with pytest.raises(aiohttp.ClientConnectionError):
            await reading
    assert await asyncio.to_thread(replay.log("half")[0].gone.wait, 10)
