"""Keep the engine right under what users bring: their hooks, compilers, transforms and optimizers.

Autograd would call a user's post-accumulate hook with this rank's full gradient, before the reduction. So
such hooks are replaced when a backward begins, and each is called once when a backward that reduces ends.
Then the parameter shows its piece with the reduced gradient, and the hook may step an optimizer.

An optimizer must give each piece of a parameter the values that it gives the whole parameter. SGD and Adam
treat every element by itself. One that looks at a parameter's shape (Adafactor, Muon, Shampoo) or norm (LARS,
LAMB) would silently compute something else, unless parameters are whole. One that looks at all parameters
together (LBFGS) always would. An optimizer's name does not tell, so it is tried before its first step. A new
instance with the same options makes three steps on two matrices, and another one on what one rank of two
would hold of them. The elements that both have must be equal.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Iterable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from shardtrain.engine.shard import Segment
from shardtrain.layout import Policy, cut_of

Hook = Callable[..., None]

# Cut inside a row and inside a block of 8-bit states; large enough for optimizers that factor their state.
_SHAPES = ((256, 257), (257, 300))
_WRAPPERS = (
    "torch.nn.parallel.",
    "torch.distributed.fsdp.",
    "torch.distributed._composable.",
    "torch.distributed.tensor.",
)
_LR = 1.0  # since a warm-up begins at 0, where nothing could be compared


class Postponed:
    """Stand in for a user's hook while autograd runs, and do nothing."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, param: torch.Tensor) -> None:
        pass


def postpone(param: nn.Parameter) -> None:
    """Replace users' hooks of ``param`` by `Postponed` ones. Their handles stay valid."""
    if hooks := param._post_accumulate_grad_hooks:
        for number, hook in hooks.items():
            if not isinstance(hook, Postponed):
                hooks[number] = Postponed(hook)


def call_postponed(params: Iterable[nn.Parameter]) -> None:
    """Call the postponed hooks of ``params``, each once."""
    for param in dict.fromkeys(params):
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, Postponed):
                hook.hook(param)


def uncompiled(hook: Hook) -> Hook:
    """Return ``hook`` such that ``torch.compile`` breaks the graph there and runs it uncompiled.

    Uses Dynamo only while it compiles or runs compiled code: importing Dynamo takes seconds.
    """
    broken = _disable_dynamo(hook)

    @functools.wraps(hook)
    def either(*args: Any) -> None:
        if torch.compiler.is_compiling() or get_eval_frame_callback():
            broken(*args)
        else:
            hook(*args)

    return either


def graph_break(call: Callable[..., Any]) -> Callable[..., Any]:
    """Have ``torch.compile`` break the graph at ``call``, and compile what it calls."""
    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    return call


def modules_unless_wrapped(module: nn.Module, *args: Any, **options: Any) -> Any:
    """Return ``module.named_modules()``. Raises ValueError if torch's data parallel wrappers ask for them.

    They ask through any model that contains ``module``, before they broadcast or replace its parameters.
    """
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] == nn.Module.__module__ and frame.f_back:
        frame = frame.f_back
    if frame.f_globals["__name__"].startswith(_WRAPPERS):
        raise ValueError(
            "a sharded model reduces its gradients itself: do not wrap it, or a model that contains it, in "
            "DistributedDataParallel, FSDP or DTensors, and keep accelerate, Trainer or Fabric from doing so"
        )
    return type(module).named_modules(module, *args, **options)


def refuse_transforms() -> None:
    """Raise ValueError inside ``torch.func``'s transforms, which would see pieces instead of parameters."""
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        raise ValueError(
            "a sharded model cannot run inside jvp, vmap or another transform of torch.func: transform an "
            "unsharded copy of it, with the weights of full_state_dict(model)"
        )


def refuse_unless_right_on_pieces(optimizer: torch.optim.Optimizer, segment: Segment) -> None:
    """Raise ValueError unless ``optimizer`` treats pieces, such as ``segment``'s, like whole parameters.

    Warns (UserWarning) of an optimizer that cannot be tried.
    """
    name = type(optimizer).__name__
    # The trial needs values, even where the model has none (FakeTensorMode).
    with _disable_current_modes(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        wholes = [torch.randn(shape, device="cpu").to(segment.local.device) for shape in _SHAPES]
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
        reason = _why_not(optimizer, wholes, expected, "whole" if segment.layout.whole else "even")
        together = reason and _why_not(optimizer, wholes, expected, "whole")
    if reason:
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


def _why_not(
    optimizer: torch.optim.Optimizer, wholes: list[Tensor], expected: list[Tensor], layout: Policy
) -> str:
    """Return how steps on pieces differ from the ``expected`` values; an empty text if they do not."""
    cut = cut_of(layout, world=2)([whole.numel() for whole in wholes], 1)
    held, pieces = cut.pieces(0 if cut.whole else 1), []
    for whole, (start, stop, _) in zip(wholes, held, strict=True):
        part = whole.flatten()[start:stop]
        pieces.append(part.view_as(whole) if part.numel() == whole.numel() else part.view(-1, 1))
    try:
        results = _three_steps(optimizer, pieces)
    except Exception as error:
        return f"it refuses a piece of a parameter ({error})"
    for result, after, whole, (start, stop, _) in zip(results, expected, cycle(wholes), cycle(held)):
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
        step_unhooked(trial)
    return [param.detach() for param in params]


def step_unhooked(trial: torch.optim.Optimizer) -> None:
    """Make a step without the hooks that torch calls for every optimizer, which are users'."""
    step: Any = type(trial).step
    step = step.__wrapped__ if getattr(step, "hooked", False) else step  # see Optimizer.profile_hook_step
    step(trial, lambda: torch.zeros(()))
