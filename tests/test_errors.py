"""Errors that have a name: one root, and what each of them was before it had one."""

import ast
import importlib
from pathlib import Path

import shardtrain
from shardtrain import errors

PACKAGE = Path(shardtrain.__file__).parent

# Each error: what it has always been, and where it is imported from.
ERRORS = {
    "Diverged": (RuntimeError, ["comm", "comm.guard"]),
    "PeerLost": (RuntimeError, ["comm", "comm.guard"]),
    "ReplayMismatch": (RuntimeError, ["public", "bits.replay"]),
    "SaveFailed": (RuntimeError, ["checkpoint", "checkpoint.store"]),
    "Damaged": (ValueError, ["checkpoint", "checkpoint.manifest"]),
    "UserError": (ValueError, ["config.errors"]),
}


def test_an_error_has_the_root_its_old_base_its_places_and_a_line_in_the_tree() -> None:
    named = {name for name, kind in vars(errors).items() if isinstance(kind, type)} - {"ShardtrainError"}
    assert named == set(ERRORS)
    for name, (base, places) in ERRORS.items():
        kind = getattr(errors, name)
        assert issubclass(kind, shardtrain.ShardtrainError)
        assert issubclass(kind, base)
        assert str(kind("why")) == "why"
        for place in places:
            assert getattr(importlib.import_module(f"shardtrain.{place}"), name) is kind
        assert f"── {name:<20}also a {base.__name__}: " in (errors.__doc__ or "")


def test_no_error_is_defined_elsewhere() -> None:
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef) and file.stem != "errors":
                bases = " ".join(map(ast.unparse, node.bases))
                assert not bases.endswith(("Error", "Exception")), f"{file}: {node.name}({bases})"
