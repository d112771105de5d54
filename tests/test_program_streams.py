"""Programs that are watched: what each snapshot holds, and what leaving does."""

import asyncio
import random
import threading
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import outlines_like as ol
from tests.backends import endless, within


@pytest.fixture
def model():
    """Three words for an answer, named by the length of the prompt."""
    return ol.models.fake(lambda request: f"w{len(request.text)} and more")


def own(run, **settings):
    """A model with a bare backend."""
    return ol.models.Model("own", run, endpoint="here", defaults={}, **settings)


@ol.program
def inner(lm, word):
    return lm + f"{word}: " + ol.gen("inner") + " "


@ol.program
def outer(lm):
    lm += "begin " + ol.gen("outer") + " "
    lm += inner("one")
    return lm + ol.gen("list", list_append=True) + " " + ol.gen("list", list_append=True)


@ol.program
def reading(lm):
    """Reads on its way."""
    lm += "A" + ol.gen("a")
    if lm["a"]:
        lm += "B"
    lm += inner("two")
    assert lm["inner"]
    with ol.capture("block"):
        lm += "C" + ol.gen("c") + "D"
    return lm.set("set", 1).remove("a")


@ol.program
async def awaiting(lm):
    lm += "A" + ol.gen("a")
    await lm
    lm += inner(lm["a"][:2])
    await lm.get_async("inner")
    return lm + "end"


@ol.program
def empty(lm):
    return lm


def check(snapshots, eager):
    """The laws of a stream."""
    assert [seen.done for seen in snapshots] == [False] * (len(snapshots) - 1) + [True]
    last = snapshots[-1]
    assert (last.text, dict(last.captures), last.open) == (str(eager), eager.captures, None)
    assert "".join(seen.delta for seen in snapshots) == last.text
    for one, two in pairwise(snapshots):
        assert two.text == one.text + two.delta
        assert two.text.startswith(one.text)
    finished = snapshots[:-1]  # what a program removes at its end was finished before
    for one, two in pairwise(finished):
        assert set(one.captures) <= set(two.captures)
        for name, value in one.captures.items():
            if isinstance(value, list):
                assert two.captures[name][: len(value)] == value


PROGRAMS = [outer, reading, awaiting, empty, lambda: inner("x") + inner("y"), lambda: ol.gen("one"), lambda: ""]


@pytest.mark.parametrize("made", PROGRAMS, ids=["outer", "reading", "awaiting", "empty", "sum", "gen", "nothing"])
@pytest.mark.parametrize("prefix", ["", "prefix "])
def test_the_laws_hold_for_for_and_async_for(model, made, prefix):
    """G05: joined deltas are the text, the last snapshot is the eager result, and nothing is taken back."""
    with ol.cache.disabled():
        eager = model + prefix + made()
        str(eager)
        check(list(model.program.grown(prefix).stream() + made()), eager)
        check(list((model + prefix + made()).stream()), eager)

        async def watch():
            return [seen async for seen in (model + prefix).stream() + made()]

        check(asyncio.run(watch()), eager)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(["text", "gen", "append", "block", "program", "set"]), max_size=8), st.integers(0, 99))
def test_the_laws_hold_for_any_program(steps, seed):
    model = ol.models.fake(lambda request: f"w{len(request.text)} and more")

    @ol.program
    def built(lm):
        chosen = random.Random(seed)
        for i, step in enumerate(steps):
            lm = grown(lm, step, i)
            if chosen.random() < 0.3:
                str(lm)
        return lm

    def grown(lm, step, i):
        if step == "block":
            with ol.capture(f"block{i % 2}"):
                lm += "in" + ol.gen()
            return lm
        if step == "set":
            return lm.set("set", i)
        lm += {
            "text": f"text{i}",
            "gen": ol.gen(f"g{i}"),
            "append": ol.gen("list", list_append=True),
            "program": inner(str(i)),
        }[step]
        return lm

    with ol.cache.disabled():
        eager = model + built()
        str(eager)
        check(list(model.stream() + built()), eager)


def test_captures_come_while_they_are_made(model):
    """G05: outer and nested captures so far, the open one marked and growing."""
    seen = [(dict(part.captures), part.open) for part in model.stream() + outer()]
    opens = [(name.name, name.text) for _, name in seen if name]
    assert opens[:5] == [("outer", "w6"), ("outer", "w6 and"), ("inner", "w23"), ("inner", "w23 and"), ("list", "w36")]
    nested = next(captures for captures, name in seen if name and name.name == "inner")
    assert nested == {"outer": "w6 and more"}
    assert seen[-1] == (
        {"outer": "w6 and more", "inner": "w23 and more", "list": ["w36 and more", "w49 and more"]},
        None,
    )


def test_a_list_grows_during_a_stream(model):
    program = ol.gen("n", list_append=True) + ol.gen("n", list_append=True) + ol.gen("n", list_append=True)
    sizes = [len(part.captures.get("n", ())) for part in model.stream() + program]
    assert sizes == sorted(sizes)
    assert set(sizes) == {0, 1, 2, 3}


def test_a_capture_block_is_open_until_it_ends(model):
    lm = model.program
    with ol.capture("block"):
        lm += "a" + ol.gen()
    lm += "b" + ol.gen()
    seen = [(part.open, dict(part.captures)) for part in lm.stream()]
    assert (("block", "a"), {}) in seen
    assert (("block", "aw1 and"), {}) in seen
    assert (None, {"block": "aw1 and more"}) in seen


def test_what_may_still_be_cut_is_not_shown():
    model = ol.models.fake(lambda request: "one stop here")
    parts = list(model.stream() + ol.gen("a", stop=["stop here"], save_stop_text=True))
    assert parts[-1].text == "one "
    assert "one stop" not in [part.text for part in parts]
    parts = list(model.stream() + ol.gen("a", stop_regex="e st"))
    assert [part.text for part in parts] == ["on"]


def test_a_choice_is_shown_when_it_is_made():
    model = ol.models.fake(lambda request: "item two")
    parts = list(model.stream() + "x " + ol.select(["item one", "item two"], "s") + "")
    assert list(dict.fromkeys(part.text for part in parts)) == ["x ", "x item two"]
    assert parts[-1].captures["s"] == "item two"


def test_only_one_capture(model):
    watched = (model.stream() + outer()).only("inner")
    assert list(watched) == ["w23", "w23 and", "w23 and more"]

    async def watch():
        return [text async for text in (model.stream() + outer()).only("list")]

    assert asyncio.run(watch()) == ["w36 and more", "w49 and more"] or asyncio.run(watch())[-1] == "w49 and more"


def test_iterating_again_tells_again_and_runs_once():
    log = []
    watched = ol.models.fake(log=log).stream() + "a b" + ol.gen("x")
    first, second = list(watched), list(watched)
    assert len(log) == 1
    assert second[-1].text == first[-1].text
    assert str(watched.lm) == first[-1].text
    assert len(log) == 1


def test_nothing_runs_until_it_is_iterated():
    log = []
    watched = ol.models.fake(log=log).stream() + "a" + ol.gen("x")
    assert log == []
    assert next(iter(watched)).text == "a"


def test_an_error_comes_after_the_pieces_before_it(model):
    @ol.program
    def broken(lm):
        lm += "good " + ol.gen("a")
        assert lm["a"]
        raise ValueError("no luck")

    seen = []

    def look():
        for part in model.stream() + broken():
            seen.append(part.text)

    with pytest.raises(ValueError, match="no luck"):
        look()
    assert seen[-1].startswith("good w5 and")
    with pytest.raises(ValueError, match="no luck"):
        list(model.stream() + "x" + ol.gen() + broken())


@pytest.mark.parametrize("leave", ["break", "close", "with"])
def test_leaving_early_ends_the_request(leave):
    closed = threading.Event()

    def look():
        watched = own(endless(closed=closed)).stream() + "x" + inner("y")
        if leave == "with":
            with watched:
                for part in watched:
                    if "one" in part.delta:
                        return
        for part in watched:
            if "one" in part.delta:
                break
        if leave == "close":
            watched.close()

    within(look)
    assert closed.wait(5)


def test_leaving_an_async_watch_early_ends_the_request():
    closed = threading.Event()

    async def look():
        async for part in own(endless(closed=closed)).stream() + "x" + inner("y"):
            if "one" in part.delta:
                break

    within(lambda: asyncio.run(look()))
    assert closed.wait(5)


def test_one_reader_who_leaves_takes_nothing_from_the_other():
    """Two watch one program; the first leaves; the request goes on until the second has gone too."""
    closed = threading.Event()
    lm = own(endless(closed=closed)) + "x" + ol.gen("a")

    def look():
        one, two = iter(lm.stream()), iter(lm.stream())
        first = next(part for part in one if part.text == "xone two")
        assert next(part for part in two if part.text == "xone two").text == first.text
        one.close()
        assert not closed.is_set()
        two.close()

    within(look)
    assert closed.wait(5)


def test_a_run_that_all_have_left_begins_afresh_when_it_is_read_again():
    log, gate = [], threading.Event()

    async def run(rows):
        log.append(rows[0].text)
        yield [ol.Event(0, ol.Completion("one"), False)]
        while not gate.is_set():
            await asyncio.sleep(0.001)
        yield [ol.Event(0, ol.Completion("one two", "stop"))]

    lm = own(run) + "x" + ol.gen("a")
    for part in lm.stream():
        if part.open:
            break
    gate.set()
    assert within(lambda: lm["a"]) == "one two"
    assert log == ["x", "x"]


def test_a_late_reader_sees_the_present_and_what_follows():
    gate = threading.Event()

    async def run(rows):
        yield [ol.Event(0, ol.Completion("one"), False)]
        yield [ol.Event(0, ol.Completion("one two"), False)]
        while not gate.is_set():
            await asyncio.sleep(0.001)
        yield [ol.Event(0, ol.Completion("one two three", "stop"))]

    lm = own(run) + "x" + ol.gen("a")

    def look():
        first = iter(lm.stream())
        next(part for part in first if part.text == "xone two")
        late = iter(lm.stream())
        texts = [next(late).text, next(late).text]
        gate.set()
        return texts + [part.text for part in late], [part.text for part in first]

    late, first = within(look)
    assert late == ["x", "xone two", "xone two three"]
    assert first == ["xone two three"]


def test_a_try_that_is_given_up_is_an_error_only_where_it_was_shown():
    model = ol.models.fake(lambda request: request.terms.scope + " x")

    @ol.program
    def hasty(lm):
        for _ in range(2):
            attempt = lm
            attempt += ol.gen("a")
            assert attempt["a"]
        return attempt

    @ol.program
    def careful(lm):
        attempts = [lm + ol.gen("a") for _ in range(2)]
        return max(attempts, key=lambda attempt: attempt["a"])

    with ol.cache.disabled():
        assert (model + hasty())["a"]
        with pytest.raises(ol.errors.ProgramError, match=r"write `attempt = lm \+ ...`"):
            list(model.stream() + hasty())
        eager = model + careful()
        check(list(eager.stream()), eager)


def test_roles_and_blocks_stream_as_they_run():
    chat = ol.models.fake(lambda request: f"turn {len(request.prompt)}", chat=True)

    @ol.program
    def talk(lm):
        with ol.user():
            lm += "hi"
        with ol.assistant():
            lm += ol.gen("a")
        with ol.user():
            lm += lm["a"] + "?"
        return lm + ol.assistant(ol.gen("b"))

    eager = chat + ol.system("s") + talk()
    parts = list((chat + ol.system("s")).stream() + talk())
    check(parts, eager)
    assert parts[-1].text == "s\nhi\nturn 2\nturn 2?\nturn 4"


def test_snapshots_cannot_be_changed(model):
    parts = list(model.stream() + outer())
    with pytest.raises(TypeError):
        parts[0].captures["x"] = 1
    with pytest.raises(AttributeError):
        parts[0].text = "x"
    assert str(parts[-1]) == parts[-1].text


def test_a_million_characters_stream_in_reasonable_time():
    """Two thousand snapshots of a long text: each is made from its parts, none is made twice."""
    model = ol.models.fake(lambda request: "word " * 2000)
    parts = list(model.stream() + "x" * 10_000 + ol.gen("a"))
    assert len(parts[-1].text) == 20_000
    assert "".join(part.delta for part in parts) == parts[-1].text


def test_a_read_that_is_given_up_holds_nothing_up():
    """A watched program that waits for an answer only so long, then goes on without it."""
    closed = threading.Event()

    async def silent(rows):
        try:
            await asyncio.Event().wait()
            yield []
        finally:
            closed.set()

    @ol.program
    async def impatient(lm):
        lm += "A"
        attempt = lm
        attempt += ol.gen("a")
        try:
            async with asyncio.timeout(0.05):
                await attempt
        except TimeoutError:
            return lm + " without"
        return attempt

    watched = own(silent).stream() + impatient()
    assert within(lambda: list(watched))[-1].text == "A without"
    assert closed.wait(5)


def test_what_was_read_is_shown_when_it_is_there():
    """The capture that a program waited for is told before what follows has come."""
    gate = threading.Event()

    @ol.program
    def pausing(lm):
        lm += "A" + ol.gen("a")
        assert lm["a"]
        gate.wait(10)
        return lm + "."

    def look():
        for part in ol.models.fake(lambda request: "x").stream() + pausing():
            if "a" in part.captures:
                gate.set()
        return part.text

    assert within(look) == "Ax."
