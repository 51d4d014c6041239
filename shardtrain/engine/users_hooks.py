"""Call users' hooks where what they see is what they mean. Its own file, since no step needs it.

Hooks of parameters (post-accumulate) are called once gradients are reduced. Autograd would call such a hook
with this rank's full gradient, before the reduction. So hooks are replaced when a backward begins, and each
is called once when a backward that reduces ends. Then the parameter shows its local shard with the reduced
gradient, and the hook may step an optimizer.

Hooks of optimizers' steps see parameters that compute as pieces of gradients do. A hook that divides each
parameter by its norm would see this rank's shard, and the trial of optimizers does not call users' hooks. So
parameters have another class meanwhile: what treats each element by itself is right, a norm is that of all
ranks, and all else is refused by name. Hooks that an optimizer's class registers were tried.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardtrain import torch_private
from shardtrain.comm.norms import GradientPiece
from shardtrain.engine.closed import PASSING, class_like, name_of_use
from shardtrain.engine.segment import ShardedParam
from shardtrain.engine.unit import Shown, Unit

Hook = Callable[..., None]


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
    for param in dict.fromkeys([param for param in params if param._post_accumulate_grad_hooks]):
        for hook in list((param._post_accumulate_grad_hooks or {}).values()):
            if isinstance(hook, Postponed):
                hook.hook(param)


class HookedParameter(nn.Parameter):
    """Be the class of parameters while a user's hook of a step runs. ``own``: the class before."""

    hooked: weakref.ReferenceType[Hooked]
    own: type[nn.Parameter]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hooked = cls.hooked()
        if hooked is None or name_of_use(func) in PASSING or func.__name__ in ("__set__", "__delete__"):
            with torch_private.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        pieces, named = torch_private.tree_map(hooked.piece, (tuple(args), kwargs))
        return func(*pieces, **named)


class Hooked:
    """Let parameters of ``units`` be pieces while users' hooks run. Classes of these are written here.

    They are plain while they show other than shards, for a hook may call the model or `unsharded`, and while
    the code of torch or of this package works on shards: in a state dict, in a step of another optimizer.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self.optimizers = weakref.WeakSet[torch.optim.Optimizer]()  # which step the model
        self._members: dict[int, ShardedParam] = {}  # by the parameter's id
        self._classes: dict[type, type] = {}
        self._running = 0  # users' hooks: one may step another optimizer, which has hooks
        self._plain = 0  # blocks of `plain`

    def begin(self) -> None:
        """Let parameters be pieces, until `end` or `pause`."""
        self._running += 1
        self.resume()

    def end(self) -> None:
        """Undo `begin`. Parameters stay pieces if another hook runs, which has made this one run."""
        self._running -= 1
        self.pause()
        self.resume()

    def resume(self) -> None:
        """Undo `pause`, if a hook runs and no block of `plain`, for units that show shards."""
        if not self._running or self._plain:
            return
        for unit in self._units:
            for member in unit.members if unit.shown is Shown.SHARD else ():
                if member.owners is not None:  # else this rank has all
                    kind = type(member.param)
                    if kind not in self._classes:
                        self._classes[kind] = class_like(kind, HookedParameter, hooked=weakref.ref(self))
                    self._members[id(member.param)] = member
                    member.param.__class__ = self._classes[kind]

    def pause(self) -> None:
        """Let parameters be plain until `resume`."""
        for member in self._members.values():
            param = member.param
            if isinstance(param, HookedParameter):
                own: Any = param.own
                param.__class__ = own
        self._members.clear()

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Let parameters be plain inside."""
        self._plain += 1
        self.pause()
        try:
            yield
        finally:
            self._plain -= 1
            self.resume()

    def piece(self, value: Any) -> Any:
        """Return a parameter of the model as a piece; any other ``value`` as it is."""
        if not isinstance(value, HookedParameter):
            return value
        member = self._members[id(value)]
        assert member.owners is not None
        with torch_private.DisableTorchFunctionSubclass():
            shard = value.data
        subject = f"{member.name}, in a hook of an optimizer's step,"
        return GradientPiece.on(shard, member.owners._replace(subject=subject))


class StepHook:
    """Call a user's ``hook`` of a step while parameters of ``models``, if they are stepped, are pieces."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.models = weakref.WeakSet[Hooked]()

    def __call__(self, optimizer: torch.optim.Optimizer, *args: Any) -> Any:
        models = [model for model in self.models if optimizer in model.optimizers]
        for model in models:
            model.begin()
        try:
            return self.hook(optimizer, *args)
        finally:
            for model in models:
                model.end()


def watch(optimizer: torch.optim.Optimizer, own: Iterable[int], hooked: Hooked) -> None:
    """Replace users' hooks of ``optimizer``'s steps by `StepHook` ones. Their handles stay valid.

    ``own``: the numbers of this package's.
    """
    hooked.optimizers.add(optimizer)
    for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks):
        for number, hook in hooks.items():
            if number not in own and not _is_of_class(hook, type(optimizer)):
                hooks[number] = _watched(hook, hooked)
    for of_all in (torch_private.global_optimizer_pre_hooks, torch_private.global_optimizer_post_hooks):
        for number, hook in of_all.items():
            if not str(getattr(hook, "__module__", "")).startswith("shardtrain."):
                of_all[number] = _watched(hook, hooked)


def _watched(hook: Any, hooked: Hooked) -> StepHook:
    watched = hook if isinstance(hook, StepHook) else StepHook(hook)
    watched.models.add(hooked)
    return watched


def _is_of_class(hook: Any, kind: type) -> bool:
    """Return whether the class of an optimizer defines the ``hook``, as a method or in one."""
    name = getattr(hook, "__qualname__", "")
    return any(name.startswith(f"{base.__qualname__}.") for base in kind.__mro__)
