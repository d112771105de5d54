"""Watched programs under the operators of streams, and arrays of programs that are watched."""

import asyncio
import threading

import pytest

import outlines_like as ol
from tests.backends import endless, within

WHOLE = "one: w5 and more "
PIECES = ["one: ", "w5", " and", " more "]


@pytest.fixture
def model():
    """Three words for an answer, named by the length of the prompt."""
    return ol.models.fake(lambda request: f"w{len(request.text)} and more")


@ol.program
def said(lm, word):
    return lm + f"{word}: " + ol.gen("x") + " "


def last(stream):
    """What came last."""
    *_, final = stream
    return final


OPERATORS = {
    "deltas": (ol.deltas, lambda out: [text for _, text in out] == PIECES),
    "finished": (
        ol.finished,
        lambda out: [(i, str(part), part.captures["x"]) for i, part in out] == [((), WHOLE, "w5 and more")],
    ),
    "latest": (ol.latest, lambda out: str(out[-1]) == WHOLE),
    "lines": (ol.lines, lambda out: out == [((), WHOLE)]),
    "sentences": (ol.sentences, lambda out: out[-1] == ((), WHOLE)),
    "map_values": (ol.map_values(lambda part: len(part.text)), lambda out: out[-1] == ol.Snapshot((), len(WHOLE), True)),
    "filter_rows": (ol.filter_rows(lambda index: index == ()), lambda out: out[-1].value.text == WHOLE),
    "scan": (ol.scan(lambda text, item: text + item.value.delta, ""), lambda out: out[-1] == WHOLE),
    "peek": (ol.peek(lambda item: None), lambda out: out[-1].value.text == WHOLE),
    "take": (ol.take(2), lambda out: [item.value.delta for item in out] == PIECES[:2]),
    "first": (ol.first(1), lambda out: [item.value.text for item in out] == [WHOLE]),
    "chunks": (ol.chunks(2), lambda out: [len(chunk) for chunk in out] == [2, 2]),
    "throttle": (ol.throttle(0.05), lambda out: out[-1].value.text == WHOLE),
    "timeout": (ol.timeout(idle=10), lambda out: out[-1].value.text == WHOLE),
    "by_row": (ol.by_row, lambda out: [index for index, _ in out] == [()]),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("read", ["for", "async for", "called"])
def test_operators_take_a_watched_program_as_one_row(model, name, read):
    operator, holds = OPERATORS[name]
    watched = model.stream() + said("one")

    async def items():
        return [item async for item in watched | operator]

    out = asyncio.run(items()) if read == "async for" else list(watched | operator)
    if read == "called" and name in ("deltas", "lines", "finished"):
        out = list(operator(model.stream() + said("one")))
    assert holds(out)


def test_a_watched_program_is_collected(model):
    watched = model.stream() + said("one")
    assert (watched | ol.collect).captures == {"x": "w5 and more"}
    assert asyncio.run(ol.acollect(watched)).text == WHOLE
    assert (watched | ol.map_values(str) | ol.collect) == WHOLE


def test_watched_programs_merge_and_split(model):
    one, two = model.stream() + said("one"), model.stream() + said("two")
    names = {name: item.value.text for name, item in ol.merge(one, b=two)}
    assert names == {0: WHOLE, "b": WHOLE.replace("one", "two")}
    assert last(ol.zip_latest(one, two))[1].value.done
    log = []
    copies = ol.models.fake(log=log).stream() + said("one") | ol.tee
    assert [last(copy).value.text for copy in copies] == ["one: ONE:  "] * 2
    assert len(log) == 1


@pytest.mark.parametrize("plain", [True, False])
def test_a_program_is_ended_where_its_text_pleases(plain):
    """The request behind it is cancelled; what was said so far is the end."""
    closed = threading.Event()
    model = ol.models.Model("own", endless(closed=closed), endpoint="here", defaults={})
    ended = model.stream() + said("one") | ol.stop_when(lambda part: part.text.endswith("two"))

    async def items():
        return [item async for item in ended]

    out = within(lambda: list(ended) if plain else asyncio.run(items()))
    assert (out[-1].done, out[-1].value.text) == (True, "one: one two")
    assert closed.wait(5)


def test_operators_wait_for_a_program_without_one_to_be_given(model):
    with pytest.raises(TypeError, match="an operator takes a stream, not LM"):
        ol.take(2)(model + "x")


def test_an_error_passes_through_operators(model):
    @ol.program
    def broken(lm):
        raise ValueError("no luck")

    with pytest.raises(ValueError, match="no luck"):
        list(model.stream() + said("one") + broken() | ol.deltas)


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)])
def test_arrays_of_programs_stream_as_they_run(model, shape):
    """The value so far is a program: its text grows, and the last one is what the call gives."""
    words = {(): "a", (2,): ["a", "bc"], (2, 2): [["a", "bc"], ["d", "ef"]]}[shape]
    texts = {}
    for index, lm, done in ol.vectorize(said).stream(model, words):
        assert str(lm).startswith(texts.get(index, ""))
        texts[index] = str(lm)
        assert ("x" in lm) == lm.captures.get("x", "").endswith("more")
        assert lm["x"] == "w3 and more" if done and index[-1:] != (1,) else True
    eager = ol.vectorize(said)(model, words)
    assert texts == {(): str(eager)} if shape == () else {i: str(eager[i]) for i in texts} == texts


def test_a_failed_program_of_an_array_is_a_value(model):
    @ol.program
    def picky(lm, n):
        if n == 1:
            raise ValueError("not one")
        return lm + ol.gen("x")

    stream = ol.vectorize(picky, on_error="return").stream(model, [0, 1, 2])
    ends = {index: value for index, value, done in stream if done}
    assert str(ends[1,]) == "not one"
    assert [str(ends[i,]) for i in (0, 2)] == ["w0 and more"] * 2
    deltas = {}
    for index, text in ol.vectorize(picky, on_error="missing").stream(model, [0, 1, 2]) | ol.deltas:
        deltas[index] = deltas.get(index, "") + text
    assert deltas == {(0,): "w0 and more", (2,): "w0 and more"}
