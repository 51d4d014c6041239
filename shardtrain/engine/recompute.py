"""What runs inside a unit's forward: compiled code, and activations computed again for backward.

The engine's hooks are on a unit's module. This file replaces the ``forward`` that they enclose::

    hooks before     gather, cast inputs
      checkpoint       run now, keep the inputs alone; run again in backward, once the unit is gathered
        compiled         the module's own forward
    hooks after      announce backward, release

So nothing is gathered for recomputing, and the compiler never meets a hook of the engine or a parameter that
shows its piece. Each new forward is a bound method of its module, which ``copy.deepcopy`` binds to the copy.
Only units that hold no other unit are concerned, and never the root, whose parameters are whole anyway.

Checkpointing is that of Chen et al., 2016 (https://arxiv.org/abs/1604.06174), with a segment for each unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils.checkpoint import checkpoint

from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.precision import tensors_in
from shardtrain.engine.unit import Unit

Forward = Callable[..., Any]  # takes the module, then what the module takes


def compile_units(
    module: nn.Module,
    *,
    backend: str | Callable[..., Any] = "inductor",
    fullgraph: bool = True,
    **options: Any,
) -> None:
    """Run each unit of a sharded module by ``torch.compile``; each is compiled when it first runs.

    Units of one class with the same shapes and settings share what is compiled. With `checkpoint_activations`
    too, compile first. ``fullgraph``: refuse a unit that does not become one graph. All options are torch's.

    Raises ValueError if there are no units; a unit is compiled or checkpointed already, or holds parameters
    of the root; inductor lacks what it needs; CUDA graphs are asked for. At the first forward: a unit is not
    one graph.
    """
    engine = engine_of(module)
    units = _innermost_units(engine, "compile", _compiled, _checkpointed)
    entrances = {inner for unit in engine.units for inner in engine.entrances(unit)}
    for unit in units:
        for name, child in unit.module.named_modules():
            if name and child in entrances:
                raise ValueError(
                    f"unit {unit.title} cannot be compiled: parameters of its module {name} are shared with "
                    "another unit, and so belong to the root"
                )
    asked = (options.get("options") or {}).get("triton.cudagraphs")
    if asked or options.get("mode") in ("reduce-overhead", "max-autotune"):
        raise ValueError(
            "CUDA graphs read parameters where they lay when the graph was captured, but released units get "
            "new memory: compile without triton.cudagraphs, in mode 'default' or 'max-autotune-no-cudagraphs'"
        )
    if backend == "inductor":
        require_inductor(engine.device)
    kinds: dict[object, Forward] = {}
    for unit in units:
        forward = _forward_of(unit)
        shapes = tuple(member.part.shape for member in unit.members)
        kind = (forward, shapes, repr(unit.module))  # settings too: each probability is compiled on its own
        if kind not in kinds:
            entry = _entry(forward, f"{type(unit.module).__name__}_{len(kinds)}")
            run = torch.compile(entry, backend=backend, fullgraph=fullgraph, **options)
            kinds[kind] = partial(_compiled, run, unit.title)
        unit.module.forward = MethodType(kinds[kind], unit.module)


def checkpoint_activations(module: nn.Module) -> None:
    """Keep each unit's inputs for backward and compute the rest again: less memory, one more forward.

    Results are bit-equal: random draws (dropout) repeat, and BatchNorm counts each batch once. ``module`` is
    what `shard` returned.

    Raises ValueError if there are no units, or they are checkpointed already. In backward: a unit's inputs,
    or a buffer other than a BatchNorm's, have changed in place, so that computing again would differ.
    """
    for unit in _innermost_units(engine_of(module), "checkpoint", _checkpointed):
        forward = partial(_checkpointed, _forward_of(unit), unit.title)
        unit.module.forward = MethodType(forward, unit.module)


def require_inductor(device: torch.device) -> None:
    """Raise ValueError if inductor lacks what compiles its code: a C++ compiler for the CPU, else Triton."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        if device.type == "cpu":
            get_cpp_compiler()
        elif not has_triton():
            raise ValueError(f"compiling for {device.type} needs Triton, which does not work here")
    except InvalidCxxCompiler:
        raise ValueError(
            "compiling for the CPU needs a C++ compiler, and there is none: install g++, or name one in CXX"
        ) from None


def _compiled(run: Forward, title: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the compiled forward of all units of one kind; ``title``: the first of them."""
    try:
        return run(module, *args, **kwargs)
    except torch._dynamo.exc.Unsupported as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ValueError(
            f"unit {title} cannot be compiled as one graph: {reason}; change its forward, compile "
            "with fullgraph=False, or do not compile"
        ) from error


def _checkpointed(forward: Forward, title: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of one unit, drop its activations, and compute them again in backward."""
    if not torch.is_grad_enabled():
        return forward(module, *args, **kwargs)
    needed = [("inputs", tensor) for tensor in tensors_in((args, kwargs))]
    needed += [(f"the buffer {name}", buffer) for name, buffer in _buffers(module, of_norms=False)]
    begun = [(what, tensor, tensor._version) for what, tensor in needed if not tensor.is_inference()]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return forward(module, *args, **kwargs)

    @contextmanager
    def again() -> Iterator[None]:
        for what, tensor, version in begun:
            if tensor._version != version:
                raise ValueError(
                    f"{what} of unit {title} changed in place after it began to compute, so that computing "
                    "it again would begin elsewhere; make that operation not in place, or do not checkpoint "
                    "activations"
                )
        statistics = {name: buffer.clone() for name, buffer in _buffers(module, of_norms=True)}
        with _reparametrize_module(module, statistics):  # BatchNorms update copies
            yield

    # Both go in as arguments: that is where torch looks for devices whose random state it is to keep.
    return checkpoint(run, args, kwargs, use_reentrant=False, context_fn=lambda: (nullcontext(), again()))


def _buffers(module: nn.Module, of_norms: bool) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers of all BatchNorms in ``module`` with their names, or all others."""
    children = [item for item in module.named_modules() if isinstance(item[1], _NormBase) == of_norms]
    return [item for name, child in children for item in child.named_buffers(name, recurse=False)]


def _innermost_units(engine: Engine, what: str, *before: Forward) -> list[Unit]:
    """Return the units that hold no other one; refuse if forwards of theirs run one of ``before``."""
    units = [u for u in engine.units[1:] if not any(u.holds(other) for other in engine.units)]
    if not units:
        raise ValueError(f"there is nothing to {what}: the model has no unit besides the root; choose units")
    for unit in units:
        run = getattr(_forward_of(unit), "func", None)
        if run in before:
            done = "compiled" if run is _compiled else "checkpointed"
            raise ValueError(f"{unit.title} is {done} already: compile units once, then checkpoint them once")
    return units


def _forward_of(unit: Unit) -> Forward:
    """Return the function behind ``unit.module.forward``."""
    bound = unit.module.forward
    if not isinstance(bound, MethodType) or bound.__self__ is not unit.module:
        raise ValueError(f"the forward of {unit.title} is no method of that module, but {bound!r}")
    return bound.__func__


def _entry(forward: Forward, name: str) -> Forward:
    """Return ``forward`` behind a code object of its own.

    Torch keeps what it has compiled, the sizes that varied, and a limit of eight compilations per code
    object. All blocks of a ResNet share one, in seven shapes or more, and so do all modules of torch.
    """

    def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    enter.__code__ = enter.__code__.replace(co_name=name)
    return enter
