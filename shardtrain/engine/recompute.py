"""Compile units, and checkpoint activations: both replace what runs inside a unit's forward.

The engine's hooks are on a unit's module. This file replaces the ``forward`` between them::

    hooks before     gather, cast inputs
      checkpoint       run now, keep the inputs alone; run again in backward, once the unit is gathered
        compiled         the module's own forward
    hooks after      announce backward, release

So recomputation gathers nothing more, and the compiler never sees a hook of the engine or a parameter that
shows its piece. Each new forward is a bound method of its module, which ``copy.deepcopy`` binds to the copy.
Only units that contain no other unit are changed, and never the root.

Checkpointing is that of Chen et al., 2016 (https://arxiv.org/abs/1604.06174), with one segment per unit.
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

from shardtrain.engine.hooks import Engine, engine_of, is_entrance
from shardtrain.engine.precision import tensors_in
from shardtrain.engine.unit import Unit

Forward = Callable[..., Any]  # called with the module, then its inputs


def compile_units(
    module: nn.Module,
    *,
    backend: str | Callable[..., Any] = "inductor",
    fullgraph: bool = True,
    **options: Any,
) -> None:
    """Apply ``torch.compile`` to each unit of a sharded module. A unit is compiled when it first runs.

    Units of one class with the same shapes and settings share compiled code. To use `checkpoint_activations`
    too, compile first. ``fullgraph``: refuse a unit that does not become one graph. All options are torch's.

    Raises ValueError if there are no units, if a unit is compiled or checkpointed already or holds parameters
    of the root, if inductor lacks a compiler, or if CUDA graphs are asked for; at the first forward, if a
    unit does not become one graph.
    """
    engine = engine_of(module)
    units = _innermost_units(engine, "compile", _compiled, _checkpointed)
    for unit in units:
        for name, child in unit.module.named_modules():
            if name and is_entrance(child):
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
        kind = (forward, shapes, repr(unit.module))  # `repr` has settings, such as dropout's probability
        if kind not in kinds:
            entry = _entry(forward, f"{type(unit.module).__name__}_{len(kinds)}")
            run = torch.compile(entry, backend=backend, fullgraph=fullgraph, **options)
            kinds[kind] = partial(_compiled, run, unit.title)
        unit.module.forward = MethodType(kinds[kind], unit.module)


def checkpoint_activations(module: nn.Module) -> None:
    """Keep only each unit's inputs for backward and recompute the rest: less memory, one more forward.

    Results are bit-equal: random draws (dropout) repeat, and BatchNorm counts each batch once. ``module`` is
    what `shard` returned.

    Raises ValueError if there are no units, or if they are checkpointed already; in backward, if a unit's
    inputs or a buffer other than a BatchNorm's have changed in place, since recomputation would differ.
    """
    for unit in _innermost_units(engine_of(module), "checkpoint", _checkpointed):
        forward = partial(_checkpointed, _forward_of(unit), unit.title)
        unit.module.forward = MethodType(forward, unit.module)


def require_inductor(device: torch.device) -> None:
    """Raise ValueError if inductor lacks its compiler: a C++ compiler for the CPU, Triton for a GPU."""
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
    """Run the compiled forward that units of one kind share. ``title`` names the first of them."""
    try:
        return run(module, *args, **kwargs)
    except torch._dynamo.exc.Unsupported as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ValueError(
            f"unit {title} cannot be compiled as one graph: {reason}; change its forward, compile "
            "with fullgraph=False, or do not compile"
        ) from error


def _checkpointed(forward: Forward, title: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of one unit, drop its activations, and recompute them in backward."""
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

    # Both are arguments, since torch saves the random states of the devices that it finds in arguments.
    return checkpoint(run, args, kwargs, use_reentrant=False, context_fn=lambda: (nullcontext(), again()))


def _buffers(module: nn.Module, of_norms: bool) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers of all BatchNorms in ``module`` with their names, or all others."""
    children = [item for item in module.named_modules() if isinstance(item[1], _NormBase) == of_norms]
    return [item for name, child in children for item in child.named_buffers(name, recurse=False)]


def _innermost_units(engine: Engine, what: str, *before: Forward) -> list[Unit]:
    """Return the units that contain no other. Raises ValueError if a forward runs one of ``before``."""
    names = [unit.name for unit in engine.units]
    units = [u for u in engine.units[1:] if not any(name.startswith(f"{u.name}.") for name in names)]
    if not units:
        raise ValueError(f"nothing to {what}: the model has no unit besides the root; use units='blocks'")
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
    """Return ``forward`` wrapped in a function with its own code object.

    Per code object torch keeps compiled code and dynamic sizes, and allows eight compilations. All blocks of
    a ResNet share one code object, in seven shapes or more.
    """

    def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    enter.__code__ = enter.__code__.replace(co_name=name)
    return enter
