"""Programs with async code: whose loop runs what, and what waits for what."""

import asyncio
import itertools
import threading

import pytest

import outlines_like as ol
from tests.backends import endless, within


@pytest.fixture
def model():
    return ol.models.fake(lambda request: request.text[-1].upper())


def sync_leaf(lm, word):
    return lm + word + ol.gen()


async def async_leaf(lm, word):
    await asyncio.sleep(0)
    return lm + word + ol.gen()


def sync_round(leaf):
    def round_(lm, word):
        inner = lm + leaf(word)
        assert str(inner)
        return inner + "."

    return round_


def async_round(leaf):
    async def round_(lm, word):
        inner = await (lm + leaf(word))
        assert str(inner)
        return inner + "."

    return round_


MIXES = list(itertools.product("sa", repeat=3))


def mix(kinds):
    """A program in a program in a program, each sync or async."""
    leaf, middle, outside = kinds
    program = ol.program(sync_leaf if leaf == "s" else async_leaf)
    for kind in (middle, outside):
        program = ol.program((sync_round if kind == "s" else async_round)(program))
    return program


@pytest.mark.parametrize("kinds", MIXES, ids="".join)
@pytest.mark.parametrize("entry", ["str", "await", "foreign", "stream", "async stream", "batch", "async batch"])
def test_sync_in_async_in_sync(model, kinds, entry):
    """All eight mixes, by each entry."""
    wanted = "alphaA.." + "betaA.."

    def build():
        program = mix(kinds)
        return program("alpha") + program("beta")

    async def awaited():
        return str(await (model + build()))

    async def foreign():
        return str(model + build())

    async def watched():
        return [part.text async for part in model.stream() + build()][-1]

    async def batched():
        return str((await model.async_run_batched([build()]))[0])

    entries = {
        "str": lambda: str(model + build()),
        "await": lambda: asyncio.run(awaited()),
        "foreign": lambda: asyncio.run(foreign()),
        "stream": lambda: list(model.stream() + build())[-1].text,
        "async stream": lambda: asyncio.run(watched()),
        "batch": lambda: str(model.run_batched([build()])[0]),
        "async batch": lambda: asyncio.run(batched()),
    }
    assert within(entries[entry]) == wanted


READS = {
    "str": str,
    "item": lambda lm: lm["a"],
    "get": lambda lm: lm.get("a"),
    "in": lambda lm: "a" in lm,
    "len": len,
    "text": lambda lm: lm.text("a"),
    "captures": lambda lm: lm.captures,
    "messages": lambda lm: lm.messages,
    "usage": lambda lm: lm.usage,
    "run": lambda lm: lm.run(),
    "batch": lambda lm: lm.run_batched(["x"]),
    "stream": lambda lm: list(lm.stream()),
    "html": lambda lm: lm._repr_html_(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("entry", ["str", "await"])
def test_a_blocking_accessor_inside_an_async_program_says_what_to_write(model, read, entry):
    @ol.program
    async def blocking(lm):
        read(lm + "x" + ol.gen("a"))
        return lm

    async def awaited():
        await (model + blocking())

    with pytest.raises(ol.errors.BlockingError, match="inside an async program; write `await lm`"):
        within(lambda: str(model + blocking()) if entry == "str" else asyncio.run(awaited()))


def test_what_has_run_may_be_read_anywhere(model):
    @ol.program
    async def polite(lm):
        lm = await (lm + "x" + ol.gen("a"))
        return lm + lm["a"] + str(lm)

    assert str(model + polite()) == "xXXxX"


def test_a_blocking_accessor_in_a_loop_of_ones_own_works(model):
    async def notebook():
        return (model + "x" + ol.gen("a"))["a"]

    assert within(lambda: asyncio.run(notebook())) == "X"


def test_blocking_the_loop_that_a_program_runs_in_is_an_error(model):
    """It would wait for itself."""

    async def main():
        gate = asyncio.Event()

        @ol.program
        async def waiting(lm):
            await gate.wait()
            return lm + "x"

        lm = model + waiting()
        reading = asyncio.ensure_future(lm.block_until_ready())
        while lm.running is None:
            await asyncio.sleep(0)
        with pytest.raises(ol.errors.BlockingError, match="blocks the event loop in which the program runs"):
            str(lm)
        gate.set()
        return str(await reading)

    assert within(lambda: asyncio.run(main())) == "x"


def test_an_async_program_runs_in_the_loop_of_who_awaits_it(model):
    """A client that the user opened there works."""

    class Client:
        def __init__(self):
            self.loop = asyncio.get_running_loop()

        async def fetch(self, word):
            assert asyncio.get_running_loop() is self.loop
            await asyncio.sleep(0)
            return word * 2

    @ol.program
    async def fetching(lm, client, word):
        return lm + await client.fetch(word) + ol.gen("a")

    @ol.program
    def outside(lm, client, word):
        return lm + "(" + fetching(client, word) + ")"

    async def main():
        client = Client()
        one = await (model + fetching(client, "ab"))
        many = await model.async_run_batched([outside(client, word) for word in "xyz"])
        lifted = await ol.vectorize(outside).acall(model, client, ["p", "q"])
        watched = [part.text async for part in model.stream() + outside(client, "w")]
        return str(one), [str(lm) for lm in many], [str(lm) for lm in lifted], watched[-1]

    assert within(lambda: asyncio.run(main())) == ("ababB", ["(xxX)", "(yyY)", "(zzZ)"], ["(ppP)", "(qqQ)"], "(wwW)")


def test_async_programs_run_side_by_side(model):
    """Each waits for all others to have begun."""

    async def main():
        gate = asyncio.Barrier(20)

        @ol.program
        async def meet(lm, n):
            await gate.wait()
            return lm + f"{n}"

        return [str(lm) for lm in await model.async_run_batched([meet(n) for n in range(20)])]

    assert within(lambda: asyncio.run(main())) == [str(n) for n in range(20)]


def test_one_failure_in_an_async_batch_loses_nothing(model):
    @ol.program
    async def half(lm, n):
        return lm + f"{6 // n}"

    async def main():
        return await model.async_run_batched([half(n) for n in (1, 0, 2)], on_error="return")

    one, error, two = asyncio.run(main())
    assert (str(one), type(error), str(two)) == ("6", ZeroDivisionError, "3")


def test_an_await_that_is_cancelled_ends_the_request():
    closed = threading.Event()
    model = ol.models.Model("own", endless(closed=closed), endpoint="here", defaults={})

    @ol.program
    async def asking(lm):
        return lm + "x" + ol.gen("a")

    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await (model + asking() + ol.gen())

    within(lambda: asyncio.run(main()))
    assert closed.wait(5)


def test_a_cancelled_await_cancels_an_async_program(model):
    ended = []

    @ol.program
    async def waiting(lm):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def main():
        reading = asyncio.ensure_future((model + waiting()).block_until_ready())
        await asyncio.sleep(0.05)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        while not ended:
            await asyncio.sleep(0)

    within(lambda: asyncio.run(main()))
    assert ended == [True]


def test_a_program_whose_loop_has_ended_runs_again_for_the_next_reader(model):
    runs = []

    @ol.program
    async def slow(lm):
        runs.append(asyncio.get_running_loop())
        if len(runs) == 1:
            await asyncio.Event().wait()
        return lm + "x"

    lm = model + slow()

    async def main():
        reading = asyncio.ensure_future(lm.block_until_ready())
        while not runs:
            await asyncio.sleep(0)
        reading.cancel()

    within(lambda: asyncio.run(main()))
    assert within(lambda: str(lm)) == "x"
    assert len(runs) == 2


def test_blocking_beside_an_await_of_the_same_gen_works():
    """Requests are made on the library's loop, so nothing waits for itself."""
    asked = threading.Event()

    async def run(rows):
        while not asked.is_set():
            await asyncio.sleep(0.001)
        yield [ol.Event(0, ol.Completion("x", "stop"))]

    lm = ol.models.Model("own", run, endpoint="here", defaults={}) + "a" + ol.gen("b")

    async def main():
        reading = asyncio.ensure_future(lm.get_async("b"))
        while lm.running is None:
            await asyncio.sleep(0)
        asked.set()
        return lm["b"], await reading

    assert within(lambda: asyncio.run(main())) == ("x", "x")
