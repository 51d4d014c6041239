"""The check that an optimizer can work on pieces: each piece must get what it would get as part of the whole.

A rank holds pieces of parameters. SGD and Adam treat every element by itself, so that makes no difference to
them. An optimizer that looks at a parameter's shape (Adafactor, Muon, Shampoo) or at its norm (LARS, LAMB)
would silently become another algorithm, unless parameters are whole; one that looks at all parameters
together (LBFGS) would in any case. Names do not tell; behaviour does. So before an optimizer's first step, a
new one of its class with its options makes three steps on two matrices, and another one on what one
rank of two would hold of them. On what both have they must come to the same. The matrix is larger than the
thresholds below which factoring optimizers do not factor, and the trial has a learning rate of its own, since
a warm-up begins at 0. An optimizer that cannot be tried so gets a warning.

It has its own file because it knows nothing of hooks, and ``hooks.py`` would exceed 400 lines with it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from shardtrain.engine.shard import shape_at_rest, shown
from shardtrain.layout import Policy, cut_of

_SHAPES = ((256, 257), (257, 300))  # cut within a row, and within a block of 8-bit states
_LR = 1.0


class _NotTried(Exception):
    """The optimizer makes no step on whole parameters, by what is known of it."""


def refuse_unless_right_on_pieces(
    optimizer: torch.optim.Optimizer, device: torch.device, layout: Policy
) -> None:
    """Raise ValueError unless every group of ``optimizer`` treats pieces as it treats whole parameters.

    Warns of an optimizer that cannot be tried.
    """
    name = type(optimizer).__name__
    for options in _kinds(optimizer):
        with _disable_current_modes():  # values count here, even where the model has none (FakeTensorMode)
            try:
                reason = _why_not(type(optimizer), options, device, layout)
                if not reason:
                    continue
                together = _why_not(type(optimizer), options, device, "whole")
            except _NotTried as untried:
                warnings.warn(
                    f"{name} cannot be tried on pieces of parameters ({untried}), so nothing tells whether "
                    "its steps are right on a sharded model. They are if each element's update depends on "
                    "that element alone. If it takes norms or shapes of parameters or of the whole gradient, "
                    "leave the parameters whole with shard(..., ignored=...), or use another optimizer",
                    stacklevel=2,
                )
                return
        advice = (
            "A rank holds some of the parameters, or pieces of them, and this optimizer looks at all "
            "together: use one such as SGD or AdamW"
            if together
            else "A rank holds pieces of parameters, and this optimizer looks at one whole parameter at "
            "a time: use shard(..., layout='whole'), or an element-wise optimizer such as SGD or AdamW"
        )
        raise ValueError(
            f"{name} cannot step on a sharded model: {reason}. {advice}, or leave the "
            "parameters whole with shard(..., ignored=...)"
        )


def _kinds(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the options of one group of each kind: groups differ in switches, and in which numbers are 0."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if isinstance(options.get("lr"), float | int):
            options["lr"] = _LR
        switches = {k: v for k, v in options.items() if isinstance(v, bool | str | None)}
        zeros = {k for k, v in options.items() if isinstance(v, float | int) and v == 0}
        kinds.setdefault(f"{switches} {sorted(zeros)}", options)
    return list(kinds.values())


def _why_not(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], device: torch.device, layout: Policy
) -> str:
    """Return in what way a trial on pieces failed; empty if it went well."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        wholes = [torch.randn(shape, device="cpu").to(device) for shape in _SHAPES]
        cut = cut_of(layout, world=2)([whole.numel() for whole in wholes], 1)
        held = cut.pieces(0 if cut.whole else 1)
        pieces = [
            shown(
                whole.flatten()[piece.start : piece.stop],
                shape_at_rest(whole.shape, piece.numel, cut.whole),
                whole.shape,
                whole.stride(),
            )
            for whole, piece in zip(wholes, held, strict=True)
        ]
        try:
            expected = _three_steps(kind, options, wholes)
        except Exception as error:
            raise _NotTried(f"{type(error).__name__}: {error}") from None
        try:
            results = _three_steps(kind, options, pieces)
        except Exception as error:
            return f"it refuses a piece of a parameter ({error})"
    for result, before, whole, piece in zip(results, wholes, expected, held, strict=True):
        wanted, start = (full.flatten()[piece.start : piece.stop] for full in (whole, before))
        rounding = 1e-3 * (whole - before).abs().max() + 1e-6 * start.abs()
        if not ((result.flatten() - wanted).abs() <= rounding).all():
            return "it gives a piece of a parameter other values than the whole one"
    return ""


def _three_steps(
    kind: type[torch.optim.Optimizer], options: Mapping[str, Any], values: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return parameters that start as ``values`` after three steps."""
    torch.default_generator.manual_seed(0)
    params = [nn.Parameter(value.clone()) for value in values]
    optimizer = kind([{**options, "params": params}])  # type: ignore[call-arg]
    for scale in (1.0, -0.3, 0.5):
        for param, value in zip(params, values, strict=True):
            if value.numel():  # nothing is updated where nothing is
                param.grad = scale * value.square() + 0.1
        optimizer.step(lambda: torch.zeros(()))  # type: ignore[arg-type, return-value]
    return [param.detach() for param in params]
