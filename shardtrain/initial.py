"""Initial values: of models that have them, and of deferred ones, which have a tape to play instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardtrain.tape import Tape

_TAPE = "_shardtrain_tape"

# They read memory without an operation that the mode would see.
_PEEKS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.__repr__}

Model = TypeVar("Model", bound=nn.Module)


class _Peeks(TorchFunctionMode):
    """Tells the tape who looks at memory without an operation."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PEEKS:
            self._tape.peek(args[0])
        return func(*args, **(kwargs or {}))


def deferred(build: Callable[..., Model], *args: Any, **kwargs: Any) -> Model:
    """``build(*args, **kwargs)`` with its parameters on the meta device, to be given to `shard`.

    `shard` then computes the initial values unit by unit, on rank 0, and they are bit for bit those that
    ``build`` would have given without `deferred`. Random number generators are left where ``build`` leaves
    them. Never more than the largest unit and 64 MiB of values are whole on a rank, so a model need not fit
    in its memory. Until `shard` the parameters can be converted (``.to(dtype)``, channels_last), but have no
    values to look at or to change. Buffers have theirs.
    """
    tape = Tape()
    with tape, _Peeks(tape):
        model = build(*args, **kwargs)
    tape.defer(model)
    model.__dict__[_TAPE] = tape
    return model


class Initial:
    """The parameters' values before they are cut, and where they are to lie.

    ``device``: None leaves parameters where they are, and deferred ones on the CPU.
    """

    def __init__(self, module: nn.Module, device: torch.device | None) -> None:
        self._device = device
        self._tapes = [m.__dict__[_TAPE] for m in module.modules() if _TAPE in m.__dict__]

    def device(self, tensor: Tensor) -> torch.device:
        found = torch.device("cpu") if self._tape(tensor) else tensor.device
        return self._device if self._device is not None and found.type != "meta" else found

    def value(self, name: str, param: nn.Parameter) -> Tensor:
        tape = self._tape(param)
        return param.detach() if tape is None else tape.value(name, param)

    def _tape(self, param: Tensor) -> Tape | None:
        return next((tape for tape in self._tapes if param in tape), None)


def forget(module: nn.Module) -> None:
    """Leave no tape behind."""
    for part in module.modules():
        part.__dict__.pop(_TAPE, None)
