"""`Guardrails`, the `Attachment` that guards against users' code: what it does at each moment of a step.

at rest           users' changes of parameters are adopted or refused; optimizers' steps that raised are ended
before forward    ranks compare which parameters are frozen, and by which options optimizers have stepped
in forward        whole values and shards may not change
in backward       there is no double backward, none inside `unsharded`, and no `torch.autograd.grad`
an optimizer      may step if it is right on shards, or is looked at: see ``optimizers.py``
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardtrain import torch_private
from shardtrain.comm.trace import STEP, TRAIN
from shardtrain.engine.attachment import Attachment
from shardtrain.engine.hooks import Engine, engines, is_entrance
from shardtrain.engine.unit import Shown, Unit
from shardtrain.guardrails.changes import Changes, frozen, trained_in_words
from shardtrain.guardrails.initialization import Initialization
from shardtrain.guardrails.optimizers import Optimizers
from shardtrain.guardrails.options import Steps
from shardtrain.guardrails.refusals import UNCOPIED, Refusals
from shardtrain.guardrails.users_hooks import call_postponed, postpone
from shardtrain.pieces.piece import uncompiled
from shardtrain.whole.dcp import refuse_pickled


class Guardrails(Attachment):
    """The guards of a sharded model against changes, copies, wrappers and optimizers that would be wrong."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._driver = engine.driver
        self.steps = Steps()
        self.changes = Changes(engine)
        self.optimizers = Optimizers(engine, self.steps)
        self._frozen = frozen(engine.members)  # as ranks have last agreed

    def attach(self) -> None:
        engine = self._engine
        check_optimizers()
        initialization = Initialization(engine)
        methods = {module: initialization.methods(module) for module in engine.module.modules()}
        for unit in engine.units:
            for module in unit.holders:
                if not is_entrance(module):
                    methods[module].update(UNCOPIED)
                if isinstance(module, nn.RNNBase):
                    methods[module]["flatten_parameters"] = self.changes.flattens(unit)
        # Modules without sharded parameters are lent none.
        for module, lent in methods.items():
            if is_entrance(module):
                engine.extend(module, Refusals)
            engine.bind(module, lent)

    def at_rest(self) -> None:
        """Adopt what users have changed since the last step.

        Raises ValueError if a piece no longer fits or is on the meta device, or a parameter was attached.
        """
        self.optimizers.end_steps()
        with torch_private.DisableTorchFunctionSubclass():
            if self.changes.adopt():
                self._engine.place()
            self.changes.refuse_attached()
            self.changes.refuse_meta()

    def before_forward(self, units: Sequence[Unit]) -> None:
        for unit in units:
            self.changes.note(unit)
        self._agree_on_frozen()
        if not self._driver.is_silent:
            for line in self.steps.take():
                self._engine.channel.fence(STEP, line)

    def after_show(self, unit: Unit) -> None:
        self.changes.note(unit)

    def before_hide(self, units: Iterable[Unit]) -> None:
        """Raise ValueError if a parameter of ``units`` was changed while it was whole."""
        for unit in units:
            self.changes.require_same_values(unit)

    def after_forward(self) -> None:
        """Raise ValueError if a local shard was changed that other ranks may still read."""
        for unit in self._engine.units:
            self.changes.require_same_shards(unit)

    def before_backward(self) -> None:
        """Postpone users' hooks. Raises ValueError inside `unsharded`, and for double backward."""
        if self._driver.root.shown is Shown.PRIVATE:
            raise ValueError("backward() inside unsharded() would reduce no gradients: call it outside")
        if torch.is_grad_enabled():
            raise ValueError(
                "double backward (create_graph=True) is not supported: the graph would need parameters that "
                "are released when this backward ends; compute gradients of gradients on an unsharded model"
            )
        with torch_private.DisableTorchFunctionSubclass():
            self.before_hide(self._driver.schedule.unannounced)
            self._agree_on_frozen()
            for member in self._engine.members:
                postpone(member.param)

    def after_backward(self, params: Sequence[nn.Parameter], missing: Sequence[str]) -> None:
        """Call users' hooks. Raises ValueError if ``torch.autograd.grad`` has returned gradients."""
        call_postponed(params)
        if missing:
            raise ValueError(
                f"torch.autograd.grad over parameters of a sharded model ({', '.join(missing)}) would return "
                "gradients of this rank's batch alone; call backward() and read .grad, which holds the mean "
                "over ranks. make_graphed_callables calls it, too: graph an unsharded model"
            )

    def _agree_on_frozen(self) -> None:
        """Enter into the path which parameters are frozen, if users have changed that."""
        if self._driver.is_silent:
            return
        names = frozen(self._engine.members)
        if names != self._frozen:
            self._frozen = names
            self._engine.channel.fence(TRAIN, trained_in_words(names))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare a step of ``optimizer``. Raises ValueError if it may not step local shards."""
        if self.optimizers.before_step(optimizer) and self._engine.channel.all_ranks.world > 1:
            _warn_of_unreduced(optimizer)


@functools.cache
def check_optimizers() -> None:
    """Have every optimizer checked before it steps, by one hook for all engines.

    A hook per engine would be removed when its engine is garbage-collected, perhaps while torch calls hooks.
    """

    @uncompiled
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for engine in engines():
            engine.attached(Guardrails).before_step(optimizer)
        refuse_pickled(optimizer)

    register_optimizer_step_pre_hook(before_step)


def _warn_of_unreduced(optimizer: torch.optim.Optimizer) -> None:
    """Warn (UserWarning) if ``optimizer`` of a sharded model has parameters that belong to none."""
    known = set[nn.Parameter]()
    for engine in engines():
        known |= engine.attached(Guardrails).changes.known
    shapes = list[tuple[int, ...]]()
    for group in optimizer.param_groups:
        shapes += [tuple(p.shape) for p in group["params"] if p.grad is not None and p not in known]
    if shapes:
        warnings.warn(
            f"{type(optimizer).__name__} steps sharded parameters, and {len(shapes)} that belong to no "
            f"sharded model, the first of shape {shapes[0]}. Nothing here reduces their gradients, and ranks "
            "drift apart: shard the root, too, which contains all (fully_shard(model) after its blocks, or "
            "shard(model)), unless DistributedDataParallel or you reduce them",
            stacklevel=5,
        )
