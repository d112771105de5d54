"""Calls that must type-check under ``mypy --strict``. Never run."""

from __future__ import annotations

from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import outlines_like as ol

Objects = npt.NDArray[np.object_]


PROMPTS: Objects = np.array(["a"], dtype=object)


def length(text: str, extra: int = 0) -> int:
    return len(text) + extra


async def shout(text: str) -> str:
    return text.upper()


class Speaker:
    def speak(self, text: str) -> str:
        return text

    def __call__(self, text: str) -> str:
        return text


async def functions() -> None:
    lengths = ol.vectorize(length)
    assert_type(lengths("a"), int)
    assert_type(lengths("a", extra=1), int)
    assert_type(lengths(["a", "b"]), Objects)
    assert_type(lengths([["a"], ["b"]], extra=[1, 2]), Objects)
    assert_type(lengths("a", samples=3), Objects)
    assert_type(lengths(PROMPTS), Objects)
    ol.vectorize(length, signature="(),()->()", excluded=["extra"], concurrency=4, on_error="return", fail_fast=True)
    ol.vectorize.batched(lambda texts: [len(text) for text in texts], size=16)(["a"])
    ol.vectorize(Speaker().speak)(["a"])
    ol.vectorize(Speaker())("a")
    ol.vectorize(lambda text: str(text) + "!")(["a"])
    for index, value, done in lengths.stream(["a"]):
        assert_type(index, tuple[int, ...])
        assert_type(value, int)
        assert_type(done, bool)
    async for _, number, _ in lengths.stream(["a"]):
        assert_type(number, int)
    await lengths.acall(["a"])
    assert_type(lengths.plan(["a"]), ol.Plan)
    again = ol.vectorize(lengths)
    assert_type(again("a"), int)


async def async_functions() -> None:
    shouted = ol.vectorize(shout)
    assert_type(shouted("a"), str)
    assert_type(shouted(["a"]), Objects)
    for _, value, _ in shouted.stream("a"):
        assert_type(value, str)
    await shouted.acall("a")


async def models() -> None:
    model = ol.models.fake(temperature=0.5)
    assert_type(model("a"), str)
    assert_type(model("a", temperature=0, max_tokens=5, stop="x"), str)
    assert_type(model(["a", "b"]), Objects)
    assert_type(model("a", samples=3), Objects)
    assert_type(model(PROMPTS, samples=3), Objects)
    assert_type(model.complete("a"), ol.Completion)
    assert_type(model.complete(["a"]), Objects)
    assert_type(model.plan(["a"]), ol.Plan)
    for _, value, _ in model.stream("a"):
        assert_type(value, str)
    with model.stream("a") as stream:
        async for _, text, _ in stream:
            assert_type(text, str)
    for _, completion, _ in model.complete.stream("a"):
        assert_type(completion.finish_reason, str | None)
    answer: Any = await model.acall(["a"])
    lifted = ol.vectorize(model)
    assert_type(lifted("a"), str)
    assert_type(lifted(["a"]), Objects)
    model([{"role": "user", "content": "hi"}])
    print(answer)


@ol.elemwise
def decorated(text: str) -> str:
    return text


@ol.elemwise(on_error="missing", concurrency=2)
def with_options(text: str) -> str:
    return text


def layers() -> None:
    decorated(["a"])
    with_options("a")
    decorated.stream(["a"])
    keep: dict[str, Any] = {}
    ol.through(
        ol.vectorize(length), ol.cached(keep), ol.retried(3), ol.limited(ol.Limit(2)), ol.batched(4), ol.deduped(), ol.guarded
    )
    layer: ol.Layer = ol.tapped(lambda burst: print(len(burst)))
    ol.through(ol.models.fake(), layer)


def errors() -> None:
    try:
        ol.vectorize(length)(["a"])
    except ol.RowErrors as group:
        for index, error in group.errors.items():
            assert_type(index, tuple[int, ...])
            assert_type(error, Exception)
    with ol.cache.disabled(), ol.cache.at("folder"), ol.cache.refresh():
        ol.cache.clear()
    assert_type(ol.vote(["a"]), Any)


@ol.program
def tell(lm: ol.LM, topic: str, *, words: int = 5) -> ol.LM:
    with ol.user():
        lm += f"Tell me about {topic}."
    with ol.assistant():
        lm += ol.gen("story", max_tokens=words)
    return lm


@ol.program
async def asked(lm: ol.LM, topic: str) -> ol.LM:
    lm = await (lm + tell(topic))
    return lm + ol.user("And?") + ol.assistant(ol.select(["a", "b"], "x"))


class Teller:
    @ol.program
    def tell(self, lm: ol.LM, topic: str) -> ol.LM:
        return lm + topic


async def programs() -> None:
    model = ol.models.fake(chat=True)
    lm = model + tell("fish", words=3) + asked("birds") + Teller().tell("cats")
    assert_type(lm, ol.LM)
    assert_type(str(lm), str)
    assert_type(lm.fork(2), list[ol.LM])
    assert_type(await lm, ol.LM)
    assert_type(lm.set("x", 1).remove("x").retry().run(), ol.LM)
    for part in model.stream() + tell("fish"):
        assert_type(part, ol.Part)
        assert_type(part.delta, str)
    async for text in (lm.stream() + tell("fish")).only("story"):
        assert_type(text, str)
    assert_type(model.run_batched([tell("a"), ol.user("b")]), list[Any])
    assert_type(await lm.async_run_batched([tell("a")], on_error="return"), list[Any])
    ol.vectorize(tell)(model, ["a", "b"])
    ol.captures([lm], "story")
    ol.to_frame([lm])
    lm += "Q: " + ol.gen("q") + ol.json("j", schema=dict) + ol.capture(ol.regex("a"), "r") + ol.user(ol.image(b""))
    with ol.capture("all", list_append=True):
        lm += "text"
    tell(5)  # type: ignore[arg-type]


def streams() -> None:
    stream = ol.models.fake().stream(["a", "b"])
    assert_type(stream, ol.Stream[ol.Snapshot[str]])
    for index, text in stream | ol.deltas:
        assert_type(index, tuple[int, ...])
        assert_type(text, str)
    assert_type(stream | ol.take(3) | ol.chunks(2), ol.Stream[list[Any]])
    assert_type(ol.map_values(stream, len) | ol.finished, ol.Stream[tuple[tuple[int, ...], Any]])
    stream | ol.stop_when(lambda text: "x" in text) | ol.until_decided | ol.first(2) | ol.collect
    one, two = ol.tee(stream)
    ol.merge(one, name=two) | ol.timeout(idle=3) | list
    ol.pipe(length, str, ol.models.fake())(["a"])


async def awaited_streams() -> None:
    async with ol.models.fake().stream(["a"]) as stream:
        async for _, text in stream | ol.lines:
            assert_type(text, str)
        await ol.acollect(stream)
