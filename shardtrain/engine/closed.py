"""Refuse to compute with parameters of units that are closed while a forward of their model runs.

Such a parameter shows this rank's local shard. A parent that computes with it (a penalty, a tied weight, a
size of it) would get another value on each rank, in evaluation and of frozen parameters without any error::

    def forward(self, x):
        return self.head(x) * self.blocks[1].weight.abs().mean()     refused

So the parameters of a closed unit have another class while the root's forward runs: one whose
``__torch_function__`` refuses by name all that would see elements or sizes. What tells neither, such as
``dtype``, passes. A unit that is called opens: its parameters are plain ones. At rest and in backward all are
plain, since there each use would cost a call of Python. Giving an object another class costs 0.1 µs.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import nn
from torch.utils.hooks import RemovableHandle

from shardtrain import torch_private
from shardtrain.engine import user_code
from shardtrain.engine.unit import Unit

# Attributes and methods that tell neither elements nor sizes.
_DESCRIBING = """
    _backward_hooks _base _grad _grad_fn _post_accumulate_grad_hooks _version device dtype grad grad_fn is_cpu
    is_cuda is_leaf is_meta is_mps is_nested is_quantized is_sparse is_sparse_csr is_xpu itemsize layout name
    ndim output_nr requires_grad retains_grad
    __dir__ __format__ __repr__ data_ptr dim element_size get_device is_complex is_conj is_contiguous
    is_floating_point is_inference is_neg is_pinned is_shared is_signed ndimension register_hook
    register_post_accumulate_grad_hook requires_grad_ retain_grad untyped_storage
    """
PASSING = frozenset(_DESCRIBING.split())


class ClosedParameter(nn.Parameter):
    """Be the class of parameters of closed units. ``own``: the class before."""

    closed: weakref.ReferenceType[Closed]
    own: type[nn.Parameter]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of_use(func)
        closed = cls.closed()
        if name not in PASSING and closed is not None:
            leaves = torch_private.tree_leaves((args, kwargs))
            closed.refuse(name, next(leaf for leaf in leaves if isinstance(leaf, ClosedParameter)))
        with torch_private.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Closed:
    """Forbid and allow the use of ``units`` of a model. Only this class writes classes of parameters."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._closed = set[Unit]()
        self._classes: dict[type, type] = {}  # closed ones by the class before
        self._own: dict[type, Any] = {}  # the other way round

    def forbid(self, unit: Unit) -> None:
        """Refuse to compute with parameters of ``unit``, until `allow`."""
        if unit in self._closed:
            return
        self._closed.add(unit)
        for member in unit.members:
            kind = type(member.param)
            member.param.__class__ = self._classes.get(kind) or self._closed_class(kind)

    def allow(self, units: Iterable[Unit]) -> None:
        """Undo `forbid`."""
        for unit in self._closed.intersection(units):
            self._closed.remove(unit)
            for member in unit.members:
                param = member.param
                own = self._own.get(type(param))
                if own is not None:
                    param.__class__ = own

    def _closed_class(self, kind: type) -> type:
        """Return the class of closed parameters of the class ``kind``, a user's own perhaps."""
        closed_class = class_like(kind, ClosedParameter, closed=weakref.ref(self))
        self._classes[kind] = closed_class
        self._own[closed_class] = kind
        return closed_class

    def refuse(self, use: str, param: nn.Parameter) -> NoReturn:
        """Raise ValueError for the ``use`` of ``param``."""
        for unit in self._units:
            for member in unit.members:
                if member.param is param:
                    raise ValueError(
                        f"{member.name} was used ({use}) in forward outside of a call of {unit.title}, where "
                        "it shows this rank's shard, with which other ranks may compute: call the module, or "
                        "choose units= so that both are in one; compute with it, or change it, between steps "
                        "(a momentum encoder after optimizer.step()), whole inside "
                        "shardtrain.unsharded(model)"
                    )
        raise ValueError(f"a parameter was used ({use}) in forward that its module no longer has")


def class_like(kind: type, base: type[nn.Parameter], **attributes: Any) -> type:
    """Return a class of parameters that looks like ``kind``, a user's own perhaps, and is a ``base``, too.

    ``own`` of it is ``kind``. What is no parameter, or is a ``base`` already, keeps its class.
    """
    if not issubclass(kind, nn.Parameter) or issubclass(kind, base):
        return kind
    described = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "own": kind, **attributes}
    bases = (base, *([] if kind is nn.Parameter else [kind]))
    return types.new_class(kind.__name__, bases, exec_body=lambda namespace: namespace.update(described))


def attach(module: nn.Module, units: Sequence[Unit], closed: Closed) -> list[RemovableHandle]:
    """Open layers where torch's own code looks at their parameters and computes nothing.

    ``nn.TransformerEncoder`` chooses its fast path, with zeros for what is padded, where its first layer's
    parameters are plain.
    """

    @user_code.undisturbed
    def before(layers: Sequence[Unit], *_: Any) -> None:
        closed.allow(layers)

    handles = []
    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoder):
            below = set(encoder.modules())
            layers = [unit for unit in units if not below.isdisjoint(unit.modules.values())]
            handles.append(encoder.register_forward_pre_hook(partial(before, layers)))
    return handles


def name_of_use(func: Any) -> str:
    """Return the name of a function of torch, or of the attribute that it gets or sets."""
    attribute = getattr(func, "__self__", None)
    if func.__name__ in ("__get__", "__set__", "__delete__"):
        return str(getattr(attribute, "__name__", func.__name__))
    return str(func.__name__)
