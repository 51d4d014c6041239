"""Update matrices and filters by Muon and the rest by AdamW, in one optimizer.

Muon orthogonalises the momentum of each matrix: it replaces ``U S Vᵀ`` by ``U Vᵀ``, so that all directions
change equally. torch's Newton-Schulz does so approximately, in bf16: singular values end between 0.7 and 1.2.
It needs the whole matrix, so shard with ``layout="whole"``: each rank then updates the matrices that it owns,
and communicates nothing. A filter of shape (out, in, height, width) counts as the matrix (out, in · height ·
width). For one matrix ``W`` with gradient ``G``::

    M = momentum · M + (1 - momentum) · G
    O = orthogonalised(momentum · M + (1 - momentum) · G)       Nesterov; otherwise of M alone
    W = W - lr · weight_decay · W - lr · 0.2 · √max(rows, columns) · O

Jordan et al., 2024, "Muon: An optimizer for hidden layers in neural networks",
https://kellerjordan.github.io/posts/muon/. The factor 0.2 √max is that of Liu et al., 2025,
https://arxiv.org/abs/2502.16982: updates are then about as large as AdamW's, so one learning rate and one
weight decay serve both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.optim._muon import _zeropower_via_newtonschulz
from torch.optim.adamw import adamw

# Repeating a·x + b·x³ + c·x⁵ (Jordan et al.) drives singular values towards 1, small ones fast.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST = 1e-7
AVERAGES = ("exp_avg", "exp_avg_sq")  # AdamW's


class Muon(torch.optim.Optimizer):
    """Muon for groups with ``use_muon`` (the default), and AdamW for others.

    `groups` makes those of a model. On matrices it equals torch's Muon with ``match_rms_adamw``.
    """

    @staticmethod
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        """Return the `hidden_matrices` of ``module`` as one group, and the rest for AdamW as another."""
        hidden = set(hidden_matrices(module))
        params = list(module.parameters())
        rest = [param for param in params if param not in hidden]
        groups = {True: [param for param in params if param in hidden], False: rest}
        return [{"params": group, "use_muon": use} for use, group in groups.items() if group]

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        """
        Args:
            params: parameters, or groups of them, each with ``use_muon`` True or False.
            lr, weight_decay: for all groups; decay is decoupled.
            momentum, nesterov: Muon's.
            betas, eps: AdamW's.

        Raises:
            ValueError: a number is out of range, or a group with ``use_muon`` has a parameter below 2-D.
        """
        if not (lr >= 0 and weight_decay >= 0 and eps >= 0):
            raise ValueError(f"lr={lr}, weight_decay={weight_decay}, eps={eps}: expected at least 0")
        if not all(0 <= fraction < 1 for fraction in (momentum, *betas)):
            raise ValueError(f"momentum={momentum}, betas={betas}: expected numbers in [0, 1)")
        shared = {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        super().__init__(params, {**shared, "momentum": momentum, "nesterov": nesterov, "use_muon": True})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        odd = [tuple(param.shape) for param in group["params"] if param.ndim < 2]
        if group["use_muon"] and odd:
            raise ValueError(
                f"Muon steps on matrices and filters, found a parameter of shape {odd[0]}: put it into a "
                "group with use_muon=False (see Muon.groups), or if it is a piece of a matrix, "
                "shard(..., layout='whole')"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter of this rank that has a gradient. Communicates nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group["use_muon"]:
                for param in params:
                    self._step_matrix(param, group)
            elif params:
                self._step_rest(params, group)
        return loss

    def _step_matrix(self, param: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        grad = param.grad
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        assert grad is not None
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        direction = _zeropower_via_newtonschulz(update.flatten(1), COEFFICIENTS, STEPS, SMALLEST)
        lr = float(group["lr"])
        param.mul_(1 - lr * group["weight_decay"])
        param.add_(direction.reshape(param.shape), alpha=-lr * 0.2 * math.sqrt(max(direction.shape)))

    def _step_rest(self, params: list[Tensor], group: dict[str, Any]) -> None:
        for param in params:
            state = self.state[param]
            if not state:
                step = torch.zeros((), dtype=torch.float32, device=param.device)
                state.update({key: torch.zeros_like(param) for key in AVERAGES}, step=step)
            elif state["step"].device != param.device:
                # `load_state_dict` leaves it on the host, where the fused kernel of a device cannot read it.
                state["step"] = state["step"].to(param.device)
        states = [self.state[param] for param in params]
        averages = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        steps = [state["step"] for state in states]
        grads = [param.grad for param in params if param.grad is not None]
        options = {key: group[key] for key in ("lr", "weight_decay", "eps")}
        options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
        options["fused"] = True  # one pass, and no wait of the host for step counts
        adamw(params, grads, averages, squares, [], steps, amsgrad=False, maximize=False, **options)


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Return the weights of linear, convolutional and attention layers, without the first and the last.

    Norms, biases, embeddings, stem and head remain. Their inputs or outputs are no vectors of hidden
    features, and AdamW trains them better (Jordan et al.). Chosen by type and order, not by shape.
    """
    embedded = {m.weight for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    layers = [m for m in module.modules() if isinstance(m, nn.Linear | _ConvNd | nn.MultiheadAttention)]
    weights = dict[nn.Parameter, None]()
    for layer in layers:
        named = layer.named_parameters(recurse=False)
        weights.update(dict.fromkeys(param for name, param in named if name.endswith("weight")))
    return [param for param in [*weights][1:-1] if param not in embedded]
