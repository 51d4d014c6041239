"""Blocks that are compiled, or compute activations again in backward, before a model is sharded.

Both replace a block's ``forward``, inside of the hooks that
`shard` adds later. So recomputation gathers nothing more, and the compiler sees full parameters alone::

    hooks before     gather, cast inputs
      checkpoint       run now, keep the inputs alone; run again in backward, once the unit is gathered
        compiled         the block's own forward
    hooks after      announce backward, release
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardtrain import blocks, torch_private
from shardtrain.config.errors import UserError
from shardtrain.device import is_accelerator


def compile_blocks(
    model: nn.Module, device: torch.device, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Apply ``torch.compile`` to each block of ``model``; UserError if inductor lacks its compiler."""
    chosen = _blocks(model, "compile")
    if backend == "inductor":
        require_inductor(device)
    # Blocks of one class share the code that torch compiles, once per size, in training and in evaluation.
    config = torch_private.config
    config.recompile_limit = max(config.recompile_limit, 8 * len(chosen))
    for block in chosen.values():
        block.forward = torch.compile(block.forward, backend=backend)
        if is_accelerator(device):
            block.forward = partial(_with_ordered_pixels, block.forward)


def _with_ordered_pixels(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``forward`` with images of a single pixel in channels_last, by views.

    Strides (C, 1, 1, 1) of such an image are those of both orders. Inductor computes convolutions in
    channels_last and asserts that order of a filter's gradient. For an image with these strides cuDNN returns
    the other, also of a plain model.
    """
    return forward(*torch_private.tree_map(_with_ordered_pixel, args), **kwargs)


def _with_ordered_pixel(arg: Any) -> Any:
    if isinstance(arg, Tensor) and arg.ndim == 4 and arg.shape[2:] == (1, 1) and arg.is_contiguous():
        return arg.view(arg.shape[0], 1, 1, arg.shape[1]).permute(0, 3, 1, 2)
    return arg


def checkpoint_blocks(model: nn.Module) -> None:
    """Keep only each block's inputs for backward and compute the rest again: the same bits in less memory.

    Random draws (dropout) repeat, and BatchNorm counts each batch once. Raises ValueError in backward if a
    block's inputs or a buffer other than a BatchNorm's have changed in place, since results would differ.
    """
    for name, block in _blocks(model, "activation_checkpoint").items():
        block.forward = partial(_checkpointed, name, block, block.forward)


def _blocks(model: nn.Module, key: str) -> dict[str, nn.Module]:
    chosen = blocks(model)
    if not chosen:
        raise UserError(f"parallel.{key}=true: the model has no block; leave the key out")
    return chosen


def _checkpointed(name: str, block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    norms = [module for module in block.modules() if isinstance(module, torch_private.NormBase)]
    statistics = set[Tensor]()
    for norm in norms:
        statistics.update(norm.buffers(recurse=False))
    needed = [leaf for leaf in torch_private.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    needed += [buffer for buffer in block.buffers() if buffer not in statistics]
    versions = [(tensor, tensor._version) for tensor in needed if not tensor.is_inference()]

    @contextmanager
    def again() -> Iterator[None]:
        if any(tensor._version != version for tensor, version in versions):
            raise ValueError(
                f"inputs or buffers of block {name} changed in place after it began to compute, so that "
                "computing it again would begin elsewhere; make that operation not in place, or leave "
                "parallel.activation_checkpoint out"
            )
        kept_by = [(norm, dict(norm._buffers)) for norm in norms]
        for norm, buffers in kept_by:  # update copies
            norm._buffers = {key: value if value is None else value.clone() for key, value in buffers.items()}
        try:
            yield
        finally:
            for norm, buffers in kept_by:
                norm._buffers = buffers

    contexts = lambda: (nullcontext(), again())  # noqa: E731
    # Inputs are arguments, since torch saves the random states of the devices that it finds in arguments.
    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def require_inductor(device: torch.device) -> None:
    """Raise UserError if inductor lacks its compiler: a C++ compiler for the CPU, Triton for a GPU."""
    try:
        if device.type == "cpu":
            torch_private.get_cpp_compiler()
        elif not torch_private.has_triton():
            raise UserError(f"parallel.compile=true for {device.type} needs Triton, which does not work here")
    except torch_private.InvalidCxxCompiler:
        raise UserError(
            "parallel.compile=true for the CPU needs a C++ compiler, and there is none: install g++, or name "
            "one in CXX"
        ) from None
