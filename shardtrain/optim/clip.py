"""Clipping and loss scaling, by one decision of all ranks."""

from __future__ import annotations

import functools
import math
import weakref

import torch
from torch import Tensor, nn

from shardtrain import comm
from shardtrain.engine.hooks import engine_of
from shardtrain.pieces.piece import Owners, Piece, by_kind, total_norm


def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most ``max_norm``; return the norm before.

    The result is that of ``torch.nn.utils.clip_grad_norm_`` on the unsharded model. torch's function works,
    too, if each rank has a gradient. One all-reduce of at most two elements. ``max_norm=inf`` only measures.

    Returns:
        0-dim tensor on the model's device, equal on all ranks: fp32, or fp64 if gradients are.

    Raises:
        RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; on every rank.
        ValueError: ``norm_type`` is not positive, or gradients wait under `no_sync`.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}")
    engine = engine_of(module)
    engine.require_reduced("clip_grad_norm_()")
    grads = [grad for param in module.parameters() if (grad := param.grad) is not None]
    widest = functools.reduce(torch.promote_types, [s.local.dtype for s in engine.segments], torch.float32)
    owners = Owners(weakref.ref(engine.channel), engine.driver.device, virtual=engine.virtual_count)
    norm = total_norm(grads, norm_type, owners, widest)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(f"the gradient's norm of order {norm_type} is {norm.item()}: nothing was clipped")
    if max_norm != math.inf:
        coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for group in by_kind([grad.plain if isinstance(grad, Piece) else grad for grad in grads]):
            torch._foreach_mul_(group, coefficient.to(group[0].device))
    return norm


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for sharded gradients, over the default process group.

    A rank has only its local shards, so an overflow may occur on one rank alone. All ranks use the maximum of
    ``found_inf``, so they skip the same steps and change their scale alike. Each ``unscale_()`` or ``step()``
    costs one all-reduce of one element. Use it like torch's, with ``Precision(param=torch.float16)``::

        scaler = shardtrain.GradScaler()  # GradScaler("cpu") on CPUs
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only to clip in between
        scaler.step(optimizer)
        scaler.update()
    """

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale this rank's gradients. torch calls it for fused optimizers, too."""
        first_group = next(group for group in optimizer.param_groups if group["params"])
        device = first_group["params"][0].device
        flag = torch.zeros_like(found_inf, device=device)  # since torch does not wait for copies to the host
        by_device = super()._unscale_grads_(optimizer, inv_scale.to(device), flag, allow_fp16)
        flags = [flag.to(found_inf.device, non_blocking=True) for flag in by_device.values()]
        found_anywhere = torch.stack([found_inf, *flags]).amax()
        comm.plain_transport().all_reduce(found_anywhere, "max")
        return {found_inf.device: found_anywhere}
