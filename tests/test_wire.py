"""Reading what servers say, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import pickle
import time
from collections import deque
from email.utils import formatdate
from itertools import repeat
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlines_like.errors import MalformedError, ModelError, RateLimitError, UnreachableError
from outlines_like.events import Failure
from outlines_like.models import quirks, refusals, wire
from outlines_like.models.accounts import Account
from outlines_like.models.masking import Mask, Secret
from outlines_like.models.quirks import Dialect
from outlines_like.models.refusals import Said
from outlines_like.models.remote import Deadlines
from outlines_like.requests import Completion, Request, Terms, Usage
from outlines_like.stops import cut, ended, held, met, safe, sendable

NOW = 1_800_000_000.0
TEXTS = st.text("abc", max_size=12)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=6)


def refuse(answer: Any) -> ModelError:
    return refusals.inner_refusal(answer, {}, now=NOW)


@given(TEXTS, STOPS)
def test_an_answer_is_the_text_before_the_earliest_stop(text: str, stops: list[str]) -> None:
    found = [text.index(stop) for stop in stops if stop in text]
    assert cut(text, stops) == (text[: min(found)] if found else text)
    assert met(text, stops) == min(found, default=None)


@given(TEXTS, STOPS, st.data())
def test_what_was_shown_is_never_taken_back(text: str, stops: list[str], data: st.DataObject) -> None:
    shown, whole = "", cut(text, stops)
    for k in range(len(text) + 1):
        now = safe(text[:k], stops)
        assert now.startswith(shown)
        assert whole.startswith(now)
        shown = now
        if ended(text[:k], stops):
            assert cut(text[:k], stops) == whole == now


@given(TEXTS, STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    n = held(text, stops)
    assert n == 0 or any(stop.startswith(text[-n:]) for stop in stops)


@given(TEXTS, STOPS, st.integers(0, 4))
def test_a_server_that_applies_some_stops_changes_no_answer(text: str, stops: list[str], most: int) -> None:
    sent = sendable(stops, most)
    assert len(sent) <= max(most, 0)
    if len(stops) > most:
        assert cut(cut(text, sent), stops) == cut(text, stops)


def test_common_stops_are_sent_even_among_many() -> None:
    assert sendable(["\n", "\n\n", "Q:", "A:", "END", "###"], 4) == ["\n", "Q:", "A:", "END"]


EVENTS = [b"a", b"b\nc", b"", b"[DONE]", "é🌍".encode()]


def framed(end: bytes) -> bytes:
    parts = [
        b": comment",
        b"data: a",
        b"",
        b"event: x",
        b"",
        b"id: 1",
        b"data:b",
        b"data: c",
        b"",
        b"",
        b"data",
        b"",
        b"retry: 3",
    ]
    parts += [b"data: [DONE]", b"", b"dat: no", "data: é🌍".encode(), b"", b""]
    return b"\xef\xbb\xbf" + end.join(parts)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 1000])
def test_events_are_the_same_however_they_are_cut(end: bytes, size: int) -> None:
    framer, stream = wire.Framer(), framed(end)
    found = [data for i in range(0, len(stream), size) for data in framer.feed(stream[i : i + size])]
    assert [*found, *framer.finish()] == EVENTS


@given(st.lists(st.binary(max_size=5), max_size=30))
def test_any_bytes_in_any_pieces_give_the_same_events(parts: list[bytes]) -> None:
    whole, pieces = wire.Framer(), wire.Framer()
    together = whole.feed(b"".join(parts)) + whole.finish()
    assert [data for part in parts for data in pieces.feed(part)] + pieces.finish() == together


def test_a_last_event_without_its_blank_line_counts() -> None:
    framer = wire.Framer()
    assert framer.feed(b"data: [DONE]") == []
    assert framer.finish() == [b"[DONE]"]
    assert framer.finish() == []


@pytest.mark.parametrize("part", [b"data: " + b"x" * 50, b"x" * 50, b"data: x\n", b"x"])
def test_an_endless_event_is_an_error(part: bytes) -> None:
    framer = wire.Framer(limit=1000)
    with pytest.raises(MalformedError):
        deque(map(framer.feed, repeat(part, 2000)))


def test_a_long_stream_of_short_events_is_no_error() -> None:
    framer = wire.Framer(limit=1000)
    assert sum(len(framer.feed(b"data: " + b"x" * 500 + b"\n\n: ping\n")) for _ in range(100)) == 100


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=3), st.integers(1, 40))
def test_gzip_is_undone_in_pieces(members: list[bytes], size: int) -> None:
    data, inflater = b"".join(map(gzip.compress, members)), wire.Inflater(" GZip ", 10_000)
    assert b"".join(inflater.feed(data[i : i + size]) for i in range(0, len(data), size)) == b"".join(members)
    inflater.finish()


@pytest.mark.parametrize("encoding", ["gzip", ""])
def test_no_more_comes_out_than_the_limit(encoding: str) -> None:
    body = b"x" * 1001
    with pytest.raises(wire.TooLargeError):
        wire.Inflater(encoding, 1000).feed(gzip.compress(body) if encoding else body)
    assert len(wire.Inflater(encoding, 1001).feed(gzip.compress(body) if encoding else body)) == 1001


def test_many_members_together_keep_to_the_limit() -> None:
    with pytest.raises(wire.TooLargeError):
        wire.Inflater("gzip", 1000).feed(gzip.compress(b"x" * 10) * 101)


def test_a_gzip_without_its_end_is_an_error() -> None:
    inflater = wire.Inflater("gzip")
    inflater.feed(gzip.compress(b"abc")[:-1])
    with pytest.raises(UnreachableError):
        inflater.finish()


NAMES = [
    "choices",
    "message",
    "content",
    "delta",
    "text",
    "error",
    "usage",
    "finish_reason",
    "index",
    "code",
    "detail",
    "loc",
    "msg",
    "logprobs",
    "logprob",
    "tokens",
    "token_logprobs",
]
LEAVES = st.none() | st.booleans() | st.floats() | st.text(max_size=8)
ANSWERS = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(NAMES), inner), max_leaves=20)


@given(ANSWERS)
def test_no_answer_makes_more_trouble_than_an_error_of_ours(answer: Any) -> None:
    body = json.dumps(answer).encode()
    telling = wire.Telling(2, ["x"])
    telling.hear([body, body], refuse)
    assert all(isinstance(end, Completion | Failure) for end in telling.outcomes().values())
    with contextlib.suppress(ModelError):
        wire.answers(wire.decoded(body), 2, ["x"], refuse)
    assert isinstance(refusals.refusal(400, {}, refusals.said(body), now=NOW), ModelError)


@given(st.binary(max_size=60))
def test_no_body_makes_more_trouble_than_an_error_of_ours(body: bytes) -> None:
    with contextlib.suppress(ModelError):
        wire.answers(wire.decoded(body), 1, [], refuse)
    assert isinstance(refusals.refusal(500, {}, refusals.said(body), now=NOW), ModelError)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ('{"error":{"message":"m","type":"t","code":"c","param":"p"}}', Said("m", "c", "t", "p")),
        ('{"error":{"message":"m","code":null},"code":429}', Said("m", "429")),
        ('{"error":"m","code":5}', Said("m", "5")),
        ('{"object":"error","message":"m","type":"t","param":null,"code":400}', Said("m", "400", "t")),
        ('{"message":{"detail":[{"type":"x","loc":["body","n"],"msg":"no"}]},"code":"1"}', Said("n: no", "1", "x", "n")),
        ('{"detail":"m"}', Said("m")),
        ('{"detail":[{"loc":["body",0,"stop"],"msg":"no"}]}', Said("stop: no", param="stop")),
        ('{"errors":[{"message":"m"}]}', Said("m")),
        ('[{"error":{"code":400,"message":"m","status":"INVALID"}}]', Said("m", "400")),
        ('"m"', Said("m")),
        ("m", Said("m")),
        ("", Said("")),
        ("{}", Said("")),
        ('{"x":1}', Said('{"x":1}')),
    ],
)
def test_a_refusal_is_read_in_all_its_shapes(body: str, said: Said) -> None:
    assert refusals.said(body.encode()) == said


@pytest.mark.parametrize(
    "text",
    [
        "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens.",
        "prompt is too long: 210000 tokens > 200000 maximum",
        "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
        "Input length 5000 exceeds the context window of this model",
        "the request exceeds the available context size, try increasing it",
    ],
)
def test_too_long_a_prompt_is_recognized(text: str) -> None:
    assert refusals.kind_of(400, Said(text)).__name__ == "ContextLengthError"


@pytest.mark.parametrize("text", ["max_tokens is too large", "temperature must be at most 2", "unknown field 'context'"])
def test_other_faults_are_not_taken_for_length(text: str) -> None:
    assert refusals.kind_of(400, Said(text)).__name__ == "BadRequestError"


def date(seconds: float) -> str:
    return formatdate(NOW + seconds, usegmt=True)


WAITS = [
    ({"retry-after": "1"}, 1.0),
    ({"retry-after": " 2.5 "}, 2.5),
    ({"retry-after": "0"}, 0.0),
    ({"retry-after-ms": "1500"}, 1.5),
    ({"retry-after-ms": "20", "retry-after": "7"}, 0.02),
    ({"retry-after-ms": "soon", "retry-after": "7"}, 7.0),
    ({"retry-after": date(30)}, 30.0),
    ({"retry-after": date(-30)}, 0.0),
    ({"retry-after": "-1"}, None),
    ({"retry-after": "nan"}, None),
    ({"retry-after": "inf"}, None),
    ({"retry-after": "1e35"}, None),
    ({"retry-after": "9" * 400}, None),
    ({"retry-after": "Fri, 31 Dec 100000 23:59:59 GMT"}, None),
    ({"retry-after": "Fri, 31 Dec 9999 23:59:59 GMT"}, None),
    ({"retry-after": "Fri, 99 Foo 2026 99:99:99 GMT"}, None),
    ({"retry-after": ""}, None),
    ({}, None),
    ({"x-ratelimit-reset-requests": "6m0.5s", "x-ratelimit-remaining-requests": "0"}, 360.5),
    ({"x-ratelimit-reset-requests": "20ms", "x-ratelimit-remaining-requests": "0"}, 0.02),
    ({"x-ratelimit-reset-tokens": "1h2m3s", "x-ratelimit-remaining-tokens": "5"}, None),
    ({"anthropic-ratelimit-requests-reset": "2027-01-15T08:00:10Z", "anthropic-ratelimit-requests-remaining": "0"}, 10.0),
    ({"x-ratelimit-reset-requests": "junk", "x-ratelimit-remaining-requests": "0"}, None),
]


@pytest.mark.parametrize(("headers", "wait"), WAITS)
def test_how_long_a_server_asks_to_wait(headers: dict[str, str], wait: float | None) -> None:
    assert refusals.wait_asked(headers, NOW) == pytest.approx(wait)


@given(st.text(max_size=30) | st.floats().map(str) | st.integers().map(str), st.sampled_from([429, 503]))
def test_no_header_makes_more_trouble_than_none(value: str, status: int) -> None:
    names = ("retry-after", "retry-after-ms", "x-ratelimit-reset-requests", "x-should-retry", "x-request-id", "content-type")
    for name in names:
        error = refusals.refusal(status, {name: value, "x-ratelimit-remaining-requests": "0"}, Said("m"), now=time.time())
        assert str(error)
        assert not error.retryable or error.retry_after is None or 0 <= error.retry_after <= 120


def test_a_wait_beyond_reason_is_told_and_not_waited() -> None:
    error = refusals.refusal(429, {"retry-after": "121"}, Said("slow down"), now=NOW)
    assert type(error) is RateLimitError
    assert not error.retryable
    assert "come back in 121 s, at 2027-01-15 08:02:01 UTC" in str(error)
    assert refusals.refusal(429, {"retry-after": "120"}, Said("slow down"), now=NOW).retryable


def test_an_excerpt_is_short_and_plain() -> None:
    text = refusals.excerpt("a\x1b[31m\r\n\u202e  b" + "c" * 1000)
    assert text.startswith("a [31m b")
    assert len(text) == 200


SENT = {"model": "m", "max_tokens": 5, "n": 3, "stop": ["a", "b"], "stream": True}
NO_LIMIT = {"refused": frozenset({"max_tokens"})}
LESSONS: list[tuple[Said, dict[str, Any]]] = [
    (Said("Unsupported parameter: 'max_tokens' is not supported with this model.", param="max_tokens"), NO_LIMIT),
    (Said("max_tokens: Extra inputs are not permitted", kind="extra_forbidden", param="max_tokens"), NO_LIMIT),
    (Said("max_tokens is too large", param="max_tokens"), {}),
    (Said("'stop' is not supported with this model"), {"refused": frozenset({"stop"})}),
    (Said("'stop' takes at most 1 string", param="stop"), {"stops": 1}),
    (Said("'stop' takes at most 4 strings", param="stop"), {}),
    (Said("n > 1 is not supported"), {"choices": 1}),
    (Said("bad value", param="n"), {"choices": 1}),
    (Said("n must be less than or equal to 2", param="n"), {"choices": 2}),
    (Said("streaming: 'stream' is not supported"), {"refused": frozenset({"stream"})}),
    (Said("your prompt is unknown to be unsupported"), {}),
    (Said(""), {}),
]


@pytest.mark.parametrize(("said", "change"), LESSONS)
def test_what_a_refusal_teaches(said: Said, change: dict[str, Any]) -> None:
    assert quirks.learnt(Dialect(), said, SENT) == Dialect()._replace(**change)


def test_what_two_refusals_teach_adds_up() -> None:
    assert Dialect(frozenset({"a"}), 4, 1).joined(Dialect(frozenset({"b"}), 8, 0)) == Dialect(frozenset({"a", "b"}), 4, 0)


def test_only_the_first_draw_has_the_seed_of_the_user() -> None:
    def seed(occurrence: int, sample: int, scope: str = "") -> int:
        return quirks.seed_of(7, Request("e", "m", "p", {"seed": 7}, occurrence, sample, Terms(scope=scope)))

    seeds = [seed(0, 0), seed(0, 1), seed(1, 0), seed(1, 1), seed(0, 0, "row 1")]
    assert seeds[0] == 7
    assert len(set(seeds)) == 5
    assert all(0 <= value < 2**31 for value in seeds)
    assert seeds[1] == seed(0, 1)


def test_a_stream_is_told_choice_by_choice() -> None:
    telling = wire.Telling(2, [])
    chunks = [
        {"choices": [{"index": 1, "delta": {"content": "b"}}]},
        {"choices": [{"index": 0, "delta": {"content": "a"}}, {"index": 9, "delta": {"content": "?"}}]},
        {"choices": [{"index": 1, "finish_reason": "length"}]},
        {"choices": [{"delta": {"content": "a"}, "index": 0, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5}},
    ]
    told = telling.hear([json.dumps(chunk).encode() for chunk in chunks], refuse)
    assert [(index, completion.text) for index, completion in told] == [(1, "b"), (0, "a"), (0, "aa")]
    assert telling.complete
    assert telling.outcomes() == {0: Completion("aa", "stop", Usage(3, 3)), 1: Completion("b", "length", Usage(0, 2))}


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 9))
def test_shares_add_up_to_what_was_paid(read: int, written: int, n: int) -> None:
    parts = wire.shares(Usage(read, written), n)
    assert (sum(part.prompt_tokens for part in parts), sum(part.completion_tokens for part in parts)) == (read, written)


def test_a_secret_is_shown_by_nothing() -> None:
    secret = Secret("sk-1234567")
    assert (repr(secret), str(secret), f"{secret}") == ("***",) * 3
    assert secret.reveal() == "sk-1234567"
    for write in (pickle.dumps, json.dumps):
        with pytest.raises(TypeError):
            write(secret)


async def test_a_deadline_ends_what_takes_too_long_and_nothing_else() -> None:
    deadlines, done = Deadlines(0.05), []

    async def sleep(seconds: float) -> None:
        with deadlines:
            await asyncio.sleep(seconds)
        done.append(seconds)

    tasks = [asyncio.ensure_future(sleep(seconds)) for seconds in (30, 0, 40, 0.001)]
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [TimeoutError, type(None), TimeoutError, type(None)]
    assert done == [0, 0.001]
    assert all(task.cancelling() == 0 for task in tasks)


async def test_a_cancellation_is_not_taken_for_a_deadline() -> None:
    async def sleep() -> None:
        with Deadlines(0.01):
            try:
                await asyncio.sleep(30)
            finally:
                asyncio.current_task().cancel()  # type: ignore[union-attr]
                await asyncio.sleep(30)

    with pytest.raises(asyncio.CancelledError):
        await asyncio.ensure_future(sleep())


def test_every_spelling_of_a_secret_is_masked() -> None:
    mask = Mask([Secret("sk/12 34+5")])
    assert mask("sk/12 34+5, sk%2F12%2034%2B5, sk/12%2034%2B5, sk%2F12+34%2B5, c2svMTIgMzQrNQ") == "***, ***, ***, ***, ***"
    assert Mask([Secret("hi")])("this") == "this"


def test_an_account_shows_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    one = Account("https://h.example/v1?key=SECRET1&api-version=2", "SECRET2", "chat", {"x-auth": "SECRET3"})
    other = Account("https://h.example/v1?key=SECRET1&api-version=2", "SECRET4", "chat", {"x-auth": "SECRET3"})
    assert one.place == other.place == "https://h.example/v1/chat/completions?api-version=2"
    assert one.name != other.name
    assert "SECRET" not in repr(one) + repr(vars(one)) + one.mask("SECRET1 SECRET2 SECRET3 Bearer SECRET2")


# Log-probabilities and schemas

SAID = [("a", -1.0), ("b", -2.0), (".", -4.0)]


def test_log_probabilities_of_chats_and_completions_are_those_of_the_text_that_is_left() -> None:
    listed = {"content": [{"token": token, "logprob": chance} for token, chance in SAID]}
    apart = {"tokens": [token for token, _ in SAID], "token_logprobs": [chance for _, chance in SAID]}
    for part, told in (({"message": {"content": "ab."}}, listed), ({"text": "ab."}, apart)):
        choice = {"index": 0, **part, "logprobs": told, "finish_reason": "stop"}
        (whole,), (cut_,) = (wire.answers({"choices": [choice]}, 1, stops, refuse) for stops in ([], ["."]))
        assert isinstance(whole, Completion)
        assert isinstance(cut_, Completion)
        assert (whole.logprobs, whole.log_prob) == ((-1.0, -2.0, -4.0), -7.0)
        assert (cut_.text, cut_.logprobs) == ("ab", (-1.0, -2.0))


def test_log_probabilities_of_a_stream_are_joined() -> None:
    telling = wire.Telling(1, [])
    for token, chance in SAID:
        told = {"content": [{"token": token, "logprob": chance}]}
        choice = {"index": 0, "delta": {"content": token}, "logprobs": told, "finish_reason": "stop" if token == "." else None}
        telling.hear([json.dumps({"choices": [choice]}).encode()], refuse)
    got = telling.outcomes()[0]
    assert isinstance(got, Completion)
    assert (got.text, got.logprobs) == ("ab.", (-1.0, -2.0, -4.0))


@pytest.mark.parametrize(
    "told", [3, [1], {"content": 3}, {"content": [3, {"token": 1}]}, {"tokens": None, "token_logprobs": ["x"]}]
)
def test_odd_log_probabilities_are_none(told: Any) -> None:
    assert wire.chances_of(told) == []


def test_a_schema_is_sent_as_a_response_format_and_log_probabilities_as_the_endpoint_wants_them() -> None:
    asked = Request("here", "m", "Hi", {"json_schema": {"type": "integer"}, "logprobs": True})
    chat, text = (quirks.body(asked, 1, Dialect(), endpoint=endpoint, live=False) for endpoint in ("chat", "completions"))
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "integer"}}}
    assert chat["response_format"] == text["response_format"] == wanted
    assert (chat["logprobs"], text["logprobs"]) == (True, 1)
    assert not {"json_schema"} & {*chat, *text}
