"""Whether an optimizer can work on pieces: whether each piece gets what it would get as part of the whole.

A rank holds pieces of parameters. SGD and Adam treat every element by itself, so that makes no difference to
them. An optimizer that looks at a parameter's shape (Adafactor, Muon, Shampoo) or at its norm (LARS, LAMB)
would silently become another algorithm, unless parameters are whole; one that looks at all parameters
together (LBFGS) would in any case. Names do not tell; behaviour does. So before an optimizer's first step, a
new one of its class with its options makes three steps on two parameters, and another one on what rank 0 of
two would hold of them. On what both have they must come to the same.

It has its own file because it knows nothing of hooks, and ``hooks.py`` would exceed 400 lines with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shardtrain.engine.shard import shown
from shardtrain.layout import Policy, cut_of

_SHAPES = ((2, 3), (2, 1))  # rank 0 of two holds the first four elements, or the first parameter


def refuse_unless_right_on_pieces(
    optimizer: torch.optim.Optimizer, device: torch.device, layout: Policy
) -> None:
    """Raise ValueError unless every group of ``optimizer`` treats pieces as it treats whole parameters."""
    for options in _kinds(optimizer):
        with _disable_current_modes():  # values count here, even where the model has none (FakeTensorMode)
            reason = _why_not(type(optimizer), options, device, layout)
            if not reason:
                continue
            together = _why_not(type(optimizer), options, device, "whole")
        advice = (
            "A rank holds some of the parameters, or pieces of them, and this optimizer looks at all "
            "together: use one such as SGD or AdamW"
            if together
            else "A rank holds 1-D pieces of parameters, and this optimizer looks at one whole parameter at "
            "a time: use shard(..., layout='whole'), or an element-wise optimizer such as SGD or AdamW"
        )
        raise ValueError(
            f"{type(optimizer).__name__} cannot step on a sharded model: {reason}. {advice}, or leave the "
            "parameters whole with shard(..., ignored=...)"
        )


def _kinds(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return one group's options per combination of switches; groups often differ in numbers only."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        switches = {k: v for k, v in options.items() if isinstance(v, bool | str | None)}
        kinds.setdefault(repr(switches), options)
    return list(kinds.values())


def _why_not(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device, layout: Policy
) -> str:
    values = [torch.linspace(-1.0, 2.0, 6, device=device), torch.linspace(0.5, -1.0, 2, device=device)]
    wholes = [flat.view(shape) for flat, shape in zip(values, _SHAPES, strict=True)]
    cut = cut_of(layout, world=2)([flat.numel() for flat in values], 1)
    shapes = [shape if cut.whole else (len(flat),) for shape, flat in zip(_SHAPES, values, strict=True)]
    pieces = [
        shown(flat[piece.start : piece.stop], shape, (shape[-1], 1))
        for flat, shape, piece in zip(values, shapes, cut.pieces(0), strict=True)
    ]
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _three_steps(kind, options, wholes)
        except Exception:  # it needs more than we know, so nothing is known about it
            return ""
        try:
            piece = _three_steps(kind, options, pieces)
        except Exception as error:
            return f"it refuses a piece of a parameter ({error})"
    if torch.allclose(whole[: len(piece)], piece, rtol=1e-4, atol=1e-6, equal_nan=True):
        return ""
    return "it gives a piece of a parameter other values than the whole one"


def _three_steps(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return parameters that start as ``values`` after three steps, end to end."""
    torch.default_generator.manual_seed(0)
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = kind([{**options, "params": params}])  # type: ignore[call-arg]
    for scale in (1.0, -0.3, 0.5):
        for param, value in zip(params, values, strict=True):
            if value.numel():  # nothing is updated where nothing is
                param.grad = scale * value.square() + 0.1
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    return torch.cat([param.detach().flatten() for param in params])
