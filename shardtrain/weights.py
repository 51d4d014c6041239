"""Plain weights: one file with a whole state dict, as stock PyTorch and safetensors tools have them.

Reading one never runs code that it brings along: safetensors has none, and `torch.load` is told to
unpickle tensors only.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from shardtrain.checkpoint.files import sync_directory, write_tensors
from shardtrain.errors import UserError
from shardtrain.state import Spec, differences

_NAMED = 5  # differences that a refusal names
SUFFIXES = (".safetensors", ".pth", ".pt")


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dict in ``path``, on the CPU.

    Raises:
        UserError: it is missing, unreadable, or holds more than tensors.
    """
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        reason = str(error).split("\n", 1)[0]
        raise UserError(f"{path}: no weights that can be read without running code ({reason})") from None
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise UserError(f"{path}: expected a state dict, names with tensors, found {type(state).__name__}")
    return state


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a new file, whole or not at all.

    Raises:
        UserError: it exists, or cannot be written.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: expected a name that ends in {', '.join(SUFFIXES)}")
    if path.exists():
        raise UserError(f"{path} exists already; choose another name or remove it")
    temporary = path.with_name(f".tmp-{secrets.token_hex(4)}-{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".safetensors":
            write_tensors(temporary, state, {"format": "pt"})
        else:
            with temporary.open("xb") as file:
                torch.save(dict(state), file)
                file.flush()
                os.fsync(file.fileno())
        os.rename(temporary, path)
        sync_directory(path.parent)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"{path}: cannot be written ({str(error).splitlines()[0]})") from None


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill an unsharded ``model``.

    Raises:
        UserError: naming what is missing, unexpected, misshapen or of another dtype; nothing is loaded then.
    """
    state = read_weights(path)
    expected = {name: Spec.of(value) for name, value in model.state_dict().items()}
    problems = differences(expected, {name: Spec.of(value) for name, value in state.items()})
    if problems:
        more = f"; and {len(problems) - _NAMED} more" if len(problems) > _NAMED else ""
        raise UserError(f"{path} does not fit the model: {'; '.join(problems[:_NAMED])}{more}")
    model.load_state_dict(state)
