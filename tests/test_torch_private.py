"""Private names of torch: each has a row with its reason, and this torch has it."""

import ast
import re
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from shardtrain import torch_private
from shardtrain.torch_private import IN_PLACE, NAMES

from pool import each_rank

PACKAGE = Path(__file__).parents[1] / "shardtrain"
ROWS = {**NAMES, **IN_PLACE}
OTHERS = {"_asdict", "_replace", "_exit", "_current_frames", "_getframe", "_target_"}  # of Python and Hydra


@pytest.mark.parametrize("kind", [FutureWarning, DeprecationWarning])
@each_rank(1, transport="auto")
def test_torchscript_of_torch_itself_warns_of_nothing(kind: type[Warning]) -> None:
    """`jvp` and `torch.distributed.optim` use it; the kind depends on torch and Python."""
    for name in ("script", "interface"):
        warnings.warn(
            f"`torch.jit.{name}` is deprecated. Please use `torch.compile` instead.", kind, stacklevel=1
        )


def is_private(name: str) -> bool:
    return bool(re.match(r"_[a-zA-Z]", name))


def defined_in(tree: ast.Module) -> set[str]:
    """Return the names that the file itself defines or assigns."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(getattr(node, "ctx", None), ast.Store) and ast.unparse(node).startswith("self."):
            names.add(ast.unparse(node).removeprefix("self."))
    return names


def private_names(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a file uses of others: of modules that it imports, and attributes."""
    own = defined_in(tree) | OTHERS
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in own:
            yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "setattr"):
            yield from (arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                path = f"{node.module}.{alias.name}".split(".")
                if any(map(is_private, path)):
                    yield path[-1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from filter(is_private, alias.name.split("."))


def used() -> dict[str, set[str]]:
    """Return the private names that the package uses, each with its files."""
    names: dict[str, set[str]] = {}
    for file in PACKAGE.rglob("*.py"):
        if file.stem != "torch_private":
            for name in private_names(ast.parse(file.read_text())):
                if is_private(name) or name in ROW_OF:
                    names.setdefault(name, set()).add(str(file.relative_to(PACKAGE)))
    return names


ROW_OF = {re.split(r"[.:]", path)[-1]: path for path in ROWS}


def test_every_private_name_has_a_row() -> None:
    for name, files in used().items():
        known = name in ROW_OF or (name.startswith("_foreach_") and "_foreach_norm" in ROW_OF)
        assert known, f"{', '.join(files)}: {name} has no row in torch_private.py"


def test_every_row_is_used() -> None:
    text = "".join(file.read_text() for file in PACKAGE.rglob("*.py") if file.stem != "torch_private")
    for path in NAMES:
        assert f"torch_private.{ROW_OF_SHORT[path]}" in text, path
    for path in IN_PLACE:
        assert re.search(rf"\b{re.split(r'[.:]', path)[-1]}\b", text), path


ROW_OF_SHORT = {path: name for name, path in torch_private._BY_NAME.items()}


@pytest.mark.parametrize("path", ROWS)
def test_a_row_names_what_this_torch_has(path: str) -> None:
    if path in NAMES:
        getattr(torch_private, ROW_OF_SHORT[path])
    else:
        module, _, expression = path.partition(":")
        eval(expression, vars(import_module(module)))


def test_a_name_that_is_gone_is_named_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "torch._C:_gone", "to rest")
    monkeypatch.setitem(torch_private._BY_NAME, "gone", "torch._C:_gone")
    with pytest.raises(
        ImportError, match=r"^torch 2\..* has no torch\._C\._gone, which shardtrain uses to rest: "
    ):
        _ = torch_private.gone
    with pytest.raises(
        AttributeError, match=r"^module 'shardtrain\.torch_private' has no row for 'unknown'$"
    ):
        _ = torch_private.unknown
