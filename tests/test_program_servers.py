"""Programs on real models: SmolLM2 in a worker and behind a server, and the examples of the docs."""

import asyncio
import base64
import dataclasses
import importlib.util
import itertools
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import outlines_like as ol
from outlines_like.models.pools import Worker

EXAMPLES = Path(__file__).parent.parent / "examples"


def module(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"script_{path.stem}", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def example(name):
    """An example as a module."""
    return module(EXAMPLES / f"{name}.py")


@pytest.fixture
def web():
    """A server of images, each its number after PNG's first bytes, that also answers chat requests about them."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.reply("image/png", b"\x89PNG" + self.path.rpartition("/")[2].removesuffix(".png").encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            url = body["messages"][-1]["content"][1]["image_url"]["url"]
            number = base64.b64decode(url.partition(",")[2])[4:].decode()
            text = json.dumps({"subject": f"image {number}", "colors": ["red", "blue"], "people": int(number)})
            choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 10, "completion_tokens": 5}
            self.reply("application/json", json.dumps({"choices": [choice], "usage": usage}).encode())

        def reply(self, kind, body):
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    thread.join()
    server.server_close()


def test_ten_images_are_described_at_once(web, capsys):
    """The async document's example: the user's own client in their loop, JSON by a schema out."""
    address, asked = web
    model = ol.models.openai("gpt", base_url=f"{address}/v1", api_key="k")
    described = example("describe_images")
    lms = asyncio.run(described.main(model, [f"{address}/{n}.png" for n in range(10)]))
    assert [lm["description"] for lm in lms] == [described.Description(f"image {n}", ["red", "blue"], n) for n in range(10)]
    assert json.loads(lms[3].text("description")) == {"subject": "image 3", "colors": ["red", "blue"], "people": 3}
    assert lms[0].usage == (10, 5, 0, 1)
    assert len(asked) == 10
    assert asked[0]["temperature"] == 0
    assert asked[0]["response_format"]["type"] == "json_schema"
    assert [turn["role"] for turn in asked[0]["messages"]] == ["system", "user"]
    assert capsys.readouterr().out.splitlines()[3] == "3.png Description(subject='image 3', colors=['red', 'blue'], people=3)"


def test_a_server_that_takes_a_prefill_is_told_to_go_on(replay):
    asked = []

    async def main():
        from aiohttp import web as http

        async def answer(request):
            asked.append(await request.json())
            choice = {"index": 0, "message": {"role": "assistant", "content": "blue"}, "finish_reason": "stop"}
            return http.json_response({"choices": [choice]})

        app = http.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = http.AppRunner(app)
        await runner.setup()
        site = http.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        model = ol.models.openai("m", base_url=f"http://127.0.0.1:{port}/v1", api_key="k", prefill=True)
        lm = await (model + ol.user("Which color?") + ol.assistant("It is ", ol.gen("x"), " or ", ol.gen("y")))
        await runner.cleanup()
        return str(lm)

    assert asyncio.run(main()) == "Which color?\nIt is blue or blue"
    assert [body["messages"][-1]["content"] for body in asked] == ["It is ", "It is blue or "]
    assert all(body["continue_final_message"] and not body["add_generation_prompt"] for body in asked)


GREEDY = {"temperature": 0, "max_tokens": 8}


@ol.program
def ask(lm, question):
    with ol.user():
        lm += question
    with ol.assistant():
        lm += ol.gen("answer", **GREEDY)
    return lm


@pytest.fixture(params=["smollm2", "server"])
def model(request):
    """A real chat model."""
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    base_url, name = request.getfixturevalue("serve")
    return ol.models.openai(name, base_url=base_url, concurrency=2)


def test_a_program_asks_a_real_model_what_a_call_would(model):
    words = ["Name a color.", "Say hello."]
    lms = model.run_batched([ask(word) for word in words])
    assert [lm["answer"] for lm in lms] == model(words, **GREEDY).tolist()
    again = lms[0] + ask("And another?")
    turns = [{"role": turn.role, "content": turn.content} for turn in again.messages]
    assert again["answer"] == model(turns[:3], **GREEDY)
    assert again.usage.completion_tokens > 0


def test_a_real_model_is_watched(model):
    with ol.cache.disabled():
        parts = list(model.stream() + ask("Count to five.") + ask("Go on."))
        eager = model + ask("Count to five.") + ask("Go on.")
        assert (parts[-1].text, dict(parts[-1].captures), parts[-1].done) == (str(eager), eager.captures, True)
    assert "".join(part.delta for part in parts) == parts[-1].text
    assert any(part.open for part in parts)


def test_a_list_and_a_block_are_watched_as_they_grow_on_a_real_model(model):
    """A list has one more entry after each turn, and the last part is the eager result, with all captures."""

    @ol.program
    def thrice(lm):
        for word in ("a color", "an animal", "a fruit"):
            with ol.user():
                lm += f"Name {word}."
            with ol.assistant(), ol.capture("said"):
                lm += ol.gen("names", list_append=True, **GREEDY)
        return lm.set("count", 3)

    with ol.cache.disabled():
        parts, eager = list(model.stream() + thrice()), model + thrice()
        assert (parts[-1].text, dict(parts[-1].captures)) == (str(eager), dict(eager.captures))
    lists = [part.captures.get("names", []) for part in parts]
    assert [len(names) for names in lists] == sorted(len(names) for names in lists)
    assert {len(names) for names in lists} == {0, 1, 2, 3}
    assert all(names == lists[-1][: len(names)] for names in lists)
    assert (eager["said"], eager["count"]) == (lists[-1][-1], 3)


def test_an_error_in_a_program_reaches_who_watches_it_on_a_real_model(model):
    @ol.program
    def stumble(lm):
        lm += ol.user("Name a color.") + ol.assistant(ol.gen("color", **GREEDY))
        raise LookupError(f"not {lm['color']}")

    seen = []
    with pytest.raises(LookupError, match="not "):
        seen.extend(model.stream() + stumble())


def test_the_last_part_of_a_choice_is_one_of_the_options(smollm2):
    """And text that adds nothing changes nothing."""
    choice = ol.user("Which?") + ol.assistant(ol.select(["item1", "item2"], "x", temperature=0))
    ends = [[*(smollm2.stream() + program)][-1] for program in (choice, choice + "")]
    assert ends[0].captures["x"] in ("item1", "item2")
    assert (ends[0].text, ends[0].captures) == (ends[1].text, ends[1].captures)


LEAF = {"temperature": 0, "max_tokens": 3}


def leaf(lm, word):
    return lm + ol.user(word) + ol.assistant(ol.gen("said", **LEAF))


async def async_leaf(lm, word):
    await asyncio.sleep(0)
    return leaf(lm, word)


def round_(inner):
    """A sync program that reads what it calls."""
    return lambda lm, word: lm + inner(f"{word} {(lm + inner(word))['said']}")


def async_round(inner):
    """An async one."""

    async def ring(lm, word):
        before = await (lm + inner(word))
        return lm + inner(f"{word} {before['said']}")

    return ring


MIXES = list(itertools.product((leaf, async_leaf), (round_, async_round), (round_, async_round)))


def test_sync_in_async_in_sync_says_the_same_on_a_real_model(model):
    """All eight mixes, in turn and at once, entered by a blocking read and by an await."""
    programs = [ol.program(outer(ol.program(inner(ol.program(first))))) for first, inner, outer in MIXES]

    async def awaited():
        lms = await model.async_run_batched([made("Name a color.") for made in programs])
        return [*lms, await (model + programs[1]("Name a color."))]

    lms = model.run_batched([made("Name a color.") for made in programs])
    texts = [str(model + programs[0]("Name a color.")), *map(str, lms), *map(str, asyncio.run(awaited()))]
    assert set(texts) == {str(lms[0])}

    def plain(depth, word):
        """The same in plain calls: each round asks its inner one, and again with the answer."""
        return model(word, **LEAF) if depth == 0 else plain(depth - 1, f"{word} {plain(depth - 1, word)}")

    assert lms[0]["said"] == plain(2, "Name a color.")


def test_captures_hold_what_was_said_on_a_real_model(model):
    """Blocks, names with capitals, f-strings; what follows a block is no part of it."""

    @ol.program
    def named(lm):
        lm += ol.user("Name a color.")
        with ol.assistant(), ol.capture("CamelCaseName"):
            lm += f"{ol.gen('inner', **GREEDY)}"
        return lm + ol.user("Thanks.") + ol.assistant(ol.capture(ol.gen(**LEAF), "last"))

    lm = model + named()
    assert lm["CamelCaseName"] == lm["inner"] == model("Name a color.", **GREEDY)
    assert str(lm) == f"Name a color.\n{lm['inner']}\nThanks.\n{lm['last']}"
    assert [turn.role for turn in lm.messages] == ["user", "assistant"] * 2


def test_a_choice_is_captured_on_a_local_model(smollm2):
    chosen = ol.capture(ol.select(["bad", "quite bad"]), "my_var")
    lms = smollm2.run_batched([ol.user(f"How is {word}?") + ol.assistant(chosen) for word in ("rain", "snow")])
    assert all(lm["my_var"] in ("bad", "quite bad") for lm in lms)


def test_forks_share_the_run_of_what_they_go_on_from(smollm2):
    """Counted by the tokens that the engine wrote."""
    with ol.cache.disabled():
        before, start = smollm2.counts.written, smollm2 + ask("Name an animal.")
        ends = [fork + ask(word) for fork, word in zip(start.fork(2), ["Why?", "Where?"], strict=True)]
        assert ends[0].messages[:2] == ends[1].messages[:2] == start.messages
        spent = [end.usage.completion_tokens for end in ends]
        assert smollm2.counts.written - before == sum(spent) - start.usage.completion_tokens


def test_a_chain_read_backwards_runs_each_part_once_on_a_real_model(model):
    """G01: whatever is read first, and from wherever, a part has one value and is paid for once."""
    one = model + ask("Name a color.")
    two, other = one + ask("Why?"), one + ask("Name another.")
    with ol.cache.disabled():
        last, first = two["answer"], two.captures
        assert (two["answer"], first["answer"]) == (last, last)
        assert other.messages[:2] == two.messages[:2] == one.messages
        assert [lm.usage.requests for lm in (one, two, other)] == [1, 2, 2]


@pytest.mark.parametrize(
    ("build", "remedy"),
    [
        (lambda lm: lm + "text" + ol.gen("x"), "text stands outside all turns.* put it in `with user"),
        (lambda lm: lm + ol.gen("x"), "put it in `with assistant"),
        (lambda lm: lm + ol.user("Hi" + ol.gen("x")), "assistant"),
    ],
)
def test_a_real_chat_model_refuses_gens_outside_its_turns_where_they_are_written(model, build, remedy):
    """G02."""
    with pytest.raises(ol.errors.ProgramError, match=remedy):
        build(model)


def test_two_gens_in_one_turn_are_refused_where_the_server_cannot_go_on(serve):
    base_url, name = serve
    server = ol.models.openai(name, base_url=base_url)
    with pytest.raises(ol.errors.ProgramError, match="block of its own"):
        server + ol.user("Hi") + ol.assistant(ol.gen("a"), " and ", ol.gen("b"))


def test_a_raw_model_goes_on_with_the_text(smollm2):
    raw = ol.models.transformers("smollm2-135m", raw=True)
    lm = (
        raw
        + "The capital of France is"
        + ol.gen("a", temperature=0, max_tokens=3)
        + ". The capital of Italy is"
        + ol.gen("b", **GREEDY)
    )
    assert lm["a"] == raw("The capital of France is", temperature=0, max_tokens=3)
    assert lm["b"] == raw(f"The capital of France is{lm['a']}. The capital of Italy is", **GREEDY)
    with pytest.raises(ol.errors.ProgramError, match="knows no roles"):
        raw + ol.user("x")


def test_a_local_model_keeps_to_the_forms_of_programs(smollm2):
    @dataclasses.dataclass
    class Thing:
        name: str
        count: int

    lm = smollm2 + ol.user("A box holds two lamps. Is that dark?")
    lm += ol.assistant("It is ", ol.select(["dark", "not dark"], "dark", temperature=0, logprobs=True), ".")
    lm += ol.user("When?") + ol.assistant("In ", ol.regex("(19|20)[0-9]{2}", "year", temperature=0))
    lm += ol.user("What is in it?") + ol.assistant(ol.json("thing", schema=Thing, temperature=0, max_tokens=60))
    lm += ol.user("How many?") + ol.assistant(ol.gen("many", regex="[0-9]{1,3}( [a-z]{1,9})?", stop_regex=" [a-z]"))
    assert lm["dark"] in ("dark", "not dark")
    assert re.fullmatch("(19|20)[0-9]{2}", lm["year"])
    assert isinstance(lm["thing"], Thing)
    assert lm["many"].isdecimal()
    assert lm.log_prob("dark") < 0
    with pytest.raises(ol.errors.ProgramError, match="no log-probability for 'year'"):
        lm.log_prob("year")


def test_a_schema_that_a_local_model_cannot_keep_fails_before_it_writes(smollm2):
    lm = smollm2 + ol.user("Hi") + ol.assistant(ol.json("x", schema={"not": {"type": "string"}}))
    with pytest.raises(ol.errors.BadRequestError, match="Unimplemented keys"):
        lm["x"]


def test_sync_async_and_watched_programs_give_the_same_on_a_real_model(smollm2):
    @ol.program
    async def twice(lm, question):
        lm = await (lm + ask(question))
        return lm + ask(f"Why {lm['answer'].split()[0]}?")

    async def awaited():
        return str(await (smollm2 + twice("Name a color.")))

    text = str(smollm2 + twice("Name a color."))
    assert asyncio.run(awaited()) == text
    assert list(smollm2.stream() + twice("Name a color."))[-1].text == text


def test_a_local_model_goes_on_in_an_assistant_turn(smollm2):
    """Two gens in one turn: the second is asked to go on with the first and the given words."""
    few = {"temperature": 0, "max_tokens": 4}
    lm = smollm2 + ol.user("Name two colors.")
    lm += ol.assistant("The first is", ol.gen("one", **few), ". The second is", ol.gen("two", **few))
    turn = [{"role": "user", "content": "Name two colors."}, {"role": "assistant", "content": "The first is"}]
    assert lm["one"] == smollm2(turn, **few)
    turn[1]["content"] = f"The first is{lm['one']}. The second is"
    assert lm["two"] == smollm2(turn, **few)
    assert [message.role for message in lm.messages] == ["user", "assistant"]
    assert str(lm).endswith(f"{turn[1]['content']}{lm['two']}")


def test_the_next_gen_reads_only_what_is_new(smollm2):
    """What a program has said is kept by the worker: a second turn reads the question, not the conversation."""
    talk = smollm2 + ask("Here is a list: " + ", ".join(f"thing {k}" for k in range(60)) + ". Name one of them.")
    before = smollm2.prefilled_tokens
    whole = talk.usage.prompt_tokens
    read = smollm2.prefilled_tokens - before
    assert read <= whole
    assert whole > 200
    again = talk + ask("Another one?")
    before = smollm2.prefilled_tokens
    assert again.usage.prompt_tokens > 2 * whole  # both answers' prompts, the second longer than the first
    assert 0 < smollm2.prefilled_tokens - before < 40


@pytest.mark.parametrize("kind", ["block", "async"])
def test_programs_that_wait_together_run_in_one_batch(smollm2, monkeypatch, kind):
    """Six programs of two gens: six rows are sent at once, twice, and all end in the same step."""
    sent, ended = [], []
    flush, hear = Worker.flush, Worker.hear
    monkeypatch.setattr(Worker, "flush", lambda self: (sent.append(len(self._outbox)), flush(self))[1])
    monkeypatch.setattr(Worker, "hear", lambda self, news: (ended.append(len(news.answers)), hear(self, news))[1])
    few = {"temperature": 0, "max_tokens": 3}

    @ol.program
    async def waits(lm, word):
        lm += ol.user(word) + ol.assistant(ol.gen("one", **few))
        await lm
        return lm + ol.user("Go on.") + ol.assistant(ol.gen("two", **few))

    def block(word):
        return sum((ol.user(word) + ol.assistant(ol.gen(name, **few)) for name in ("one", "two")), ol.user("Be brief."))

    with ol.cache.disabled():
        smollm2.run_batched([(block if kind == "block" else waits)(f"Count from {k}.") for k in range(6)])
    assert [n for n in sent if n] == [6, 6]
    assert [n for n in ended if n] == [6, 6]


def test_the_story_of_the_docs_is_told(smollm2, capsys):
    example("story").main()
    told = capsys.readouterr().out
    docs = (EXAMPLES.parent / "docs" / "programs.md").read_text("utf-8")
    assert " ".join(told.split()) in " ".join(docs.split())


def test_the_docs_run_in_a_notebook(tmp_path):
    """docs/programs.ipynb is the page on programs; executed again, in a kernel with a loop of its own, it shows the same."""
    nbformat = pytest.importorskip("nbformat")
    notebooks = module(EXAMPLES.parent / "docs" / "notebooks.py")
    page = (EXAMPLES.parent / "docs" / "programs.md").read_text("utf-8")
    stored = nbformat.read(EXAMPLES.parent / "docs" / "programs.ipynb", 4)
    extra = ["await (chat + tell('fish'))", "[part.done async for part in chat.stream() + tell('fish')]", "chat + tell('<b>')"]
    book = notebooks.book_of(page)
    assert [cell.source for cell in book.cells] == [cell.source for cell in stored.cells]
    book.cells += [nbformat.v4.new_code_cell(code) for code in extra]
    shown = [shows(cell) for cell in notebooks.executed(book, tmp_path).cells if cell.cell_type == "code"]
    assert shown[:-3] == [shows(cell) for cell in stored.cells if cell.cell_type == "code"]
    assert shown[-2] == ["[False, False, False, False, True]"]
    assert "Tell me a story about &lt;b&gt;." in book.cells[-1].outputs[-1]["data"]["text/html"]


def shows(cell):
    """What stands under a cell, as text."""
    return [out.get("data", {}).get("text/plain") or out.get("text") or out.get("ename") for out in cell.outputs]
