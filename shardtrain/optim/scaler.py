"""Loss scaling for fp16, with one decision for all ranks."""

from __future__ import annotations

import torch

from shardtrain import comm


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for sharded gradients, over the default process group.

    A rank sees only its pieces, so an overflow shows on one rank alone. All ranks take the largest
    ``found_inf``: they skip the same steps and change their scale alike. One all-reduce of one element in
    each ``unscale_()`` or ``step()``. Use it as torch's, with ``Precision(param=torch.float16)``::

        scaler = shardtrain.GradScaler()  # GradScaler("cpu") on CPUs
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # only to clip in between
        scaler.step(optimizer)
        scaler.update()
    """

    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """What both ways of unscaling come through, that of fused optimizers too."""
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flag = found_inf.clone()  # a rank without gradients has looked at nothing
        for other in found.values():  # gradients may lie elsewhere than losses: in host memory, offloaded
            flag = torch.maximum(flag, other.to(flag.device))
        return {flag.device: comm.all_reduce(flag, "max")}
