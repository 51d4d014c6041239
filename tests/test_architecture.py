"""The structure: rooms import downward, each thing is done in one place, and one statement says one fact."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardtrain import collectives, comm

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardtrain"
TESTS = ROOT / "tests"
PUBLIC = "shardtrain"  # the package itself, which exports what the engine has

# From the ground floor upward: a room imports from those before it.
ENGINE = """
    errors torch_private layout device comm pieces engine whole guardrails bits sharding graphs optim
    collectives checkpoint
    """.split()  # noqa: SIM905
COMMANDS = ["evaluate", "export", "predict"]
ATTACHED = ["whole", "guardrails", "bits", "sharding"]  # to the engine, or around it
PROGRAM = ["config", "launch", "data", "job", "plan", "monitor", "train", *COMMANDS]
ORDER = [*ENGINE, PUBLIC, "fsdp", "transport_check", *PROGRAM]
# `comm` has the public collectives among its names, and loads them at the first use.
HANDS_ON = ("comm/__init__.py", "collectives")

# Files that still break a rule of density; a file that keeps the rule leaves the list.
DENSE: dict[str, list[str]] = {
    "tuple to tuple": [],
    "nested comprehension": ["docs/course/mini.py"],
    "long function": ["shardtrain/sharding.py"],
}


def imported(file: Path) -> Iterator[list[str]]:
    """Yield what a file imports of the package, as the parts of a name: ``["comm", "meter", "count"]``."""
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


def names_of_comm(file: Path) -> Iterator[str]:
    """Yield what a file uses of ``comm`` by attribute or by import."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "comm":
            yield node.attr
    for inside in imported(file):
        if inside[0:1] == ["comm"] and len(inside) == 2:
            yield inside[1]


def sources() -> Iterator[tuple[str, Path]]:
    """Yield every file of the package with its room."""
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        yield PUBLIC if room in ("__init__", "public") else room, file


def files_of(*rooms: str) -> list[Path]:
    return [file for room, file in sources() if room in rooms]


def test_every_room_has_its_place_in_the_order() -> None:
    assert {room for room, _ in sources()} == set(ORDER)


@pytest.mark.smoke
@pytest.mark.parametrize("room", ORDER)
def test_rooms_import_downward(room: str) -> None:
    below = {*ORDER[: ORDER.index(room)], room}
    for file in files_of(room):
        above = set(rooms_imported(file)) - below
        above -= {other for other in above if (str(file.relative_to(PACKAGE)), other) == HANDS_ON}
        assert not above, f"{file.relative_to(ROOT)} imports {', '.join(sorted(above))}, which are above it"


@pytest.mark.parametrize("room", ORDER[: ORDER.index("collectives")])
def test_the_engine_leans_on_no_public_collective(room: str) -> None:
    """Not as names of ``comm`` either, where no import shows it."""
    for file in files_of(room):
        names = {name for name in names_of_comm(file) if name in collectives.__all__}
        assert not names, f"{file.relative_to(ROOT)} uses {', '.join(sorted(names))}"


def test_the_public_collectives_are_names_of_comm() -> None:
    for name in collectives.__all__:
        assert getattr(comm, name) is getattr(collectives, name)
    assert set(collectives.__all__) <= set(dir(comm))
    with pytest.raises(AttributeError, match=r"^module 'shardtrain.comm' has no attribute 'native_'$"):
        comm.native_  # noqa: B018
    for name in ("Flat", "Gradient"):
        with pytest.raises(
            ValueError, match=rf"^shardtrain.comm.{name} was moved; use shardtrain.comm.Vector$"
        ):
            getattr(comm, name)


@pytest.mark.parametrize("room", PROGRAM)
def test_the_program_uses_public_names(room: str) -> None:
    for file in files_of(room):
        names = [name for name in imported(file) if name[:1] in (["engine"], ["whole"], ["bits"])]
        inside = {".".join(name[:2]) for name in names}
        assert not inside, f"{file.relative_to(ROOT)} imports {', '.join(inside)}: use shardtrain.introspect"


# One statement, one fact. Complexity is ruff's rule C901 (pyproject.toml).

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def assigns_tuple_to_tuple(node: ast.AST) -> bool:
    """Return whether ``node`` assigns to several targets at once, swaps apart."""
    if not isinstance(node, ast.Assign):
        return False
    target = node.targets[0]
    if len(node.targets) > 1:
        return True
    if not (isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)):
        return False
    return sorted(map(ast.unparse, target.elts)) != sorted(map(ast.unparse, node.value.elts))


def nests_comprehensions(node: ast.AST) -> bool:
    """Return whether ``node`` is a comprehension with several loops, or with another one inside."""
    if not isinstance(node, COMPREHENSIONS):
        return False
    inner = [each for each in ast.walk(node) if isinstance(each, COMPREHENSIONS)]
    return len(inner) > 1 or len(node.generators) > 1


def is_long_function(node: ast.AST) -> bool:
    """Return whether ``node`` is a function of more than 60 lines or eight parameters, named ones apart."""
    if not isinstance(node, FUNCTIONS):
        return False
    parameters = len(node.args.posonlyargs) + len(node.args.args)
    return (node.end_lineno or 0) - node.lineno >= 60 or parameters > 8


RULES: dict[str, Callable[[ast.AST], bool]] = {
    "tuple to tuple": assigns_tuple_to_tuple,
    "nested comprehension": nests_comprehensions,
    "long function": is_long_function,
}


@pytest.mark.parametrize("rule", RULES)
def test_one_statement_says_one_fact(rule: str) -> None:
    broken = set()
    for file in [*PACKAGE.rglob("*.py"), *ROOT.glob("recipes/*.py"), *ROOT.glob("docs/course/*.py")]:
        if any(map(RULES[rule], ast.walk(ast.parse(file.read_text())))):
            broken.add(str(file.relative_to(ROOT)))
    assert broken == set(DENSE[rule])


OTHERS = "A An How The What Whether Which"


def described() -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef, str]]:
    """Yield each class and function that has a docstring, with the docstring's first word."""
    helpers = [file for file in TESTS.rglob("*.py") if not file.name.startswith("test_")]
    for file in [*PACKAGE.rglob("*.py"), *ROOT.glob("recipes/*.py"), *ROOT.glob("docs/**/*.py"), *helpers]:
        for node in ast.walk(ast.parse(file.read_text())):
            text = ast.get_docstring(node) if isinstance(node, ast.ClassDef | ast.FunctionDef) else None
            if text:
                yield str(file.relative_to(ROOT)), node, text.split()[0]


def test_docstrings_say_what_a_class_is_and_what_a_function_does() -> None:
    """A class's docstring begins with none of the verbs that functions' begin with."""
    verbs = set()
    wrong = []
    for file, node, word in described():
        is_property = any("property" in ast.unparse(each) for each in node.decorator_list)
        is_inside = file.startswith(("shardtrain", "recipes"))
        if isinstance(node, ast.FunctionDef) and is_inside and not is_property:
            verbs.add(word)
            wrong += [f"{file}: {node.name} begins with {word}"] if word in OTHERS.split() else []
    for file, node, word in described():
        if isinstance(node, ast.ClassDef) and word in verbs - {*OTHERS.split()}:
            wrong.append(f"{file}: {node.name} begins with {word}")
    assert wrong == []


def test_a_wheel_has_every_folder() -> None:
    packages = re.findall(r'^    "(shardtrain[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.M)
    folders = set()
    for name in ("shardtrain", "configs", "recipes"):
        files = [file for kind in ("*.py", "*.yaml") for file in (ROOT / name).rglob(kind)]
        places = {file.parent.relative_to(ROOT) for file in files}
        prefix = () if name == "shardtrain" else ("shardtrain",)
        folders |= {".".join((*prefix, *place.parts)) for place in places}
    assert sorted(packages) == sorted(folders)


# What may be in these rooms alone.
PLACES: dict[str, tuple[str, set[str]]] = {
    "configuration": (r"(import|from) (hydra|omegaconf)", {*ORDER} - {*ENGINE}),
    "devices": (r"torch\.(cuda|xpu|mps)\b|[\"'](cuda|xpu|mps)[\"']|\.is_(cuda|xpu|mps)\b", {"device"}),
    "collectives": (
        r"\bdist\.(all_reduce|all_gather\w*|reduce_scatter\w*|all_to_all\w*|broadcast|isend|irecv|barrier)\(",
        {"comm", "collectives"},
    ),
    "hooks": (
        r"\.register_(forward|full_backward|module|state_dict|load_state|post_accumulate)\w*hook\(",
        {"engine", *ATTACHED},
    ),
    "recipes": (r"(from|import) (shardtrain\.)?recipes", set()),
}


@pytest.mark.parametrize("what", PLACES)
def test_each_thing_is_done_in_its_rooms(what: str) -> None:
    pattern, rooms = PLACES[what]
    assert {room for room, file in sources() if re.search(pattern, file.read_text())} <= rooms


def test_recipes_use_the_program_and_public_names() -> None:
    known = {PUBLIC, "fsdp", "comm", "recipes", *PROGRAM}
    for file in ROOT.glob("recipes/*.py"):
        assert set(rooms_imported(file)) <= known, file


def test_no_test_module_imports_another() -> None:
    for file in TESTS.rglob("test_*.py"):
        modules = re.findall(r"^ *(?:from|import) (?:\w+\.)*test_\w+", file.read_text(), re.MULTILINE)
        assert not modules, f"{file.relative_to(ROOT)} has {modules}: what is shared is a helper's"


def test_plugins_that_xdist_disables_are_left_out(pytestconfig: pytest.Config) -> None:
    """Some releases of pytest-benchmark warn of that: an error before a test is collected."""
    assert pytestconfig.pluginmanager.is_blocked("benchmark")
