"""Whether an optimizer can work on pieces: does it treat every element by itself?

A rank holds 1-D pieces of parameters. For SGD or Adam that makes no difference. One that looks at a
parameter's shape (Adafactor, Muon, Shampoo), at norms of it (LARS, LAMB), or at all parameters together
(LBFGS) would silently become another algorithm. Names do not tell; behaviour does. So before an optimizer's
first step, a new one of its class with its options makes three steps on a parameter of 2×3 elements, and
another on the first four of them alone, as rank 0 of two would hold them. They must come to the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

_SHAPE, _PIECE = (2, 3), 4


def refuse_unless_elementwise(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Raise unless every kind of group of ``optimizer`` gives on pieces what it gives on whole parameters.

    Raises:
        ValueError: it does not, with the reason.
    """
    for options in _kinds(optimizer):
        with _disable_current_modes():  # values count here, even where the model has none (FakeTensorMode)
            reason = _why_not(type(optimizer), options, device)
        if reason:
            raise ValueError(
                f"{type(optimizer).__name__} cannot step on a sharded model: {reason}. A rank holds 1-D "
                "pieces of parameters; use an element-wise optimizer such as SGD or AdamW, or leave the "
                "parameters whole with shard(..., ignored=...)"
            )


def _kinds(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """One group's options for each combination of switches; groups often differ in numbers only."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        switches = {k: v for k, v in options.items() if isinstance(v, bool | str | None)}
        kinds.setdefault(repr(switches), options)
    return list(kinds.values())


def _why_not(kind: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device) -> str:
    values = torch.linspace(-1.0, 2.0, 6, device=device)
    with torch.random.fork_rng(devices=[]):
        try:
            whole = _three_steps(kind, options, values.view(_SHAPE))
        except Exception:  # it needs more than we know, so nothing is known about it
            return ""
        try:
            piece = _three_steps(kind, options, values[:_PIECE])
        except Exception as error:
            return f"it refuses a piece of a parameter ({error})"
    if torch.allclose(whole.flatten()[:_PIECE], piece, rtol=1e-4, atol=1e-6, equal_nan=True):
        return ""
    return "it gives a piece of a parameter other values than the whole one"


def _three_steps(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], values: torch.Tensor
) -> torch.Tensor:
    torch.default_generator.manual_seed(0)
    param = nn.Parameter(values.clone())
    optimizer = kind([{**options, "params": [param]}])  # type: ignore[call-arg]
    for scale in (1.0, -0.3, 0.5):
        param.grad = scale * values.square() + 0.1
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    return param.detach()
