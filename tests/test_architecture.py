"""The structure that the README promises: imports point one way, and each thing is done in one place."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardtrain"

# The order in which to read. A room is a file or folder of `shardtrain`, and imports from those before it.
CORE = [
    "layout",
    "nested",
    "precision",
    "comm",
    "strides",
    "memories",
    "tape",
    "initial",
    "shard",
    "unit",
    "gather",
    "reduce",
    "schedule",
    "choice",
    "elementwise",
    "user_hooks",
    "tree",
    "engine",
    "wrap",
    "forwards",
    "state",
    "optim",
    "checkpoint",
]
PUBLIC = "shardtrain"  # the package itself, which exports what the core has
PROGRAM = [
    "errors",
    "lock",
    "text",
    "pictures",
    "checked",
    "targets",
    "help",
    "config",
    "compose",
    "stop",
    "machine",
    "place",
    "launch",
    "losses",
    "schedules",
    "weights",
    "model",
    "data",
    "build",
    "evaluate",
    "plan",
    "monitor",
    "nonfinite",
    "keeper",
    "resume",
    "search",
    "sweep",
    "train",
    "export",
    "bench",
    "doctor",
]
ORDER = [*CORE, PUBLIC, *PROGRAM]


def imported(file: Path) -> Iterator[list[str]]:
    """What a file imports of the package, as the parts of a name: ``["comm", "meter", "count"]``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, *inside = name.split(".")
            if package == PUBLIC:
                yield inside


def rooms_imported(file: Path) -> Iterator[str]:
    for inside in imported(file):
        yield inside[0] if inside and inside[0] in ORDER else PUBLIC


def sources() -> Iterator[tuple[str, Path]]:
    """Every file of the package with its room."""
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        yield PUBLIC if room == "__init__" else room, file


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room for room, _ in sources()} == set(ORDER)


@pytest.mark.parametrize(("document", "order"), [("README.md", CORE), ("docs/program.md", PROGRAM)])
def test_the_documents_tell_the_same_order(document: str, order: list[str]) -> None:
    table = (ROOT / document).read_text().partition("| file of `shardtrain/` |")[2].partition("\n\n")[0]
    told = [
        room for row in table.splitlines()[2:] for room in re.findall(r"`(\w+)(?:\.py|/)`", row.split("|")[1])
    ]
    assert told == order


@pytest.mark.parametrize("room", ORDER)
def test_imports_point_one_way(room: str) -> None:
    before = {*ORDER[: ORDER.index(room)], room}
    for owner, file in sources():
        if owner == room:
            later = set(rooms_imported(file)) - before
            assert not later, f"{file.relative_to(ROOT)} imports {', '.join(sorted(later))}, which come later"


def test_files_and_functions_are_short() -> None:
    for _, file in sources():
        text = file.read_text()
        assert text.count("\n") <= 400, file
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{file.relative_to(ROOT)}: {node.name}"


def test_no_files_import_each_other() -> None:
    graph: dict[Path, set[Path]] = {}
    for _, file in sources():
        graph[file] = set()
        for inside in imported(file):
            ends = [PACKAGE.joinpath(*inside[:length]) for length in range(len(inside) + 1)]
            files = [end.with_suffix(".py") for end in ends] + [end / "__init__.py" for end in ends]
            graph[file] |= {max((f for f in files if f.exists()), key=lambda f: (len(f.parts), f.stem))}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError, with the files


def files_of_comm() -> Iterator[tuple[str, Path]]:
    """Every file of ``comm`` but its front, with the name under which its docstring has it."""
    folder = PACKAGE / "comm"
    for file in folder.rglob("*.py"):
        if file != folder / "__init__.py":
            yield file.relative_to(folder).parts[0].removesuffix(".py"), file


def test_comm_is_read_from_top_to_bottom() -> None:
    """Its docstring names every file, and each imports from those before it."""
    text = (PACKAGE / "comm" / "__init__.py").read_text()
    table = text[text.index("- ``transport``") : text.index("A movement has")]
    order = list(dict.fromkeys(re.findall(r"``(\w+)``", table)))
    assert set(order) == {name for name, _ in files_of_comm()}
    for name, file in files_of_comm():
        used = {inside[1] for inside in imported(file) if inside[:1] == ["comm"] and inside[1:]}
        later = used - set(order[: order.index(name) + 1])
        assert not later, f"{file.relative_to(ROOT)} imports {', '.join(sorted(later))}, which come later"


def places_of(pattern: str) -> set[str]:
    found = re.compile(pattern)
    return {room for room, file in sources() if found.search(file.read_text())}


def test_the_core_knows_no_configuration() -> None:
    assert not places_of(r"import (hydra|omegaconf)|from (hydra|omegaconf)") & set(CORE)


def test_only_comm_calls_collectives() -> None:
    calls = (
        r"\bdist\.(all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast|isend|irecv|barrier)\("
    )
    assert places_of(calls) <= {"comm", "bench"}  # the benchmark times its peers'


def test_only_the_engine_hooks_modules_and_parameters() -> None:
    hooks = r"\.register_(forward|full_backward|module|state_dict|load_state|post_accumulate)\w*hook\("
    assert places_of(hooks) == {"engine", "doctor"}  # the doctor looks on


def test_recipes_and_package_meet_in_hydra_alone() -> None:
    for file in (ROOT / "recipes").glob("*.py"):
        allowed = {PUBLIC, "comm", "data", "train"}
        assert set(rooms_imported(file)) <= allowed | {"recipes"}, file
    imports = r"(from|import) (shardtrain\.)?recipes"
    assert not places_of(imports)
