"""Fully sharded data parallel training on PyTorch. docs/engine.md says in which order to read the files."""

from importlib import import_module, util
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.4.0"

if TYPE_CHECKING:
    from shardtrain.public import *  # noqa: F403

_checkout = Path(__file__).resolve().parents[1]
if (_checkout / "pyproject.toml").is_file():
    # A checkout that is not installed has `configs/` and `recipes/` beside the package, a wheel inside it.
    # ruff takes the package's own `__path__` for a name of the import above.
    __path__.append(str(_checkout))  # noqa: F405


def __getattr__(name: str) -> Any:
    """Return a name of `public.py` or a room. The first use imports torch, which `--help` does without."""
    room = util.find_spec(f"shardtrain.{name}")  # rooms import one another before `public` is complete
    value = import_module(room.name) if room else getattr(import_module("shardtrain.public"), name)
    globals()[name] = value  # so that the next use searches nothing
    return value


def __dir__() -> list[str]:
    return [*globals(), *vars(import_module("shardtrain.public"))]
