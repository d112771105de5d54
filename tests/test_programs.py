"""Programs: what they say, what runs, how often, and what is refused."""

import asyncio
import dataclasses
import re
import threading
import time

import pytest

import outlines_like as ol
from tests.backends import endless, within

WORDS = "alpha beta"


class Counted:
    """A fake whose answers name their number, and that counts them."""

    def __init__(self, **settings):
        self.asked = []
        self.model = ol.models.fake(self.answer, **settings)

    def answer(self, request):
        self.asked.append(request)
        return f"[{len(self.asked)}]"

    @property
    def runs(self):
        return len(self.asked)


@pytest.fixture
def counted():
    return Counted()


@pytest.fixture
def echo():
    """A raw text model that repeats the last word, in capitals."""
    return ol.models.fake(lambda request: request.text.split(" ")[-1].upper())


@pytest.fixture
def chat():
    """A chat model that says how many turns it has read, and the last one in capitals."""
    return ol.models.fake(lambda request: f"{len(request.prompt)} {request.text.upper()}", chat=True)


@ol.program
def tell(lm, topic):
    with ol.user():
        lm += f"Tell me about {topic}."
    with ol.assistant():
        lm += ol.gen("story", max_tokens=60)
    return lm


# What a program says


def test_text_and_gens_continue_each_other(echo):
    lm = echo + "one two" + ol.gen("a") + " three" + ol.gen("b")
    assert str(lm) == "one twoTWO threeTHREE"
    assert (lm["a"], lm["b"], lm.captures) == ("TWO", "THREE", {"a": "TWO", "b": "THREE"})
    assert len(lm) == 21
    assert "a" in lm
    assert "c" not in lm
    assert (lm.get("c"), lm.get("c", 5), lm.get("a")) == (None, 5, "TWO")


def test_an_unknown_capture_says_which_there_are(echo):
    with pytest.raises(KeyError, match="no capture 'x'; it has 'a'"):
        (echo + "one" + ol.gen("a"))["x"]
    with pytest.raises(KeyError, match="it has none"):
        (echo + "one")["x"]


def test_adding_changes_nothing_that_was(echo):
    lm = echo + "one"
    more = lm
    more += " two"
    assert (str(lm), str(more)) == ("one", "one two")


def test_captures_can_be_set_and_removed(echo):
    lm = (echo + "one" + ol.gen("a")).set("b", [1, 2])
    assert lm.captures == {"a": "ONE", "b": [1, 2]}
    assert lm.remove("a").captures == {"b": [1, 2]}
    assert lm.captures == {"a": "ONE", "b": [1, 2]}


def test_a_list_grows_by_each_gen_and_inside_one_expression(counted):
    lm = counted.model + "x"
    for _ in range(3):
        lm += " " + ol.gen("n", list_append=True)
    assert lm["n"] == ["[1]", "[2]", "[3]"]
    assert lm.text("n") == ["[1]", "[2]", "[3]"]
    inside = counted.model + (
        ol.gen("n", list_append=True) + " " + ol.gen("n", list_append=True) + ol.gen("n", list_append=True)
    )
    assert inside["n"] == ["[4]", "[5]", "[6]"]


def test_a_capture_of_an_expression_starts_and_ends_with_it(echo):
    lm = echo + "go " + ol.capture("<cap>" + ol.gen("inner") + "</cap>", "outer") + " after"
    assert lm.captures == {"inner": "<CAP>", "outer": "<cap><CAP></cap>"}
    assert str(lm) == "go <cap><CAP></cap> after"


def test_a_capture_of_a_program_holds_all_that_it_says(echo):
    @ol.program
    def tagged(lm, tag):
        return lm + f"<{tag}> x" + ol.gen("inner") + f"</{tag}>"

    lm = echo + ol.capture(tagged("b"), "all") + "!"
    assert lm["all"] == "<b> xX</b>"


def test_a_capture_block_is_not_changed_by_what_follows(echo):
    lm = echo + "before "
    with ol.capture("block"):
        lm += "open text"
        assert lm["block"] == "open text"
        lm += " a" + ol.gen()
    after = lm + " more"
    assert lm["block"] == after["block"] == "open text aA"
    assert str(after) == "before open text aA more"


def test_capture_blocks_nest_and_append(echo):
    lm = echo
    for word in ("one", "two"):
        with ol.capture("outer"), ol.capture("inner", list_append=True):
            lm += word
    assert lm.captures == {"inner": ["one", "two"], "outer": "two"}


def test_a_name_with_capitals_is_a_name(echo):
    assert (echo + "x" + ol.gen("CamelCaseName"))["CamelCaseName"] == "X"


def test_expressions_and_programs_pass_through_f_strings(echo):
    @ol.program
    def shout(lm, word):
        return lm + word.upper()

    lm = echo + f"a{ol.gen('x')} b {shout('hey')} c{ol.capture(ol.gen(), 'y')}"
    assert str(lm) == "aA b HEY cC"
    assert lm.captures == {"x": "A", "y": "C"}
    text = f"q{ol.gen('again')} "
    assert str(echo + text + text) == "qQ qQ "


def test_blocks_stamp_what_is_added_inside(chat):
    lm = chat
    with ol.system():
        lm += "Be brief."
    lm += tell("fish")
    with ol.user():
        lm += "And "
        lm += "birds?"
    lm += ol.assistant(ol.gen("more"))
    assert [(turn.role, turn.content) for turn in lm.messages] == [
        ("system", "Be brief."),
        ("user", "Tell me about fish."),
        ("assistant", "2 TELL ME ABOUT FISH."),
        ("user", "And birds?"),
        ("assistant", "4 AND BIRDS?"),
    ]
    assert str(lm).splitlines() == [turn.content for turn in lm.messages]


def test_each_block_is_a_turn_of_its_own(chat):
    lm = chat + ol.user("a") + ol.user("b") + ol.assistant(ol.gen("x")) + ol.assistant(ol.gen("y"))
    assert [(turn.role, turn.content) for turn in lm.messages] == [
        ("user", "a"),
        ("user", "b"),
        ("assistant", "2 B"),
        ("assistant", "3 2 B"),
    ]


def test_a_turn_goes_on_after_a_nested_program_of_the_same_block(chat):
    @ol.program
    def words(lm):
        return lm + " inner"

    with ol.user():
        lm = chat + "outer" + words() + " end"
    assert [turn.content for turn in lm.messages] == ["outer inner end"]


def test_methods_recursion_and_nested_programs(echo):
    class Story:
        def __init__(self, word):
            self.word = word

        @ol.program
        def tell(self, lm, times):
            return lm if not times else lm + f" {self.word}" + self.tell(times - 1)

    assert str(echo + Story("ho").tell(3) + "!") == " ho ho ho!"
    assert Story.tell.__name__ == "tell"
    assert tell.__doc__ is None


def test_a_plain_function_may_return_a_building_block(echo):
    def ask(name):
        return f"{name}?" + ol.gen(name)

    assert (echo + "one " + ask("two") + " " + ask("three")).captures == {"two": "TWO?", "three": "THREE?"}


# What is refused, and where


def test_a_program_that_returns_nothing_says_so(echo):
    with pytest.raises(ol.errors.ProgramError, match="returned nothing; a program returns the lm that it built"):
        str(echo + ol.program(lambda lm: None)())
    with pytest.raises(ol.errors.ProgramError, match="returned str 'text'"):
        str(echo + ol.program(lambda lm: "text")())


def test_a_program_goes_on_from_what_it_was_given(echo):
    other = echo + "other"
    with pytest.raises(ol.errors.ProgramError, match="does not go on from the one it was given"):
        str(echo + ol.program(lambda lm: other)())


@pytest.mark.parametrize("thing", [tell, len, lambda lm: lm])
def test_what_was_not_called_says_so(echo, thing):
    with pytest.raises(TypeError, match=r"without being called; write `lm \+ .*\(...\)`"):
        echo + thing


@pytest.mark.parametrize("thing", [None, 5, ["a"], object()])
def test_what_is_no_expression_says_what_is(echo, thing):
    with pytest.raises(TypeError, match="add text, gen"):
        echo + thing


def test_a_raising_program_raises_each_time(echo):
    @ol.program
    def broken(lm):
        raise ValueError("no luck")

    for _ in range(2):
        with pytest.raises(ValueError, match="no luck"):
            str(echo + broken())


def test_a_role_in_a_building_block_without_an_lm_is_an_error(chat):
    def block():
        with ol.assistant():
            return ol.gen("x")

    with pytest.raises(RuntimeError, match=r"nothing was added to a program inside `with assistant\(\):`"):
        chat + block()


G02 = [
    (lambda lm: lm + ol.gen("x"), "gen.* stands outside all turns"),
    (lambda lm: lm + "text", "text stands outside all turns"),
    (lambda lm: lm + ol.user(ol.gen("x")), "turn of the user, but the model is the assistant"),
    (lambda lm: lm + ol.user("q") + ol.assistant(ol.gen("x") + ol.gen("y")), "this assistant turn has begun already"),
    (lambda lm: lm + ol.user("q") + ol.assistant("The answer is", ol.gen("y")), "this assistant turn has begun already"),
    (lambda lm: lm + ol.user("q") + ol.assistant(ol.select(["a"], "x") + "!" + ol.gen()), "gen.* a block of its own"),
]


@pytest.mark.parametrize(("build", "message"), G02)
def test_what_a_chat_model_cannot_do_is_refused_where_it_is_written(build, message):
    log = []
    with pytest.raises(ol.errors.ProgramError, match=message):
        build(ol.models.fake(chat=True, log=log) + "")
    assert log == []


def test_an_unfinished_turn_behind_a_program_is_refused_when_it_runs(chat):
    with ol.assistant():
        lm = chat + ol.program(lambda lm: lm + "The answer is")() + ol.gen("x")
    with pytest.raises(ol.errors.ProgramError, match="this assistant turn has begun already"):
        str(lm)


def test_a_model_that_takes_a_prefill_goes_on_in_a_turn():
    log = []
    model = ol.models.fake(lambda request: f"<{request.text}>", chat=True, prefill=True, log=log)
    lm = model + ol.user("q") + ol.assistant("The answer is " + ol.gen("x") + ", or " + ol.gen("y"))
    assert lm["x"] == "<The answer is >"
    assert lm["y"] == "<The answer is <The answer is >, or >"
    assert [turn.role for turn in lm.messages] == ["user", "assistant"]
    lm += ol.assistant(ol.gen("z"))
    assert lm["z"] == "<>"
    assert [turn.role for turn in log[-1][0].prompt] == ["user", "assistant", "assistant"]


def test_a_raw_model_knows_no_roles_and_no_images(echo):
    with pytest.raises(ol.errors.ProgramError, match=r"knows no roles; leave out user\(\)"):
        echo + ol.user("x")
    with pytest.raises(ol.errors.ProgramError, match="not images"):
        echo + ol.image(b"\x89PNG")


def test_a_wrong_parameter_is_refused_where_it_is_written(echo):
    with pytest.raises(TypeError, match="no parameter 'max_tokns'; did you mean 'max_tokens'"):
        echo + ol.gen("x", max_tokns=5)
    with pytest.raises(ValueError, match="empty string"):
        echo + ol.gen("x", stop="")
    with pytest.raises(ValueError, match="not a regular expression"):
        ol.gen("x", regex="(")
    with pytest.raises(TypeError, match="name of a capture"):
        ol.gen(5)
    with pytest.raises(ValueError, match="needs the name of the list"):
        ol.gen(list_append=True)


# What runs, and how often


def step(runs, word):
    """A program that says a word and counts that it ran."""

    @ol.program
    def said(lm):
        runs.append(word)
        return lm + word

    return said


def test_nothing_runs_before_it_is_read(counted):
    runs = []
    lm = counted.model + "x" + step(runs, "a")() + ol.gen("b")
    assert repr(lm) == "<lm of 'fake', not run>"
    assert (runs, counted.runs) == ([], 0)
    assert lm["b"] == "[1]"
    assert repr(lm) == "<lm of 'fake', run>"


def test_two_forks_of_a_prefix_of_100_steps_run_300_steps():
    """G01: a prefix runs once, whoever reads first."""
    counted = Counted()
    lm = counted.model + "x"
    for _ in range(100):
        lm += ol.gen("n", list_append=True)
    forks = lm.fork(2)
    for i in range(2):
        for _ in range(100):
            forks[i] += ol.gen("n", list_append=True)
    asyncio.run(both(*forks))
    assert counted.runs == 300
    first, second = forks[0]["n"], forks[1]["n"]
    assert first[:100] == second[:100] == lm["n"]
    assert not set(first[100:]) & set(second[100:])
    assert counted.runs == 300


async def both(*lms):
    await asyncio.gather(*(read(lm) for lm in lms))


async def read(lm):
    return str(await lm)


def test_a_chain_read_backwards_runs_each_part_once(counted):
    """G01: the same values wherever they are read."""
    one = counted.model + "x" + ol.gen("foo")
    two = one + ol.gen("bar")
    three = two + ol.gen("baz")
    assert three["bar"] == two["bar"] == "[2]"
    assert one["foo"] == three["foo"] == "[1]"
    assert three["baz"] == "[3]"
    assert counted.runs == 3


def test_ten_awaits_of_one_lm_run_it_once(counted):
    lm = counted.model + "x" + ol.gen("a")

    async def many():
        return await asyncio.gather(*(lm.get_async("a") for _ in range(10)))

    assert asyncio.run(many()) == ["[1]"] * 10
    assert counted.runs == 1


def test_equal_nodes_are_draws_of_their_own_and_a_rerun_replays_them():
    def run():
        counted = Counted()
        lm = counted.model + "x"
        texts = [(lm + tell_raw())["a"] for _ in range(10)]
        forked = [fork["b"] for fork in [fork + ol.gen("b") for fork in lm.fork(3)]]
        return texts + forked, counted.runs

    @ol.program
    def tell_raw(lm):
        return lm + ol.gen("a")

    first, paid = run()
    again, paid_again = run()
    assert len(set(first)) == 13
    assert (again, paid, paid_again) == (first, 13, 0)


def test_draws_do_not_depend_on_the_order_of_reading():
    def run(order):
        model = ol.models.fake(lambda request: request.terms.scope)
        lms = [model + "x" + ol.gen("a") for _ in range(5)]
        for i in order:
            str(lms[i])
        return [lm["a"] for lm in lms]

    with ol.cache.disabled():
        assert run([0, 1, 2, 3, 4]) == run([4, 2, 0, 1, 3])


def test_draws_belong_to_arguments_whatever_else_there_is():
    """A client has no stable text; the word beside it has."""
    model = ol.models.fake(lambda request: request.terms.scope)

    @ol.program
    def ask(lm, client, word):
        return lm + word + ol.gen("a")

    def answers(words):
        return [lm["a"] for lm in fresh(model).run_batched([ask(object(), word) for word in words])]

    with ol.cache.disabled():
        one, two = answers("ab"), answers("ba")
    assert one == two[::-1]


def fresh(model):
    """The same model, of which no program has been made."""
    return model.layered()


def test_at_temperature_zero_equal_requests_are_one(counted):
    lms = [counted.model + "x" + ol.gen("a", temperature=0) for _ in range(5)]
    assert {lm["a"] for lm in lms} == {"[1]"}
    assert counted.runs == 1


def test_a_failed_node_stays_failed_and_its_siblings_are_unharmed():
    down = [True]
    counted = Counted(
        fail=lambda request: ol.errors.ServerError("down") if down[0] and "b" in request.text else None, retries=0
    )
    prefix = counted.model + "x" + ol.gen("p")
    bad, good = prefix + "b" + ol.gen("y"), prefix + "c" + ol.gen("z")
    below = bad + "more"
    for lm in (bad, bad, below):
        with pytest.raises(ol.errors.ServerError, match="down"):
            str(lm)
    assert good["z"] == "[2]"
    down[0] = False
    with pytest.raises(ol.errors.ServerError):
        str(below)
    assert below.retry()["y"] == "[3]"
    assert str(below.retry()) == "x[1]b[3]more"
    assert counted.asked[0].text == "x"


def test_a_failing_step_does_not_run_its_prefix_again(counted):
    runs = []

    @ol.program
    def boom(lm):
        runs.append("boom")
        raise ValueError("boom")

    ok = counted.model + step(runs, "ok")()
    bad = ok + boom()
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            str(bad)
    assert str(ok + step(runs, "sibling")()) == "oksibling"
    assert runs == ["ok", "boom", "sibling"]


def broken(request):
    """The error of whoever is asked for what is bad."""
    return ol.errors.AccessError("bad") if "bad" in request.text else None


@pytest.mark.parametrize("wrapped", [False, True], ids=["bare", "in a program"])
async def test_what_was_captured_before_a_step_that_failed_can_be_read(wrapped):
    """Text, and captures that the failed step or a later one might have written, raise."""
    counted = Counted(fail=broken)

    def body(lm):
        lm = (lm + "x" + ol.capture(ol.gen("a"), "block")).set("given", 1)
        return (lm + "bad" + ol.gen("b", save_stop_text=True) + ol.gen("c")).set("d", 2)

    lm = counted.model + ol.program(body)() if wrapped else body(counted.model + "")
    for name, value in [("a", "[1]"), ("block", "[1]"), ("given", 1)]:
        assert lm[name] == await lm.get_async(name) == lm.get(name) == value
        assert name in lm
    for name in ("b", "b_stop_text", "c", "d", "other"):
        for read in (lm.__getitem__, lm.get, lm.__contains__, lm.text):
            with pytest.raises(ol.errors.AccessError):
                read(name)
        with pytest.raises(ol.errors.AccessError):
            await lm.get_async(name)
    for read in (lambda: str(lm), lambda: lm.captures, lambda: lm.messages):
        with pytest.raises(ol.errors.AccessError):
            read()
    assert counted.runs == 1


def test_a_capture_that_a_failed_step_would_have_changed_is_not_given():
    """A list that lacks its last item, a draft that was to be mended: no stale value passes for the whole."""
    counted = Counted(fail=broken)
    listed = counted.model + "x" + ol.gen("list", list_append=True) + "bad" + ol.gen("list", list_append=True)
    redone = counted.model + "y" + ol.gen("draft") + "bad" + ol.gen() + ol.gen("draft")
    unknown = counted.model + "z" + ol.gen("a") + "bad" + ol.gen() + ol.program(lambda lm: lm.set("a", 1))()
    for lm, name in [(listed, "list"), (redone, "draft"), (unknown, "a")]:
        with pytest.raises(ol.errors.AccessError):
            lm[name]


def test_usage_counts_tokens_requests_and_what_was_stored():
    counted = Counted()
    lm = counted.model + "one two" + ol.gen("a") + ol.gen("b")
    assert lm.usage == (4, 2, 0, 2)


def test_stored_answers_count_as_cached():
    def run():
        return (ol.models.fake() + "one two" + ol.gen("a")).usage

    assert run() == (2, 2, 0, 1)
    assert run() == (2, 2, 4, 0)


def test_programs_that_wait_together_go_out_as_one_call():
    """Five programs of two gens each reach the backend as two calls of five rows."""
    calls = []

    async def run(rows):
        calls.append([row.text for row in rows])
        yield [ol.Event(i, ol.Completion(f"<{row.text}>", "stop")) for i, row in enumerate(rows)]

    model = ol.models.Model("own", run, endpoint="here", defaults={})
    lms = model.run_batched([f"{word}" + ol.gen("a") + " " + ol.gen("b") for word in "vwxyz"])
    assert [lm["b"] for lm in lms] == [f"<{word}<{word}> >" for word in "vwxyz"]
    assert calls == [list("vwxyz"), [f"{word}<{word}> " for word in "vwxyz"]]


def test_text_and_roles_cost_no_request():
    log = []
    lm = ol.models.fake(chat=True, log=log) + ol.system("a") + ol.user("b", "c") + ol.assistant("d")
    assert str(lm) == "a\nbc\nd"
    assert log == []


# Many at once


def test_a_batch_keeps_its_order(chat):
    lms = chat.run_batched([tell(word) for word in ("fish", "birds", "cats")])
    assert [lm["story"] for lm in lms] == [f"1 TELL ME ABOUT {word}." for word in ("FISH", "BIRDS", "CATS")]


def test_one_failure_in_a_batch_loses_nothing(echo):
    @ol.program
    def half(lm, n):
        if n == 1:
            raise ValueError("odd")
        return lm + f"{n}"

    with pytest.raises(ol.RowErrors, match="1 of 3 programs failed") as caught:
        echo.run_batched([half(n) for n in range(3)])
    assert [str(lm) for lm in caught.value.partial[::2]] == ["0", "2"]
    assert list(caught.value.errors) == [(1,)]
    lms = echo.run_batched([half(n) for n in range(3)], on_error="return")
    assert (str(lms[0]), repr(lms[1]), str(lms[2])) == ("0", "ValueError('odd')", "2")
    assert echo.run_batched([half(1)], on_error="missing") == [None]
    assert echo.run_batched([]) == []
    with pytest.raises(ValueError, match="on_error='no'"):
        echo.run_batched([], on_error="no")


def test_at_most_so_many_programs_are_alive(echo):
    alive, most, lock = 0, 0, threading.Lock()

    @ol.program
    def slow(lm, n):
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)
        text = (lm + f"{n}" + ol.gen("a"))["a"]
        with lock:
            alive -= 1
        return lm + text

    echo.run_batched([slow(n) for n in range(20)], concurrency=3)
    assert most <= 3


def test_programs_are_vectorized_over_any_shape(chat):
    lms = ol.vectorize(tell)(chat, [["a", "b"], ["c", None]])
    assert lms.shape == (2, 2)
    stories = ol.captures(lms, "story")
    assert stories.tolist() == [["1 TELL ME ABOUT A.", "1 TELL ME ABOUT B."], ["1 TELL ME ABOUT C.", None]]
    assert isinstance(ol.vectorize(tell)(chat, "a"), ol.LM)
    assert ol.captures(ol.vectorize(tell)(chat, "a"), "story") == "1 TELL ME ABOUT A."
    assert ol.vectorize(tell)(chat, ["a"], samples=2).shape == (1, 2)
    failed = ol.vectorize(ol.program(lambda lm, n: 1 / n), on_error="return")(chat, [0])
    assert isinstance(failed[0], ZeroDivisionError)


def test_programs_become_a_table(chat):
    lms = chat.run_batched([tell("a"), tell("b")])
    frame = ol.to_frame([lms[0], lms[1].set("extra", 1), None])
    assert list(frame.columns) == ["story", "extra", "text"]
    assert frame["story"].tolist()[:2] == ["1 TELL ME ABOUT A.", "1 TELL ME ABOUT B."]
    assert frame["text"].tolist()[0] == "Tell me about a.\n1 TELL ME ABOUT A."
    grid = ol.to_frame([[lms[0]], [lms[1]]])
    assert grid["axis_0"].tolist() == [0, 1]


# Answers in a form


@dataclasses.dataclass
class Animal:
    name: str
    legs: int


def answering(text, **settings):
    return ol.models.fake(lambda request: text, **settings)


def test_select_gives_one_of_its_options():
    assert (answering("quite bad") + ol.capture(ol.select(["bad", "quite bad"]), "v"))["v"] == "quite bad"
    assert (answering(" bad\n") + ol.select(["bad", "quite bad"], "v"))["v"] == "bad"
    with pytest.raises(ol.errors.MalformedError, match="'good' is none of 'bad', 'quite bad'"):
        str(answering("good") + ol.select(["bad", "quite bad"]))
    for wrong in ([], "abc", ["a", ""], [1]):
        with pytest.raises(ValueError, match="select takes a list of texts"):
            ol.select(wrong)


def test_an_answer_that_was_cut_says_what_to_do():
    """The text is not what the form wants because the limit cut it."""
    cut = ol.models.fake(lambda request: '{"n": 12, "m": 34}') + ol.json("j", schema=dict, max_tokens=1)
    with pytest.raises(ol.errors.MalformedError, match="cut by the limit of tokens: give max_tokens= more"):
        cut["j"]


def test_the_model_is_told_of_the_form():
    log = []
    model = ol.models.fake(lambda request: "12", log=log)
    lm = model + ol.select(["12"]) + ol.regex("[0-9]+", "n") + ol.gen(regex="[0-9]*") + ol.json("j", schema=int)
    assert (lm["n"], lm["j"], lm.text("j")) == ("12", 12, "12")
    sent = [request.params for batch in log for request in batch]
    assert sent == [{"choices": ["12"]}, {"regex": "[0-9]+"}, {"regex": "[0-9]*"}, {"json_schema": {"type": "integer"}}]


def test_regex_checks_all_of_the_answer():
    with pytest.raises(ol.errors.MalformedError, match="does not match"):
        str(answering("12a") + ol.regex("[0-9]+"))


def test_json_captures_the_parsed_object():
    text = '{"name": "cat", "legs": 4}'
    by_type = answering(text) + ol.json("a", schema=Animal)
    assert by_type["a"] == Animal("cat", 4)
    assert by_type.text("a") == text
    wanted = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
    assert (answering(text) + ol.json("a", schema=wanted))["a"] == {"name": "cat", "legs": 4}


def test_json_by_a_pydantic_model():
    pydantic = pytest.importorskip("pydantic")

    class Creature(pydantic.BaseModel):
        name: str
        legs: int

    lm = answering('{"name": "cat", "legs": 4}') + ol.json("a", schema=Creature)
    assert lm["a"] == Creature(name="cat", legs=4)


@pytest.mark.parametrize("text", ["no", '{"name": "cat"}', '{"name": "cat", "legs": "four"}', "[" * 100_000])
def test_json_that_is_not_as_the_schema_wants_it_is_an_error(text):
    with pytest.raises(ol.errors.MalformedError, match="not JSON as the schema wants it"):
        str(answering(text) + ol.json("a", schema=Animal))
    pytest.importorskip("jsonschema")
    schema = {"type": "object", "properties": {"legs": {"type": "integer"}}, "required": ["legs"]}
    with pytest.raises(ol.errors.MalformedError, match="not JSON as the schema wants it"):
        str(answering(text) + ol.json("a", schema=schema))


def test_a_model_that_cannot_keep_to_a_form_says_so_where_it_is_written():
    model = ol.models.Model("own", endless(), endpoint="here", defaults={})
    for make in (ol.select(["a"]), ol.regex("a"), ol.gen(regex="a"), ol.json(schema=int)):
        with pytest.raises(ol.errors.ProgramError, match="it can't keep an answer to that"):
            model + make


def test_a_server_is_told_of_forms_as_json():
    """It writes JSON objects only, so what is no object comes in one, and is taken out of it."""
    sent = []

    async def run(rows):
        sent.extend(row.params["response_format"]["json_schema"] for row in rows)
        answers = {"select": '{"answer": "b"}', "regex": ' {"answer": "12"}', "json": "[1, 2]", "plain": "b"}
        yield [ol.Event(i, ol.Completion(answers[row.text], "stop")) for i, row in enumerate(rows)]

    parameters = {"response_format": lambda name, value: value}
    model = ol.models.Model("own", run, endpoint="here", defaults={}, parameters=parameters)
    assert str(model + "select" + ol.select(["a", "b"], "x")) == "selectb"
    assert (model + "regex" + ol.regex("[0-9]+", "x"))["x"] == "12"
    assert (model + "json" + ol.json("x", schema=list[int]))["x"] == [1, 2]
    assert (model + "plain" + ol.select(["a", "b"], "x"))["x"] == "b"
    assert [told["name"] for told in sent] == ["boxed", "boxed", "answer", "boxed"]
    assert sent[0]["schema"]["properties"] == {"answer": {"type": "string", "enum": ["a", "b"]}}
    assert sent[1]["schema"]["properties"] == {"answer": {"type": "string", "pattern": "^(?:[0-9]+)$"}}
    assert sent[2]["schema"] == {"type": "array", "items": {"type": "integer"}}


def test_what_a_gen_stopped_at_can_be_kept():
    model = answering("one, two; three")
    lm = model + ol.gen("a", stop=[";", ","], save_stop_text=True) + "|" + ol.gen("b", stop=["."], save_stop_text="why")
    assert lm.captures == {"a": "one", "a_stop_text": ",", "b": "one, two; three", "why": None}
    lm = model + ol.gen("a", stop_regex="t[a-z]+", save_stop_text=True)
    assert lm.captures == {"a": "one, ", "a_stop_text": "two"}


def test_why_an_answer_ended_can_be_seen():
    lm = answering("one two three") + ol.gen("a", max_tokens=2) + ol.gen("b")
    assert [lm.completion(name).finish_reason for name in "ab"] == ["length", "stop"]
    with pytest.raises(ol.errors.ProgramError, match="'c' is no answer of a model's"):
        lm.set("c", 1).completion("c")


def test_a_log_probability_that_nobody_told_is_an_error(echo):
    with pytest.raises(ol.errors.ProgramError, match="gives no log-probability for 'a'"):
        (echo + "x" + ol.gen("a")).log_prob("a")


# Images and rendering

PNG = b"\x89PNG\r\n\x1a\n"


def test_images_are_pieces_of_a_turn(tmp_path):
    log = []
    model = ol.models.fake(lambda request: "a cat", chat=True, log=log)
    file = tmp_path / "cat.png"
    file.write_bytes(PNG)
    lm = (
        model
        + ol.user("What ", "is this?", ol.image(file), "And", ol.image("https://example.org/b.jpg"))
        + ol.assistant(ol.gen("a"))
    )
    assert lm["a"] == "a cat"
    content = log[0][0].prompt[0].content
    assert [piece["type"] for piece in content] == ["text", "image_url", "text", "image_url"]
    assert content[0]["text"] == "What is this?"
    assert content[1]["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="
    assert str(lm) == "What is this?And\na cat"


def test_images_are_refused_where_they_are_none():
    with pytest.raises(ValueError, match="give a file as pathlib"):
        ol.image("/etc/passwd")
    with pytest.raises(ValueError, match="begin like none of them"):
        ol.image(b"hello")
    with pytest.raises(TypeError, match="not int"):
        ol.image(5)


def test_a_notebook_shows_roles_and_marks_what_was_generated():
    model = answering("<b>bold</b>", chat=True)
    page = (model + ol.user("<script>alert(1)</script>", ol.image(PNG)) + ol.assistant(ol.gen('n"ame')))._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert ">user</div>" in page
    assert re.search(r'<span style="[^"]*" title="n&quot;ame">&lt;b&gt;bold&lt;/b&gt;</span>', page)
    assert '<img src="data:image/png;base64,' in page


# Threads


def test_blocking_programs_run_side_by_side(echo):
    """20 programs that each wait for all others to have begun: one after the other they would never end."""
    gate = threading.Barrier(20)

    @ol.program
    def meet(lm, n):
        gate.wait(5)
        return lm + f"{n}"

    lms = within(lambda: echo.run_batched([meet(n) for n in range(20)]))
    assert [str(lm) for lm in lms] == [str(n) for n in range(20)]


def test_20_programs_that_block_for_a_fifth_of_a_second_take_about_that(echo):
    @ol.program
    def block(lm):
        time.sleep(0.2)
        return lm + "z"

    start = time.perf_counter()
    echo.run_batched([block() for _ in range(20)])
    assert time.perf_counter() - start < 1.0


def test_50_nested_programs_that_each_read_do_not_deadlock(echo):
    @ol.program
    def nested(lm, depth):
        if not depth:
            return lm + "."
        inner = lm + nested(depth - 1)
        assert str(inner)
        return inner + str(depth)

    text = within(lambda: str(echo + nested(50)))
    assert text == "." + "".join(str(depth) for depth in range(1, 51))


def test_a_thread_inside_a_program_may_read(echo):
    @ol.program
    def threaded(lm):
        found = []
        thread = threading.Thread(target=lambda: found.append(str(lm + "x" + ol.gen("a"))))
        thread.start()
        thread.join(5)
        return lm + found[0]

    assert within(lambda: str(echo + threaded())) == "xX"


def test_exits_and_interrupts_of_a_program_reach_the_caller(echo):
    @ol.program
    def leave(lm):
        raise SystemExit(3)

    with pytest.raises(SystemExit, match="3"):
        str(echo + leave())
    assert str(echo + "x" + ol.gen()) == "xX"


def test_context_variables_travel_into_programs():
    counted = Counted()

    @ol.program
    def ask(lm):
        return lm + ol.gen("a", max_tokens=1)

    with ol.cache.disabled():
        unstored = counted.model + "x" + ask()
    assert unstored["a"] == "[1]"
    assert counted.asked[0].terms.mode == "disabled"


@pytest.mark.parametrize("name", [slice(0, 2), 0, None], ids=str)
def test_captures_are_read_by_name_and_nothing_runs_for_what_is_none(name):
    counted = Counted()
    lm = counted.model + "x" + ol.gen("a")
    for read in (lm.__getitem__, lm.get, lm.__contains__, lm.text, lm.remove, lambda name: lm.set(name, 1)):
        with pytest.raises(TypeError, match=r"the name of a capture is text, not .*; all text so far is str"):
            read(name)
    assert counted.runs == 0


def test_a_program_grows_on_the_right():
    model = ol.models.fake()
    with pytest.raises(TypeError, match=r"'x' . lm: a program grows on the right"):
        "x" + (model + "y")
    with pytest.raises(TypeError, match=r"'x' . model: a program begins with its model"):
        "x" + model
    with pytest.raises(TypeError, match=r"0 . lm: a program grows on the right"):
        sum([model + "y"])


@pytest.mark.parametrize(
    ("given", "said"),
    [({"concurrency": 0}, "concurrency=0; it takes"), ({"on_error": "stop"}, "on_error='stop'; it is one of")],
)
async def test_a_batch_that_can_t_be_run_so_is_refused_before_anything_is_sent(given, said):
    counted = Counted()
    lm = counted.model + "x"
    with pytest.raises(ValueError, match=said):
        lm.run_batched([ol.gen("a")], **given)
    with pytest.raises(ValueError, match=said):
        await lm.async_run_batched([ol.gen("a")], **given)
    assert counted.runs == 0


def test_a_program_is_forked_a_number_of_times():
    lm = ol.models.fake() + "x"
    assert lm.fork(0) == []
    with pytest.raises(ValueError, match="n=-1; it takes a whole number of at least 0"):
        lm.fork(-1)
