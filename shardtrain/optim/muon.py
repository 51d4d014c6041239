"""Muon for matrices and filters, AdamW for the rest, as one optimizer.

Muon orthogonalises each matrix's momentum: from ``U S Vᵀ`` it makes ``U Vᵀ``, so that all directions of a
matrix are moved alike. It must see the whole matrix, so shard with ``layout="whole"``: each rank then steps
on the matrices that it owns, and nothing is communicated. A filter of shape (out, in, height, width) is the
matrix (out, in · height · width). One matrix ``W``, gradient ``G``::

    M = momentum · M + (1 - momentum) · G
    O = orthogonalised(momentum · M + (1 - momentum) · G)       Nesterov; without it of M alone
    W = W - lr · weight_decay · W - lr · scale · O

Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/. The scale is Liu et al.'s, 2025, https://arxiv.org/abs/2502.16982:
0.2 · √max(rows, columns) makes an update as large as AdamW's usually are, so one learning rate and one
weight decay do for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim.adamw import adamw

# The polynomial a·x + b·x³ + c·x⁵ of Jordan et al., whose repetition drives singular values towards 1, the
# small ones as fast as may be.
_A, _B, _C = 3.4445, -4.7750, 2.0315

_SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
}


class Muon(torch.optim.Optimizer):
    """Muon on groups with ``use_muon``, which is the default, and AdamW on the others.

    `muon_groups` makes both from a model. On matrices it is ``torch.optim.Muon``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        """
        Args:
            params: parameters, or groups of them, each with ``use_muon`` True or False.
            lr: learning rate of all groups.
            weight_decay: decoupled, of all groups.
            momentum, nesterov: Muon's.
            ns_steps: steps of the Newton-Schulz iteration.
            adjust_lr_fn: Muon's scale, as torch names it: ``"match_rms_adamw"``, or ``"original"``, Jordan et
                al.'s √max(1, rows / columns), which wants learning rates of its own.
            betas, eps: AdamW's.

        Raises:
            ValueError: a number out of range, or a group with ``use_muon`` holds what is no matrix or filter.
        """
        if not (lr >= 0 and weight_decay >= 0 and eps >= 0 and ns_steps >= 1):
            raise ValueError(
                f"lr={lr}, weight_decay={weight_decay}, eps={eps}, ns_steps={ns_steps}: expected at least "
                "0, 0, 0 and 1"
            )
        if not all(0 <= fraction < 1 for fraction in (momentum, *betas)):
            raise ValueError(f"momentum={momentum}, betas={betas}: expected numbers in [0, 1)")
        if adjust_lr_fn not in _SCALES:
            raise ValueError(f"adjust_lr_fn must be one of {', '.join(_SCALES)}, got {adjust_lr_fn!r}")
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
            "use_muon": True,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        odd = [tuple(param.shape) for param in group["params"] if param.ndim < 2]
        if group["use_muon"] and odd:
            raise ValueError(
                f"Muon steps on matrices and filters, found a parameter of shape {odd[0]}: put it into a "
                "group with use_muon=False (see muon_groups), or if it is a piece of a matrix, "
                "shard(..., layout='whole')"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step on every parameter with a gradient: those that this rank owns. Communicates nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            for param in params:
                if not self.state[param]:
                    self.state[param] = _first_state(param, group["use_muon"])
            if group["use_muon"]:
                for param in params:
                    self._step_matrix(param, group)
            elif params:
                self._step_rest(params, group)
        return loss

    def _step_matrix(self, param: Tensor, group: dict[str, Any]) -> None:
        grad, momentum = param.grad, self.state[param]["momentum_buffer"]
        assert grad is not None
        momentum.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        direction = orthogonalised(update.flatten(1), group["ns_steps"])
        lr = float(group["lr"])
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(
            direction.reshape(param.shape), alpha=-lr * _SCALES[group["adjust_lr_fn"]](*direction.shape)
        )

    def _step_rest(self, params: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[param] for param in params]
        adamw(
            params,
            [param.grad for param in params if param.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,  # in one pass, and without asking for the values of the counters
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _first_state(param: Tensor, use_muon: bool) -> dict[str, Tensor]:
    if use_muon:
        return {"momentum_buffer": torch.zeros_like(param)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=param.device),
        "exp_avg": torch.zeros_like(param),
        "exp_avg_sq": torch.zeros_like(param),
    }


def orthogonalised(matrix: Tensor, steps: int) -> Tensor:
    """Nearly ``U Vᵀ`` of ``matrix`` = ``U S Vᵀ``: singular values of about 0.7 to 1.2; bf16, same shape.

    Newton-Schulz: an odd polynomial of a matrix is that polynomial of its singular values. bf16 is enough,
    since it need not converge.
    """
    tall = matrix.size(0) > matrix.size(1)
    wide = matrix.bfloat16().T if tall else matrix.bfloat16()
    wide = wide / wide.norm().clamp(min=1e-7)  # no singular value above 1
    for _ in range(steps):
        gram = wide @ wide.T
        even = torch.addmm(gram, gram, gram, beta=_B, alpha=_C)
        wide = torch.addmm(wide, even, wide, beta=_A)
    return wide.T if tall else wide


def muon_groups(module: nn.Module) -> list[dict[str, Any]]:
    """Groups for `Muon`: the `hidden_matrices` of ``module``, and the rest for AdamW."""
    matrices = set(hidden_matrices(module))
    groups = [
        {"params": [param for param in module.parameters() if (param in matrices) is muon], "use_muon": muon}
        for muon in (True, False)
    ]
    return [group for group in groups if group["params"]]


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Weights of linear, convolutional and attention layers but the first and the last, stem and head.

    What is left are norms, biases, embeddings, stem and head, whose inputs or outputs are not vectors of
    hidden features; they do better with AdamW (Jordan et al.). By type and order, whatever shapes are shown.
    """
    embedded = {m.weight for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    found: dict[nn.Parameter, None] = {}
    for layer in module.modules():
        if isinstance(layer, nn.Linear | _ConvNd | nn.MultiheadAttention):
            held = layer.named_parameters(recurse=False)
            found.update((param, None) for name, param in held if name.endswith("weight"))
    return [param for param in [*found][1:-1] if param not in embedded]
