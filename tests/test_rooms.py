"""Which room may enter which, and who may hold what."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import outlines_like

ROOT = Path(outlines_like.__file__).parent
LEVELS = [
    {"checks", "errors", "events", "garbage", "requests", "stops"},
    {"streams", "signatures", "frames"},
    {"arrays", "bridge", "store"},
    {"cache", "layers", "worker"},
    {"occasions", "running", "targets", "calling"},
    {"streaming"},
    {"lifting", "operators"},
    {"pipes"},
    {"programs"},
    {"models"},
    {"sampling", "watching"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
FILES = sorted(ROOT.rglob("*.py"))
INSIDE = [path for path in FILES if path.name != "__init__.py"]


def module(path):
    """The parts of a module's name below the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def statements(tree):
    """All statements but those for the type checker alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from statements(node)


def imports(path):
    """What a file imports, in functions too: absolute names, ours as tuples of parts."""
    here = module(path) if path.name == "__init__.py" else module(path)[:-1]
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (tuple(name.name.split(".")) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = () if node.level == 0 else ("outlines_like", *here[: len(here) - node.level + 1])
            whole = (*base, *(node.module.split(".") if node.module else ()))
            yield from ((*whole, name.name) for name in node.names)


def ours(path):
    """The rooms and modules of ours that a file imports."""
    for name in imports(path):
        if name[0] == "outlines_like":
            parts = name[1:]
            while parts and not (
                ROOT.joinpath(*parts).with_suffix(".py").exists() or ROOT.joinpath(*parts, "__init__.py").exists()
            ):
                parts = parts[:-1]
            yield parts


def test_every_room_is_on_the_plan():
    assert {module(path)[0] for path in FILES if module(path)} == set(LEVEL)


@pytest.mark.parametrize("path", INSIDE, ids=lambda path: "/".join(module(path)))
def test_imports_point_one_way(path):
    room = module(path)[0]
    for parts in ours(path):
        assert parts, "a room imports the whole house"
        assert parts[0] == room or LEVEL[parts[0]] <= LEVEL[room], f"{room} imports {parts[0]}"


def test_no_imports_go_in_circles():
    graph = {module(path): {parts for parts in ours(path) if parts != module(path)} for path in INSIDE}
    packages = {module(path): set(ours(path)) for path in FILES if path.name == "__init__.py" and module(path)}
    TopologicalSorter({**graph, **packages}).prepare()


HOMES = {
    "numpy": {"arrays", "lifting", "frames"},
    "aiohttp": {"models/connections"},
    "torch": {"worker"},
    "transformers": {"worker"},
    "safetensors": {"worker"},
    "gguf": {"worker"},
    "diskcache": {"store"},
    "sqlite3": {"store"},
    "pandas": {"frames"},
    "polars": {"frames"},
    "narwhals": {"frames"},
    "ray": {"cluster"},
    "rich": {"watching"},
    "jiter": {"operators"},
    "pickle": set(),
    "nest_asyncio": set(),
    "openai": set(),
}


@pytest.mark.parametrize("guest", HOMES)
def test_each_guest_has_its_room(guest):
    seen = {"/".join(module(path)) for path in FILES if any(name[0] == guest for name in imports(path))}
    assert {name for name in seen if name not in HOMES[guest] and name.split("/")[0] not in HOMES[guest]} == set()


def test_no_module_shares_a_name_with_something_its_package_exports():
    import importlib

    for package in ("", "layers", "models", "programs", "store", "worker"):
        names = {path.stem for path in (ROOT / package).iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
        whole = importlib.import_module(f"outlines_like.{package}".rstrip("."))
        exported = {name for name in getattr(whole, "__all__", []) if not isinstance(getattr(whole, name), type(importlib))}
        assert names & exported == set()


def test_functions_are_short():
    lengths = {}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                skip = len(ast.get_docstring(node, clean=False).splitlines()) if ast.get_docstring(node) else 0
                lengths[f"{path.name}:{node.name}:{node.lineno}"] = node.end_lineno - node.lineno - skip
    ordered = sorted(lengths.values())
    assert max(ordered) <= 50, max(lengths, key=lengths.get)
    assert ordered[len(ordered) * 9 // 10] < 22
    assert ordered[len(ordered) // 2] <= 6
