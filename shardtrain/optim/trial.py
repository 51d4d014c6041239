"""Try an optimizer before its first step: is it right on pieces of parameters?

An optimizer must give each piece of a parameter the values that it gives the whole parameter. SGD and Adam
treat every element by itself. One that looks at a parameter's shape (Adafactor, Muon, Shampoo) or norm (LARS,
LAMB) would silently compute something else, unless parameters are whole. One that looks at all parameters
together (LBFGS) always would. A name does not tell. So a new instance with the same options makes three steps
on two matrices, and another one on what one rank of two would hold of them. What both have must be equal.
"""

from __future__ import annotations

import warnings
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from shardtrain.layout import Policy, cut_of

# Cut inside a row and inside a block of 8-bit states; large enough for optimizers that factor their state.
_SHAPES = ((256, 257), (257, 300))
_LR = 1.0  # since a warm-up begins at 0, where nothing could be compared


def refuse_unless_right_on_pieces(
    optimizer: torch.optim.Optimizer, device: torch.device, layout: Policy
) -> None:
    """Raise ValueError unless ``optimizer`` treats pieces, cut by ``layout``, like whole parameters.

    Warns (UserWarning) of an optimizer that cannot be tried.
    """
    name = type(optimizer).__name__
    if any(kind.__module__.startswith("torch.distributed.") for kind in type(optimizer).__mro__):
        raise ValueError(
            f"{name} owns, averages or broadcasts whole parameters itself, of which a rank holds pieces: "
            "use the optimizer that it wraps, such as torch.optim.AdamW; its state is sharded already"
        )
    # The trial needs values, even where the model has none (FakeTensorMode).
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        wholes = [torch.randn(shape, device="cpu").to(device) for shape in _SHAPES]
        try:
            expected = _three_steps(optimizer, wholes)
        except Exception as error:
            warnings.warn(
                f"{name} cannot be tried on pieces of parameters ({type(error).__name__}: {error}). Its "
                "steps are right on a sharded model if each element's update depends on that element alone. "
                "Otherwise leave the parameters whole with shard(..., ignored=...), or use another optimizer",
                stacklevel=2,
            )
            return
        reason = _why_not(optimizer, wholes, expected, layout)
    if reason:
        raise ValueError(
            f"{name} cannot step on a sharded model: {reason}. A rank holds pieces of parameters. For an "
            "optimizer that looks at one whole parameter at a time use shard(..., layout='whole'). One that "
            "looks at all parameters together cannot be used: take SGD or AdamW, or leave the parameters "
            "whole with shard(..., ignored=...)"
        )


def _why_not(
    optimizer: torch.optim.Optimizer, wholes: list[Tensor], expected: list[Tensor], layout: Policy
) -> str:
    """Return how steps on pieces differ from the ``expected`` values; an empty text if they do not."""
    cut = cut_of(layout, world=2)([whole.numel() for whole in wholes], 1)
    intervals = cut.pieces(0 if cut.whole else 1)
    pieces = []
    for whole, (start, stop, _) in zip(wholes, intervals, strict=True):
        part = whole.flatten()[start:stop]
        pieces.append(part.view_as(whole) if part.numel() == whole.numel() else part.view(-1, 1))
    try:
        results = _three_steps(optimizer, pieces)
    except Exception as error:
        return f"it refuses a piece of a parameter ({error})"
    for result, after, whole, (start, stop, _) in zip(results, expected, cycle(wholes), cycle(intervals)):
        before, wanted = (tensor.flatten()[start:stop] for tensor in (whole, after))
        rounding = 1e-3 * (after - whole).abs().max() + 1e-6 * before.abs()
        if not ((result.flatten() - wanted).abs() <= rounding).all():
            return "it gives a piece of a parameter other values than the whole one"
    return ""


def _three_steps(optimizer: torch.optim.Optimizer, values: list[Tensor]) -> list[Tensor]:
    """Return ``values`` after three steps of a new optimizer, once per distinct kind of parameter group."""
    torch.default_generator.manual_seed(0)
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if isinstance(options.get("lr"), float | int):
            options["lr"] = _LR
        kinds[str(options)] = {**options, "params": [nn.Parameter(value.clone()) for value in values]}
    trial = type(optimizer)(list(kinds.values()))  # type: ignore[call-arg]
    params = [param for group in trial.param_groups for param in group["params"]]
    for scale in (1.0, -0.3, 0.5):
        for param, value in zip(params, cycle(values)):
            if value.numel():  # an empty piece gets no gradient, as in training
                param.grad = scale * value.square() + 0.1
        _step_unhooked(trial)
    return [param.detach() for param in params]


def _step_unhooked(trial: torch.optim.Optimizer) -> None:
    """Make a step without the hooks that torch calls for every optimizer, which are users'."""
    step: Any = type(trial).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # see Optimizer.profile_hook_step
    step(trial, lambda: torch.zeros(()))
