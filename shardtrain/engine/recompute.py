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

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.precision import tensors_in
from shardtrain.engine.unit import Unit

Forward = Callable[..., Any]  # takes the module, then what the module takes

_GRAPH_MODES = ("reduce-overhead", "max-autotune")  # of torch.compile, that capture CUDA graphs


def compile_units(
    module: nn.Module,
    *,
    backend: str | Callable[..., Any] = "inductor",
    fullgraph: bool = True,
    **options: Any,
) -> None:
    """Run each unit of a sharded module by ``torch.compile``; each is compiled when it first runs.

    Units of one class with the same shapes and settings share what is compiled. With `checkpoint_activations`
    too, compile first.

    Args:
        module: what `shard` returned.
        backend, options: as for ``torch.compile``.
        fullgraph: refuse a unit that does not become one graph; else it falls apart into several.

    Raises:
        ValueError: there are no units; a unit is compiled or checkpointed already, or holds parameters of
            the root; inductor lacks what it needs; CUDA graphs are asked for. At the first forward: a unit
            is not one graph.
    """
    engine = engine_of(module)
    units = _innermost_units(engine, "compile")
    for unit in units:
        _refuse_compiling(unit, engine)
    if options.get("mode") in _GRAPH_MODES or (options.get("options") or {}).get("triton.cudagraphs"):
        raise ValueError(
            "CUDA graphs read parameters where they lay when the graph was captured, but released units get "
            "new memory: compile without triton.cudagraphs, in mode 'default' or 'max-autotune-no-cudagraphs'"
        )
    if backend == "inductor":
        require_inductor(engine.device)
    kinds: dict[object, Compiled] = {}
    for unit in units:
        forward = _forward_of(unit)
        shapes = tuple(shape for segment in unit.segments for shape in segment.shapes)
        kind = (forward, shapes, repr(unit.module))  # settings too: each probability is compiled on its own
        if kind not in kinds:
            name = f"{type(unit.module).__name__}_{len(kinds)}"
            run = torch.compile(_entry(forward, name), backend=backend, fullgraph=fullgraph, **options)
            kinds[kind] = Compiled(run, unit.title)
        _set_forward(unit, kinds[kind])


def checkpoint_activations(module: nn.Module) -> None:
    """Keep each unit's inputs for backward and compute the rest again: less memory, one more forward.

    Results are bit-equal: random draws (dropout) repeat, and BatchNorm counts each batch once. ``module`` is
    what `shard` returned.

    Raises:
        ValueError: there are no units, or they are checkpointed already. While training: a unit changes its
            inputs, or a buffer other than a BatchNorm's, so that computing again would differ.
    """
    units = _innermost_units(engine_of(module), "checkpoint")
    for unit in units:
        if isinstance(_forward_of(unit), Checkpointed):
            raise ValueError(f"the activations of {unit.title} are checkpointed already")
    for unit in units:
        _set_forward(unit, Checkpointed(_forward_of(unit), unit.title))


@dataclass(frozen=True)
class Compiled:
    """A compiled forward of all units of one kind; ``title``: the first of them."""

    run: Forward
    title: str

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.run(module, *args, **kwargs)
        except torch._dynamo.exc.Unsupported as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise ValueError(
                f"unit {self.title} cannot be compiled as one graph: {reason}; change its forward, compile "
                "with fullgraph=False, or do not compile"
            ) from error


@dataclass(frozen=True)
class Checkpointed:
    """The forward of one unit, whose activations are dropped and computed again in backward."""

    forward: Forward
    title: str

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(module, *args, **kwargs)
        inputs = _versions(tensors_in((args, kwargs)))

        def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return self.forward(module, *args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
            return self._first(module), self._again(module, inputs)

        # Both go in as arguments: that is where torch looks for devices whose random state it is to keep.
        return checkpoint(run, args, kwargs, use_reentrant=False, context_fn=contexts)

    @contextmanager
    def _first(self, module: nn.Module) -> Iterator[None]:
        """Run the first forward inside: refuse a change of buffers that computing again would repeat."""
        names = {
            buffer: f"{name}.{key}" if name else key
            for name, child in module.named_modules()
            if not isinstance(child, _NormBase)
            for key, buffer in child._buffers.items()
            if buffer is not None
        }
        before = _versions(names)
        yield
        for buffer, version in before:
            if buffer._version != version:
                raise ValueError(
                    f"unit {self.title} changes its buffer {names[buffer]} in forward, so that computing it "
                    "again would begin elsewhere; do not checkpoint its activations"
                )

    @contextmanager
    def _again(self, module: nn.Module, inputs: list[tuple[torch.Tensor, int]]) -> Iterator[None]:
        """Run the forward again inside: BatchNorms update copies of their running statistics."""
        if any(tensor._version != version for tensor, version in inputs):
            raise ValueError(
                f"inputs of unit {self.title} were changed in place after it began to compute, so that "
                "computing it again would begin elsewhere; make that operation not in place, or do not "
                "checkpoint activations"
            )
        norms = [child for child in module.modules() if isinstance(child, _NormBase) and child.training]
        kept = [dict(norm._buffers) for norm in norms]
        for norm in norms:
            norm._buffers.update({key: b if b is None else b.clone() for key, b in norm._buffers.items()})
        try:
            yield
        finally:
            for norm, buffers in zip(norms, kept, strict=True):
                norm._buffers.update(buffers)


def require_inductor(device: torch.device) -> None:
    """Require what inductor generates code for.

    Raises ValueError if there is no C++ compiler for the CPU, or no Triton for another device.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type != "cpu":
        if not has_triton():
            raise ValueError(f"compiling for {device.type} needs Triton, which does not work here")
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        raise ValueError(
            "compiling for the CPU needs a C++ compiler, and there is none: install g++, or name one in CXX"
        ) from None


def _innermost_units(engine: Engine, what: str) -> list[Unit]:
    units = [u for u in engine.units[1:] if not any(u.holds(other) for other in engine.units)]
    if not units:
        raise ValueError(f"there is nothing to {what}: the model has no unit besides the root; choose units")
    return units


def _refuse_compiling(unit: Unit, engine: Engine) -> None:
    forward = _forward_of(unit)
    if isinstance(forward, Checkpointed):
        raise ValueError(f"the activations of {unit.title} are checkpointed already: compile first")
    if isinstance(forward, Compiled):
        raise ValueError(f"{unit.title} is compiled already")
    hooked = {module for other in engine.units for module in engine.entrances(other)}
    for name, child in unit.module.named_modules():
        if child in hooked and child is not unit.module:
            raise ValueError(
                f"unit {unit.title} cannot be compiled: parameters of its module {name} are shared with "
                "another unit, and so belong to the root"
            )


def _forward_of(unit: Unit) -> Forward:
    """Return the function behind ``unit.module.forward``."""
    bound = unit.module.forward
    if not isinstance(bound, MethodType) or bound.__self__ is not unit.module:
        raise ValueError(f"the forward of {unit.title} is no method of that module, but {bound!r}")
    return bound.__func__


def _set_forward(unit: Unit, forward: Forward) -> None:
    unit.module.forward = MethodType(forward, unit.module)


def _entry(forward: Forward, name: str) -> Forward:
    """Return ``forward`` behind a code object of its own.

    Torch keeps what it has compiled, the sizes that varied, and a limit of eight compilations per code
    object. All blocks of a ResNet share one, in seven shapes or more, and so do all modules of torch.
    """

    def enter(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return forward(module, *args, **kwargs)

    enter.__code__ = enter.__code__.replace(co_name=name)
    return enter


def _versions(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    """Return each tensor with the number of its changes in place so far."""
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
