"""What the store promises (rows S1 to S13), each in small and, marked long, at full size."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import random
import shutil
import sqlite3
import statistics
import string
import subprocess
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

import outlines_like as ol
from outlines_like.errors import StoreWarning
from outlines_like.requests import Completion, Request, Usage
from outlines_like.store import Store, databases, handles
from outlines_like.store.folders import DATABASE
from outlines_like.store.packing import sealed

from .replay import Arrival, Replay, Step, choices, respond
from .test_store import ROOT, Bomb, child, filled, flipped, ready, sql, zeroed

long = pytest.mark.long


def sizes(small: Any, full: Any) -> list[Any]:
    """A small version of a test, and the full one."""
    return [pytest.param(small, id="small"), pytest.param(full, marks=long, id="full")]


def percentile(values: list[float], part: float) -> float:
    """The value below which ``part`` of them lie."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def told(**figures: Any) -> None:
    """Print what a long test has measured: `make test-long` runs with -rP."""
    print(
        ", ".join(
            f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value:,}" for name, value in figures.items()
        )
    )


# S1, S2, S3: killed at any moment.

WRITER = """
import os, sys
from outlines_like.store import Store
store, first, every = Store(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for i in range(first, first + 10**7):
    store.put(f"k{i}", [i, "x" * (i % 300)])
    if i % every == 0:
        assert store.flush()
        os.write(1, b"%d\\n" % i)
"""


@pytest.mark.parametrize(("kills", "every"), [pytest.param(4, 7, id="small"), pytest.param(600, 500, marks=long, id="full")])
def test_a_writer_killed_at_random_moments_loses_nothing_that_was_acknowledged(tmp_path: Path, kills: int, every: int) -> None:
    """S1."""
    draw, acknowledged, lost = random.Random(4), 0, 0
    for kill in range(kills):
        first = kill * 10**7
        writer = child(WRITER, str(tmp_path / "a"), str(first), str(every))
        assert writer.stdout is not None
        said = [writer.stdout.readline()]
        time.sleep(draw.uniform(0, 0.4 if kills > 4 else 0.05))
        writer.kill()
        said += writer.communicate()[0].splitlines(keepends=True)
        last = max(int(line) for line in said if line.endswith(b"\n"))
        keys = {f"k{i}": [i, "x" * (i % 300)] for i in range(first, last + 1)}
        store = Store(tmp_path / "a")
        found = store.get_many(list(keys))
        assert {key: value for key, value in found.items() if keys[key] != value} == {}
        lost, acknowledged = lost + len(keys) - len(found), acknowledged + len(keys)
        store.close()
    told(kills=kills, acknowledged=acknowledged, lost=lost)
    assert lost == 0
    assert sql(tmp_path / "a", "PRAGMA integrity_check") == [("ok",)]
    assert os.listdir(tmp_path / "a") == [DATABASE]


RESUMED = """
import sys
import outlines_like as ol
url, n = sys.argv[1], int(sys.argv[2])
model = ol.models.openai("m", base_url=url, concurrency=16)
print(",".join(model([f"row {i}" for i in range(n)])))
"""


@pytest.mark.parametrize(
    ("prompts", "kills"), [pytest.param(120, 1, id="small"), pytest.param(2000, 20, marks=long, id="full")]
)
def test_a_killed_run_sends_only_what_is_missing(replay: Replay, prompts: int, kills: int) -> None:
    """S2: killed at random points until it is done; every other answer takes 10 ms."""
    draw, asked = random.Random(2), threading.Semaphore(0)

    def answer(arrival: Arrival) -> Step:
        asked.release()
        return respond(choices(arrival.json["messages"][0]["content"].upper()), wait=draw.choice([0, 0.01]))

    url = replay.play("resumed", answer)
    for _ in range(kills):
        script = child(RESUMED, url, str(prompts))
        for _ in range(draw.randrange(1, 2 * prompts // (kills + 1))):
            asked.acquire(timeout=20)
        script.kill()
        script.communicate()
    ended = child(RESUMED, url, str(prompts)).communicate()
    assert ended == (",".join(f"ROW {i}" for i in range(prompts)).encode() + b"\n", b"")
    told(prompts=prompts, kills=kills, requests=len(replay.log("resumed")))
    # 16 in flight, and what was answered in the 50 ms before a kill
    assert len(replay.log("resumed")) <= prompts + kills * (16 + 16 * 5)


@pytest.mark.parametrize(
    ("rows", "times"), [pytest.param(2000, 1, id="small"), pytest.param(100_000, 100, marks=long, id="full")]
)
def test_a_store_opens_quickly_after_a_kill(tmp_path: Path, rows: int, times: int) -> None:
    """S3: what a killed process left, the log not yet written back, is found at once."""
    store = Store(tmp_path / "a")
    store.put_many((f"k{i}", Completion(f"answer {i} " + "x" * 100, "stop")) for i in range(rows))
    assert store.flush()
    took = []
    for k in range(times):
        shutil.copytree(tmp_path / "a", tmp_path / f"copy{k}")  # as it lies there in mid-use
        begun = time.perf_counter()
        copy = Store(tmp_path / f"copy{k}")
        assert copy.get_many([f"k{rows - 1}"])[f"k{rows - 1}"].text.startswith(f"answer {rows - 1}")
        took.append(time.perf_counter() - begun)
        copy.close()
        shutil.rmtree(tmp_path / f"copy{k}")
    store.close()
    told(rows=rows, median_ms=1000 * statistics.median(took), p99_ms=1000 * percentile(took, 0.99))
    assert times == 1 or (statistics.median(took) < 0.05 and percentile(took, 0.99) < 0.2)


# S4: damage.


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


def unhurt(folder: Path, rows: dict[str, Any]) -> int:
    """Assert that a damaged store tells nothing wrong and goes on; how many answers it still knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", StoreWarning)
        store = Store(folder)
        known = store.get_many(list(rows))
        assert known == {key: rows[key] for key in known}
        store.put_many(rows.items())
        store.flush()
        found = store.get_many(list(rows))
        assert found == {key: rows[key] for key in found}
        store.close()
    return len(known)


DAMAGES = [
    (flipped, "", 1000),
    (zeroed, "", 200),
    (cut, "", 200),
    (cut, "-wal", 6),
    (cut, "-wal", 200),
    (flipped, "-wal", 6),
    (flipped, "-wal", 200),
]


@pytest.mark.parametrize(
    ("damage", "part", "times"), [pytest.param(*case, marks=[long] if case[2] >= 200 else []) for case in DAMAGES]
)
def test_damage_anywhere_is_never_a_wrong_answer(tmp_path: Path, times: int, damage: Callable[..., None], part: str) -> None:
    """S4: in the database, and in the log of one that was killed."""
    whole, draw, known = tmp_path / "whole", random.Random(7), 0
    rows = {f"key-{i}": Completion(f"answer {i} " + "x" * 200, "stop", Usage(i, 2)) for i in range(40)}
    store = Store(whole)
    store.put_many(rows.items())
    assert store.flush()
    if not part:
        store.close()
    for k in range(times):
        folder = Path(shutil.copytree(whole, tmp_path / f"{k}", ignore=shutil.ignore_patterns("*-shm")))
        data = bytearray((folder / f"{DATABASE}{part}").read_bytes())
        damage(data, draw)
        (folder / f"{DATABASE}{part}").write_bytes(data)
        known += unhurt(folder, rows)
        shutil.rmtree(folder)
    store.close()
    told(trials=times, wrong=0, still_known=known / times / len(rows))


@pytest.mark.parametrize("times", sizes(20, 200))
def test_values_swapped_among_keys_are_missing(tmp_path: Path, times: int) -> None:
    """S4."""
    draw, rows = random.Random(3), filled(tmp_path / "a")
    for _ in range(times):
        one, two = draw.sample(list(rows), 2)
        sql(tmp_path / "a", "UPDATE Cache SET value = (SELECT value FROM Cache WHERE key = ?) WHERE key = ?", one, two)
    unhurt(tmp_path / "a", rows)


# S5: nothing planted runs, nothing outside is touched.

WATCHER = """
import os, sys, warnings
from pathlib import Path
from outlines_like.store import Store
import outlines_like.store.databases, sqlite3, random, encodings.idna, linecache
folder, seen = Path(sys.argv[1]).resolve(), []
LIBRARY = tuple({sys.prefix, sys.base_prefix, sys.exec_prefix})
def watch(event, args):
    if event in ("pickle.find_class", "marshal.loads", "exec", "compile", "os.system", "subprocess.Popen", "shutil.rmtree"):
        seen.append(event)
    if event in ("open", "os.remove", "os.rename", "sqlite3.connect") and isinstance(args[0], (str, bytes, os.PathLike)):
        name = os.fsdecode(args[0]).removeprefix("file:").partition("?")[0]
        if not os.path.abspath(name).startswith((str(folder), *LIBRARY)):
            seen.append((event, name))
warnings.simplefilter("ignore")
store = Store(folder); store.get_many(["key-1"]); store.close()  # all that is imported late is imported
sys.addaudithook(watch)
store = Store(folder)
keys = [f"key-{i}" for i in range(40)] + ["../outside", "planted"]
right = [value for value in store.get_many(keys).values() if not str(value).startswith("Completion(text='answer")]
len(store); store.put("new", 1); store.flush(); store.drop_many(["key-2"]); store.flush(); store.close()
store.get_many(keys); store.clear(); store.close(); len(store); store.close()
print(seen, right)
"""


def planted(folder: Path) -> list[Callable[[], object]]:
    """Twenty ways to leave something for the next reader of a store."""
    bomb, big = pickle.dumps(Bomb()), zlib.compress(b"\0" * 10**7)
    deep = b"\x91" * 100_000 + b"\x00"
    outside = str(folder.parent / "outside")
    values: list[tuple[int, Any, Any]] = [
        (1, None, bomb), (4, None, bomb), (2, None, bomb), (3, None, bomb), (4, "../outside", None), (2, "../outside", None),
        (2, outside, None), (4, outside, None), (1, "../outside", bomb), (1, None, big), (1, None, sealed("key-2", 1)),
        (1, None, b"\0" * 16 + deep), (1, None, "text"), (1, None, 7), (1, None, None), (9, None, bomb),
    ]  # fmt: skip
    ways = [
        partial(sql, folder, "UPDATE Cache SET mode = ?, filename = ?, value = ? WHERE key = 'key-1'", *value)
        for value in values
    ]
    names = ("disk_x", "_disk", "__class__", "sqlite_temp_store_directory", "sqlite_writable_schema", "disk_pickle_protocol")
    ways += [partial(sql, folder, "UPDATE Cache SET key = ?, raw = 0 WHERE key = 'key-1'", bomb)]
    ways += [partial(sql, folder, "INSERT OR REPLACE INTO Settings VALUES (?, ?)", name, bomb) for name in names]
    return ways


@pytest.mark.parametrize("ways", [slice(None, None, 9), *(pytest.param(slice(k, k + 1), marks=long) for k in range(23))])
def test_nothing_planted_runs_and_nothing_outside_is_touched(tmp_path: Path, ways: slice) -> None:
    """S5: an audit hook listens at every entry point while payloads lie in the folder."""
    folder = tmp_path / "a"
    filled(folder)
    (tmp_path / "outside").write_bytes(pickle.dumps(Bomb()))
    for plant in planted(folder)[ways]:
        plant()
    out, err = child(WATCHER, str(folder)).communicate(timeout=60)
    assert (out, err) == (b"[] []\n", b"")
    assert (tmp_path / "outside").read_bytes() == pickle.dumps(Bomb())


def test_no_word_of_pickles_is_in_the_rooms_of_the_store() -> None:
    """S5: nothing there loads one; the word stands in comments and in the name of the setting that is kept out."""
    for path in (ROOT / "outlines_like" / "store").glob("*.py"):
        assert "import pickle" not in path.read_text()


# S7: what goes wrong with the disk.

FULL = """
import sys, time, warnings
from outlines_like.store import Store
store = Store(sys.argv[1])
store.put("small", 1)
assert store.flush()
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    begun = time.perf_counter()
    for i in range(200):
        store.put(str(i), "x" * 100_000)
    assert not store.flush()
    took, cpu = time.perf_counter() - begun, time.process_time()
    assert store.get_many(["small"]) == {"small": 1}
    time.sleep(0.2)
    assert time.process_time() - cpu < 0.1, "the writer spins"
    store.close()
assert len(seen) == 1 and "full" in str(seen[0].message), [str(w.message) for w in seen]
"""


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    folder.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode:
        pytest.skip("a disk of our own takes the right to mount")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(not shutil.which("mount"), reason="no mount here")
def test_a_disk_that_is_really_full_is_one_warning(tmp_path: Path) -> None:
    """S7."""
    with small_disk(tmp_path / "disk") as disk:
        process = child(FULL, str(disk / "answers"))
        assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0


class Faulty(sqlite3.Connection):
    """A connection whose N-th statement fails as by a sick disk; and all that follow, if it is ``lasting``."""

    left, lasting = 10**9, False

    def _count(self) -> None:
        Faulty.left -= 1
        if Faulty.left == 0 or (Faulty.lasting and Faulty.left < 0):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR
            raise error

    def execute(self, *args: Any) -> sqlite3.Cursor:
        self._count()
        return super().execute(*args)

    def executemany(self, *args: Any) -> sqlite3.Cursor:
        self._count()
        return super().executemany(*args)


@pytest.mark.parametrize("lasting", [False, True])
@pytest.mark.parametrize("n", sizes(range(1, 30, 3), range(1, 201)))
def test_a_fault_at_any_statement_costs_a_warning_at_most(
    tmp_path: Path, n: range, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S7: a call is answered, quickly, and what is reported as stored is there."""
    monkeypatch.setattr(handles, "PAUSE", 0.0)
    monkeypatch.setattr(databases.sqlite3, "connect", partial(sqlite3.connect, factory=Faulty))
    for k in n:
        Faulty.left, Faulty.lasting = k, lasting
        begun = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            store = Store(tmp_path / f"{k}")
            stored = []
            for i in range(40):
                store.put(f"{i}", i)
                stored += [f"{i}"] if store.flush() else []
            Faulty.left, Faulty.lasting = 10**9, False
            store.close()
            store = Store(tmp_path / f"{k}")
            found = store.get_many([f"{i}" for i in range(40)])
            store.close()
        assert found.keys() >= set(stored)
        assert found == {key: int(key) for key in found}
        assert lasting or len(stored) >= 38
        assert time.monotonic() - begun < 60


def test_a_database_that_may_only_be_read_answers_what_it_knows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S7: as user root may write to anything, SQLite is told so instead."""
    rows = filled(tmp_path / "a")
    honest = sqlite3.connect

    def read_only(name: Any, **how: Any) -> sqlite3.Connection:
        link = str(name) if str(name).startswith("file:") else f"{Path(name).as_uri()}?mode=ro"
        connection = honest(link.replace("mode=rw", "mode=ro"), **{**how, "uri": True})
        connection.execute("PRAGMA query_only = ON")
        return connection

    monkeypatch.setattr(databases.sqlite3, "connect", read_only)
    store = Store(tmp_path / "a")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = store.get_many(list(rows))
        assert found in (rows, {})
        store.put("new", 1)
        assert not store.flush()
        store.close()
    assert {w.category for w in seen} == {StoreWarning}


# S8: many processes and threads.

SHARER = """
import asyncio, json, sys, threading, time
from outlines_like.store import Store
folder, name, threads, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
print("ready", flush=True); sys.stdin.readline()
store, done, lags, stop = Store(folder), [0] * threads, [], time.monotonic() + seconds
def work(k):
    i = 0
    while time.monotonic() < stop or i < 3:
        store.put_many((f"{name}-{k}-{i}-{j}", [name, k, i, j]) for j in range(100))
        keys = [f"{name}-{k}-{i}-{j}" for j in range(0, 100, 10)]
        assert store.get_many(keys) == {key: [name, k, i, int(key.rpartition("-")[2])] for key in keys}
        i += 1
        if i % 8 == 0:
            assert store.flush()
    done[k] = i
async def probe():
    while time.monotonic() < stop:
        before = time.perf_counter()
        await asyncio.sleep(0.005)
        lags.append(time.perf_counter() - before - 0.005)
workers = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
for worker in workers: worker.start()
if seconds: asyncio.run(probe())
for worker in workers: worker.join()
assert store.flush()
store.close()
print(json.dumps({"writes": 100 * sum(done), "done": done, "lags": sorted(lags)[-len(lags) // 100 or None:]}), flush=True)
"""


@pytest.mark.parametrize(
    ("processes", "threads", "seconds"),
    [pytest.param(3, 4, 0.0, id="small"), pytest.param(8, 16, 30.0, marks=long, id="full")],
)
def test_processes_of_many_threads_share_one_folder(tmp_path: Path, processes: int, threads: int, seconds: float) -> None:
    """S8: nothing is lost, nobody times out, nobody starves."""
    children = [child(SHARER, str(tmp_path / "a"), str(n), str(threads), str(seconds)) for n in range(processes)]
    assert [c.stdout.readline() for c in children] == [b"ready\n"] * processes  # type: ignore[union-attr]
    results = [c.communicate() for c in ready(children)]
    assert [error for _, error in results] == [b""] * processes
    reports = [msgspec.json.decode(out) for out, _ in results]
    expected = [
        (f"{n}-{k}-{i}-7", [str(n), k, i, 7])
        for n, report in enumerate(reports)
        for k, m in enumerate(report["done"])
        for i in range(m)
    ]
    store = Store(tmp_path / "a")
    assert len(store) == sum(report["writes"] for report in reports)
    assert store.get_many([key for key, _ in expected]) == dict(expected)
    store.close()
    if seconds:
        writes, lags = [report["writes"] for report in reports], [lag for report in reports for lag in report["lags"]]
        told(
            writes_per_s=sum(writes) / seconds,
            slowest_of_fastest=min(writes) / max(writes),
            p99_lag_ms=1000 * min(lags),
            max_lag_ms=1000 * max(lags),
        )
        assert sum(writes) / seconds >= 10_000
        assert min(writes) >= 0.5 * max(writes)


@pytest.mark.parametrize("rows", sizes(4000, 100_000))
def test_the_loop_is_not_held_up_by_writing(tmp_path: Path, rows: int) -> None:
    """S8: putting never blocks, whatever is waiting."""
    store, slowest = Store(tmp_path / "a"), 0.0

    async def put() -> None:
        nonlocal slowest
        for i in range(0, rows, 100):
            before = time.perf_counter()
            store.put_many((f"{k}", Completion("x" * 300, "stop")) for k in range(i, i + 100))
            slowest = max(slowest, time.perf_counter() - before)
            await asyncio.sleep(0)

    asyncio.run(put())
    assert store.flush()
    assert len(store) == rows
    store.close()
    told(rows=rows, slowest_put_ms=1000 * slowest)
    assert rows < 10_000 or slowest < 0.05


@long
def test_rows_are_on_disk_soon_after_they_were_put(tmp_path: Path) -> None:
    """The 50 ms hold below the writer's rate, which is told here."""
    store = Store(tmp_path / "a")
    rows = [(f"{i:032x}", Completion("x" * 150, "stop", Usage(3, 5))) for i in range(60_000)]
    begun = time.perf_counter()
    store.put_many(rows)
    assert store.flush()
    rate = len(rows) / (time.perf_counter() - begun)
    waits = []
    for i in range(200):
        store.put_many((f"more-{i}-{k}", k) for k in range(50))
        before = time.perf_counter()
        while store._writer._waiting:
            time.sleep(0.0005)
        waits.append(time.perf_counter() - before)
    store.close()
    told(rows_per_s=rate, p99_wait_ms=1000 * percentile(waits, 0.99))
    assert percentile(waits, 0.99) < 0.05


# S9: nothing is evicted.


@pytest.mark.parametrize("megabytes", sizes(4, 2100))
def test_nothing_is_evicted_however_much_there_is(tmp_path: Path, megabytes: int) -> None:
    """S9: diskcache would silently drop what is beyond 1 GiB."""
    store = Store(tmp_path / "a")
    for i in range(megabytes):
        store.put(f"{i}", f"{i}" + "x" * 2**20)
        if i % 50 == 49:
            assert store.flush()
    assert store.flush()
    assert len(store) == megabytes
    assert all(store.get_many([f"{i}"])[f"{i}"].startswith(f"{i}x") for i in range(0, megabytes, 7))
    store.close()


# S10: keys.

words = st.text(string.printable, max_size=8)
params = st.fixed_dictionaries(
    {}, optional={"temperature": st.sampled_from([0, 0.5, 1]), "stop": st.lists(words, max_size=2), "seed": st.integers(0, 3)}
)
requests = st.builds(Request, words, words, words, params, st.integers(0, 2), st.integers(0, 2))


@pytest.mark.parametrize("n", sizes(60, 10_000))
def test_keys_are_equal_exactly_where_requests_are(n: int) -> None:
    """S10."""

    @settings(max_examples=n, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(requests, requests)
    def law(one: Request, two: Request) -> None:
        def facts(r: Request) -> Any:
            return r.endpoint, r.model, r.prompt, r.params, (() if r.greedy else (r.occurrence, r.sample))

        assert (one.key == two.key) == (facts(one) == facts(two))

    law()


@pytest.mark.parametrize("n", sizes(2_000, 1_000_000))
def test_different_requests_have_different_keys(n: int) -> None:
    """S10."""
    first = Request("e", "m", "p", {"temperature": 0.5})
    keys = {Request("e", "m", f"p{i}", {"temperature": 0.5}).key for i in range(n // 2)}
    keys |= {first.draw(i % 1000, i // 1000).key for i in range(n // 2)}
    assert len(keys) == n // 2 * 2


# S12: durable.


@pytest.mark.skipif(not shutil.which("strace"), reason="strace shows what reaches the disk")
def test_a_durable_store_syncs_before_it_acknowledges(tmp_path: Path) -> None:
    """S12: between any two acknowledgements the log is synced; without durable=True it is not."""
    code = """
import os, sys
from outlines_like.store import Store
store = Store(sys.argv[1], durable=sys.argv[2] == "durable")
for i in range(5):
    store.put_many((f"{i}-{k}", k) for k in range(10))
    assert store.flush()
    os.write(1, b"acknowledged\\n")
"""
    synced = {}
    for way in ("durable", "usual"):
        command = ["strace", "-f", "-e", "trace=fsync,fdatasync,write", "-o", str(tmp_path / way), sys.executable, "-c", code]
        subprocess.run([*command, str(tmp_path / f"{way}-store"), way], cwd=ROOT, check=True, capture_output=True, timeout=60)
        parts = (tmp_path / way).read_text().split('write(1, "acknowledged')[:-1]
        synced[way] = sum("sync(" in part for part in parts[1:])
    assert synced == {"durable": 4, "usual": 0}


@pytest.mark.parametrize("rows", sizes(500, 20_000))
def test_durable_rows_are_committed_in_groups(tmp_path: Path, rows: int) -> None:
    """S12."""
    store = Store(tmp_path / "a", durable=True)
    begun = time.perf_counter()
    store.put_many((f"{i}", Completion("x" * 150, "stop")) for i in range(rows))
    assert store.flush()
    rate = rows / (time.perf_counter() - begun)
    assert len(store) == rows
    store.close()
    told(rows_per_s=rate)
    assert rows < 10_000 or rate >= 5000


def test_a_durable_call_ends_when_its_answers_are_on_disk(tmp_path: Path) -> None:
    """S12: also where the store was open before, in the usual way."""
    model = ol.models.fake()
    with ol.cache.at(tmp_path / "a"):
        model("first")
    with ol.cache.at(tmp_path / "a", durable=True):
        assert model(["a", "b"]).tolist() == ["A", "B"]
        assert sql(tmp_path / "a", "SELECT count(*) FROM Cache") == [(3,)]
    store = ol.bridge.disown(("store", str(tmp_path / "a")))  # type: ignore[attr-defined]
    assert store.durable
    ol.bridge.wait(store.aclose)  # type: ignore[attr-defined]


# S13: the store against a dict.


NUMBERS = itertools.count()


class Shelves(RuleBasedStateMachine):
    """A store that is used, closed, killed, shared and damaged, and the dict that it should be equal to."""

    keys = Bundle("keys")
    folder: Path

    @initialize()
    def begin(self) -> None:
        self.place = Shelves.folder / f"{next(NUMBERS)}"
        self.store, self.others = Store(self.place), []
        self.model: dict[str, Any] = {}
        self.flushed: dict[str, Any] = {}

    @rule(
        target=keys,
        key=st.text(max_size=3).filter(lambda text: text.isascii() or text.encode("utf-8", "ignore").decode() == text),
    )
    def name(self, key: str) -> str:
        return key

    @rule(
        key=keys,
        value=st.one_of(
            st.none(),
            st.integers(),
            st.text(max_size=5).filter(str.isascii),
            st.tuples(st.booleans(), st.floats(allow_nan=False)),
        ),
    )
    def put(self, key: str, value: Any) -> None:
        self.store.put(key, value)
        self.model[key] = value

    @rule(some=st.lists(keys, max_size=4))
    def drop(self, some: list[str]) -> None:
        self.store.drop_many(some)
        for key in some:
            self.model.pop(key, None)

    @rule(some=st.lists(keys, max_size=6))
    def get(self, some: list[str]) -> None:
        assert self.store.get_many(some) == {key: self.model[key] for key in some if key in self.model}

    @rule()
    def flush(self) -> None:
        assert self.store.flush()
        self.flushed = dict(self.model)

    @rule()
    def count(self) -> None:
        assert len(self.store) == len(self.model)

    @rule()
    def clear(self) -> None:
        self.store.clear()
        self.model, self.flushed = {}, {}

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store, self.flushed = Store(self.place), dict(self.model)

    @rule()
    def kill(self) -> None:
        """As SIGKILL would leave it: the files of this moment, with all that was flushed and no more promised."""
        self.flush()
        after = self.place.with_name(f"{next(NUMBERS)}")
        if self.place.exists():  # somebody has used it
            shutil.copytree(self.place, after)
        self.store.close()
        self.place, self.store = after, Store(after)

    @rule(some=st.lists(keys, max_size=6))
    def look_from_elsewhere(self, some: list[str]) -> None:
        """Another process, as far as the database can tell."""
        self.flush()
        other = Store(self.place)
        assert other.get_many(some) == {key: self.model[key] for key in some if key in self.model}
        other.close()

    @rule(key=keys)
    def damage(self, key: str) -> None:
        """One value is overwritten: it counts as missing, and no other."""
        self.store.put(key, "whole")
        self.model[key] = "whole"
        self.flush()
        sql(self.place, "UPDATE Cache SET value = x'00' WHERE key = ?", key)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            assert key not in self.store.get_many([key])
        self.drop([key])

    @rule()
    def fork(self) -> None:
        """A child uses the store too, and the parent goes on."""
        self.flush()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            with suppress(BaseException):
                found = self.store.get_many(list(self.model))
                os._exit(0 if found == self.model else 1)
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.place, ignore_errors=True)


@pytest.mark.parametrize(
    ("examples", "steps"), [pytest.param(12, 20, id="small"), pytest.param(800, 100, marks=long, id="full")]
)
def test_the_store_is_a_dict_whatever_happens(tmp_path: Path, examples: int, steps: int) -> None:
    """S13."""
    Shelves.folder = tmp_path
    how = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )
    run_state_machine_as_test(Shelves, settings=how)


def test_what_can_not_be_written_is_never_reported_as_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unconfirmed write is no write."""
    store = Store(tmp_path / "a")
    store.put("a", 1)
    assert store.flush()

    def refused(self: Any, rows: Any) -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(databases.Database, "write", refused)
    store.put("b", 2)
    with pytest.warns(StoreWarning, match="disk I/O error"):
        assert not store.flush()
    assert store.get_many(["a", "b"]) == {"a": 1}
    store.close()
