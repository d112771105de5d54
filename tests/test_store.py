"""The store: what is put comes back equal or not at all, whatever happens to the folder."""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import sqlite3
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlines_like.errors import StoreWarning
from outlines_like.requests import Completion, Usage
from outlines_like.store import Store, handles
from outlines_like.store.databases import Database
from outlines_like.store.folders import DATABASE
from outlines_like.store.packing import UnfitError, sealed, unsealed

ROOT = Path(__file__).parents[1]
MARKS: list[str] = []


def mark(name: str) -> None:
    """What a planted pickle would do."""
    MARKS.append(name)


class Bomb:
    """Unpickling it leaves a mark."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return mark, ("unpickled",)


def filled(folder: Path, n: int = 40) -> dict[str, Any]:
    """A closed store of ``n`` completions in ``folder``, and what is in it."""
    rows = {f"key-{i}": Completion(f"answer {i} " + "x" * 200, "stop", Usage(i, 2)) for i in range(n)}
    store = Store(folder)
    store.put_many(rows.items())
    assert store.flush()
    store.close()
    return rows


def sql(folder: Path, statement: str, *values: Any) -> list[Any]:
    """Run one statement on the database behind the store's back."""
    connection = sqlite3.connect(folder / DATABASE, isolation_level=None)
    try:
        return connection.execute(statement, values).fetchall()
    finally:
        connection.close()


def child(code: str, *args: str) -> subprocess.Popen[bytes]:
    """A Python process with warnings as errors and pipes."""
    command = [sys.executable, "-W", "error", "-c", code, *args]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def strictly_equal(a: Any, b: Any) -> bool:
    """Equal, of equal types, all the way down; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(strictly_equal, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(strictly_equal(a[k], b[k]) for k in a)
    return bool(a == b or (a != a and b != b))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "answers"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    """An empty store, closed in the end."""
    store = Store(folder)
    yield store
    store.close()


# What goes in comes out.

texts = st.text(st.characters(exclude_categories=["Cs"]))
leaves = st.none() | st.booleans() | st.integers() | st.floats() | texts | st.binary()
records = st.builds(Completion, texts, st.none() | texts, st.builds(Usage, st.integers(0, 2**60)))
trees = st.recursive(
    leaves | records | st.integers(2**62, 2**200),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(texts, inner),
)


@given(texts, trees)
def test_a_value_comes_back_equal_and_of_equal_types(key: str, value: Any) -> None:
    assert strictly_equal(unsealed(key, sealed(key, value)), value)


@pytest.mark.parametrize(
    "value",
    [2**64, -(2**63) - 1, pytest.param(10**5000, id="huge"), (1, (2, [()])), {"a": (1.5, b"\0")}, float("nan"), -0.0, ""],
)
def test_awkward_values_survive_the_disk(store: Store, value: Any) -> None:
    store.put("k", value)
    assert store.flush()
    assert strictly_equal(store.get_many(["k"]), {"k": value})


@given(texts, texts, trees)
def test_a_value_is_bound_to_its_key(key: str, other: str, value: Any) -> None:
    if key != other:
        with pytest.raises(ValueError, match="checksum"):
            unsealed(other, sealed(key, value))


@pytest.mark.parametrize("value", [{1: 2}, {1, 2}, object(), bytearray(b"x"), [True, 1j], type("Text", (str,), {})("x")])
def test_what_would_not_come_back_the_same_is_refused(value: Any) -> None:
    with pytest.raises(UnfitError):
        sealed("k", value)


def test_a_value_that_can_not_be_kept_costs_one_warning_that_names_its_type(store: Store) -> None:
    store.put_many([("a", {1}), ("b", {2}), ("c", 3)])
    with pytest.warns(StoreWarning, match="builtins.set") as seen:
        store.flush()
    assert store.get_many(["a", "b", "c"]) == {"c": 3}
    assert len(seen) == 1


def test_values_that_fail_alike_cost_one_warning(store: Store) -> None:
    store.put_many((f"{i}", "x" * i + "\ud800") for i in range(9))
    with pytest.warns(StoreWarning, match="surrogates") as seen:
        store.flush()
    assert len(seen) == 1


def test_lone_surrogates_and_endless_nesting_are_not_kept_and_harm_nothing(store: Store) -> None:
    knot: list[Any] = []
    knot.append(knot)
    store.put_many([("a", "\ud800"), ("b", knot), ("\udfff", 1), ("d", 4)])
    with pytest.warns(StoreWarning):
        assert store.get_many(["a", "b", "\udfff", "d"]) == {"d": 4}


# Reading and writing.


def test_a_read_sees_what_was_put_just_before(store: Store) -> None:
    for i in range(300):
        store.put("k", i)
        assert store.get_many(["k", "other"]) == {"k": i}


def test_thousands_of_rows_are_written_and_found(store: Store, folder: Path) -> None:
    rows = {f"{i}": Completion(f"answer {i}", "stop") for i in range(3000)}
    store.put_many(rows.items())
    assert store.flush()
    assert len(store) == 3000
    assert store.get_many([*rows, "other"]) == rows
    store.close()
    assert store.get_many(["7"]) == {"7": rows["7"]}
    assert sorted(os.listdir(folder)) == ["cache.db", "cache.db-shm", "cache.db-wal"]


def test_rows_are_committed_soon_without_being_asked_to(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed, write = threading.Event(), Database.write

    def watched(self: Database, rows: Any) -> None:
        write(self, rows)
        committed.set()

    monkeypatch.setattr(Database, "write", watched)
    store.put("k", 1)
    assert committed.wait(5)
    assert sql(folder, "SELECT count(*) FROM Cache") == [(1,)]


def test_clear_forgets_rows_written_and_waiting(store: Store) -> None:
    store.put_many((str(i), i) for i in range(500))
    store.clear()
    assert len(store) == 0
    assert store.get_many(["1"]) == {}
    store.put("1", "again")
    assert store.get_many(["1"]) == {"1": "again"}


def test_nothing_is_evicted(folder: Path) -> None:
    """K13: the default limit of diskcache would drop old answers."""
    store = Store(folder)
    store.put_many((str(i), "x" * 20_000) for i in range(200))
    assert store.flush()
    limits = dict(sql(folder, "SELECT key, value FROM Settings"))
    assert (limits["eviction_policy"], limits["cull_limit"]) == ("none", 0)
    assert len(store.get_many([str(i) for i in range(200)])) == 200
    store.close()


def test_a_large_value_stays_in_the_database(store: Store, folder: Path) -> None:
    store.put("k", "x" * 3_000_000)
    assert store.flush()
    assert store.get_many(["k"]) == {"k": "x" * 3_000_000}
    assert [p for p in folder.rglob("*") if p.is_dir() or not p.name.startswith(DATABASE)] == []


def test_sixteen_threads_share_a_store(store: Store) -> None:
    wrong: list[Any] = []

    def work(n: int) -> None:
        for i in range(100):
            store.put(f"{n}-{i}", [n, i])
            found = store.get_many([f"{n}-{i}"])
            wrong.extend([found] * (found != {f"{n}-{i}": [n, i]}))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(store) == 1600


# Other processes.

SHARER = """
import sys
from outlines_like.store import Store
folder, name = sys.argv[1:]
print("ready", flush=True); sys.stdin.readline()
store = Store(folder)
for i in range(50):
    store.get_many([f"{name}-{k}" for k in range(50)])
    store.put(f"{name}-{i}", [name, i]); store.put(f"all-{i}", i)
    assert store.flush()
assert store.get_many([f"{name}-{i}" for i in range(50)]) == {f"{name}-{i}": [name, i] for i in range(50)}
store.close()
"""


def test_four_processes_open_one_fresh_folder_together_and_share_it(folder: Path) -> None:
    """K11."""
    children = [child(SHARER, str(folder), str(n)) for n in range(4)]
    assert [c.stdout.readline() for c in children] == [b"ready\n"] * 4  # type: ignore[union-attr]
    results = [c.communicate(b"go\n") for c in ready(children)]
    assert [(c.returncode, error) for c, (_, error) in zip(children, results, strict=True)] == [(0, b"")] * 4
    store = Store(folder)
    assert len(store) == 250
    store.close()
    assert sql(folder, "PRAGMA integrity_check") == [("ok",)]


def ready(children: list[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    """Let all start at once."""
    for each in children:
        each.stdin.write(b"go\n")  # type: ignore[union-attr]
        each.stdin.flush()  # type: ignore[union-attr]
    return children


WRITER = """
import os, sys
from outlines_like.store import Store
store, first = Store(sys.argv[1]), int(sys.argv[2])
for i in range(first, first + 10**6):
    store.put(f"k{i}", [i, "x" * (i % 3000)])
    if i % 7 == 0:
        assert store.flush()
        os.write(1, b"%d\\n" % i)
"""


def test_a_killed_writer_loses_nothing_that_was_acknowledged(folder: Path) -> None:
    """S1, K12: ten kills in mid-write, counted."""
    draw, acknowledged = random.Random(4), 0
    for kill in range(10):
        first = kill * 10**6
        writer = child(WRITER, str(folder), str(first))
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(draw.randrange(1, 120))]
        writer.kill()
        said += writer.communicate()[0].splitlines(keepends=True)
        last = max(int(line) for line in said if line.endswith(b"\n"))
        keys = {f"k{i}": [i, "x" * (i % 3000)] for i in range(first, last + 1)}
        store = Store(folder)
        assert store.get_many(list(keys)) == keys
        acknowledged += len(keys)
        store.close()
    assert acknowledged > 500
    assert sql(folder, "PRAGMA integrity_check") == [("ok",)]
    assert os.listdir(folder) == [DATABASE]


FORKER = """
import os, sys
from outlines_like.store import Store
store = Store(sys.argv[1])
store.put_many((f"before-{i}", i) for i in range(100))
def work(name):
    for i in range(100):
        store.put(f"{name}-{i}", i)
        assert store.get_many([f"{name}-{i}", "before-7"]) == {f"{name}-{i}": i, "before-7": 7}, i
    assert store.flush()
store.get_many(["before-1"]), store.flush()
for n in range(3):
    if (pid := os.fork()) == 0:
        work(f"child{n}")
        os._exit(0)
    work(f"parent{n}")
    assert os.waitpid(pid, 0)[1] == 0
assert len(store) == 700
store.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_parent_and_child_both_use_the_store_after_a_fork(folder: Path) -> None:
    """K16."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORKER, str(folder)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (0, b"")
    assert sql(folder, "PRAGMA integrity_check") == [("ok",)]


FORGETFUL = """
import sys
from outlines_like.store import Store
Store(sys.argv[1]).put_many((str(i), i) for i in range(500))
"""


def test_what_was_put_just_before_the_end_of_a_script_is_kept(folder: Path) -> None:
    assert child(FORGETFUL, str(folder)).communicate()[1] == b""
    store = Store(folder)
    assert len(store) == 500
    store.close()


# The folder is ours alone.


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_folder_and_files_are_for_their_owner_whatever_the_umask(folder: Path, umask: int) -> None:
    """S6."""
    before = os.umask(umask)
    try:
        store = Store(folder)
        store.put("k", 1)
        assert store.flush()
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()}
        assert files == {"cache.db": 0o600, "cache.db-wal": 0o600, "cache.db-shm": 0o600}
        store.close()
    finally:
        os.umask(before)


def test_a_folder_with_other_things_in_it_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o755)
    filled(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / DATABASE).stat().st_mode) == 0o600


def refused(folder: Path, why: str) -> None:
    """Assert that the store goes without ``folder``, saying ``why`` once, and that calls go on."""
    store = Store(folder)
    store.put("k", 1)
    with pytest.warns(StoreWarning, match=why):
        stored = store.flush()
    assert not stored
    assert store.get_many(["k", "key-1"]) == {}
    assert len(store) == 0
    store.close()


def test_a_folder_of_someone_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(folder)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    refused(folder, "belongs to another user")


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    tmp_path.chmod(0o777)
    refused(tmp_path, "everybody may write")


def test_a_database_that_is_a_link_is_refused(tmp_path: Path) -> None:
    filled(tmp_path / "real")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / DATABASE).symlink_to(tmp_path / "real" / DATABASE)
    refused(tmp_path / "linked", "is a link")


def test_a_folder_that_can_not_be_made_is_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file" / "answers", "can't be used")


# Nothing in it is believed.


def test_a_planted_pickle_never_runs(folder: Path) -> None:
    """K15: as value, as key, as setting, as a file's name."""
    rows = filled(folder)
    bomb = pickle.dumps(Bomb())
    sql(folder, "UPDATE Cache SET mode = 4, value = ? WHERE key = 'key-1'", bomb)
    sql(folder, "UPDATE Cache SET key = ?, raw = 0 WHERE key = 'key-2'", bomb)
    sql(folder, "UPDATE Cache SET mode = 4, value = NULL, filename = '../outside' WHERE key = 'key-3'")
    sql(folder, "UPDATE Cache SET value = ? WHERE key = 'key-4'", bomb)
    for name in ("count", "disk_pickle_protocol", "size", "statistics"):
        sql(folder, "UPDATE Settings SET value = ? WHERE key = ?", bomb, name)
    for name in ("get", "_disk", "__class__", "disk_x", "sqlite_temp_store_directory"):
        sql(folder, "INSERT INTO Settings VALUES (?, ?)", name, bomb)
    (folder.parent / "outside").write_bytes(bomb)
    store = Store(folder)
    with pytest.warns(StoreWarning, match="damaged or not ours"):
        assert store.get_many(list(rows)) == {k: v for k, v in rows.items() if k not in ("key-1", "key-2", "key-3", "key-4")}
    store.put_many(rows.items())
    assert store.flush()
    assert store.get_many(list(rows)) == rows
    store.clear()
    store.close()
    assert MARKS == []
    assert (folder.parent / "outside").read_bytes() == bomb


def test_the_word_pickle_is_nowhere_in_the_folder(store: Store, folder: Path) -> None:
    """S5: not while the store is open, nor afterwards, nor once a planted setting was met."""
    for planted in (False, True):
        if planted:
            sql(folder, "INSERT INTO Settings VALUES ('disk_pickle_protocol', 5)")
        store.put("k", 1)
        assert store.flush()
        assert [file.name for file in folder.iterdir() if b"pickle" in file.read_bytes().lower()] == []
        store.close()
        assert [file.name for file in folder.iterdir() if b"pickle" in file.read_bytes().lower()] == []


def test_a_database_with_tables_or_triggers_of_others_is_set_aside(folder: Path) -> None:
    filled(folder)
    sql(folder, "CREATE TRIGGER evil AFTER INSERT ON Cache BEGIN DELETE FROM Cache; END")
    store = Store(folder)
    with pytest.warns(StoreWarning, match="evil"):
        assert store.get_many(["key-1"]) == {}
    store.close()


def test_values_swapped_between_keys_are_missing(folder: Path) -> None:
    rows = filled(folder)
    (one,), (two,) = (sql(folder, "SELECT value FROM Cache WHERE key = ?", k)[0] for k in ("key-1", "key-2"))
    sql(folder, "UPDATE Cache SET value = ? WHERE key = 'key-1'", two)
    sql(folder, "UPDATE Cache SET value = ? WHERE key = 'key-2'", one)
    store = Store(folder)
    with pytest.warns(StoreWarning, match="checksum") as seen:
        assert store.get_many(list(rows)) == {k: v for k, v in rows.items() if k not in ("key-1", "key-2")}
    assert len(seen) == 1
    store.close()


def flipped(data: bytearray, draw: random.Random) -> None:
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def zeroed(data: bytearray, draw: random.Random) -> None:
    first = draw.randrange(len(data) // 4096) * 4096
    data[first : first + 4096] = bytes(4096)


def cut(data: bytearray, draw: random.Random) -> None:
    del data[draw.randrange(len(data)) :]


@pytest.mark.parametrize(("damage", "times"), [(flipped, 60), (zeroed, 12), (cut, 12)], ids=["flips", "zeros", "cuts"])
def test_damage_is_never_a_wrong_answer(tmp_path: Path, damage: Callable[..., None], times: int) -> None:
    """S4: answers are right or missing, before and after more is written, and there is nothing but warnings."""
    rows, draw = filled(tmp_path / "whole"), random.Random(7)
    whole = (tmp_path / "whole" / DATABASE).read_bytes()
    for k in range(times):
        data = bytearray(whole)
        damage(data, draw)
        (tmp_path / f"{k}").mkdir()
        (tmp_path / f"{k}" / DATABASE).write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", StoreWarning)
            store = Store(tmp_path / f"{k}")
            for _ in range(3):
                found = store.get_many(list(rows))
                assert found == {key: rows[key] for key in found}
                store.put_many(rows.items())
                store.flush()
            store.close()


@pytest.mark.parametrize("harm", ["start overwritten", "emptied", "not a database"])
def test_a_damaged_database_is_set_aside_with_one_warning(folder: Path, harm: str) -> None:
    """K12."""
    rows, path = filled(folder), folder / DATABASE
    overwritten = b"\xff" * 700 + path.read_bytes()[700:]
    path.write_bytes({"start overwritten": overwritten, "emptied": b"", "not a database": b"hello " * 999}[harm])
    store = Store(folder)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert store.get_many(list(rows)) == {}
        store.put_many(rows.items())
        assert store.flush()
        assert store.get_many(list(rows)) == rows
        store.close()
    assert [w.category for w in seen] == [StoreWarning] * (harm != "emptied")
    assert len([p for p in folder.iterdir() if "damaged" in p.name]) == (harm != "emptied")


# Faults while it is open.


def test_a_removed_or_replaced_folder_is_noticed(store: Store, folder: Path) -> None:
    store.put("a", 1)
    assert store.flush()
    shutil.rmtree(folder)
    store.put("b", 2)
    with pytest.warns(StoreWarning, match="removed or replaced"):
        assert store.flush()
    assert store.get_many(["a", "b"]) == {"b": 2}
    assert sql(folder, "SELECT key FROM Cache") == [("b",)]


def test_a_warning_from_the_stores_thread_is_raised_where_the_caller_is(store: Store, folder: Path) -> None:
    """Under ``-W error`` too, and the store goes on."""
    store.put("a", 1)
    assert store.flush()
    shutil.rmtree(folder)
    store.put("b", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(StoreWarning, match="removed"):
            store.flush()
        assert store.get_many(["b"]) == {"b": 2}


def test_a_database_that_another_process_holds_for_too_long_is_given_up(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("a", 1)
    assert store.flush()
    monkeypatch.setattr(handles, "TIMEOUT", 0.05)
    holder = sqlite3.connect(folder / DATABASE, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    store.put("b", 2)
    with pytest.warns(StoreWarning, match="locked"):
        assert not store.flush()
    holder.execute("ROLLBACK")
    holder.close()


def test_a_short_lock_is_waited_for(store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("a", 1)
    assert store.flush()
    holder = sqlite3.connect(folder / DATABASE, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    waits: list[float] = []

    def waiting(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 5:
            holder.execute("ROLLBACK")

    monkeypatch.setattr("outlines_like.store.handles.time.sleep", waiting)
    store.put("b", 2)
    assert store.flush()
    assert len(waits) >= 5
    holder.close()


FULL = """
import resource, sys, warnings
from outlines_like.store import Store
store = Store(sys.argv[1])
store.put("small", 1)
assert store.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    store.put_many((f"{i}", "x" * 1000) for i in range(1000))
    assert not store.flush()
    assert store.get_many(["small"]) == {"small": 1}
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    store.close()
    store = Store(sys.argv[1])
    store.put("after", 2)
    assert store.flush()
    assert store.get_many(["small", "after"]) == {"small": 1, "after": 2}
    store.close()
assert len(seen) == 1, [str(w.message) for w in seen]
"""


def test_a_full_disk_is_one_warning_and_what_was_stored_stays_readable(folder: Path) -> None:
    """S7; a limit on the size of files stands for the disk."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    process = child(FULL, str(folder))
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 0
