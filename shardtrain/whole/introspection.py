"""What others may know of a sharded model. The program looks through `introspect` alone."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.unit import Gathered


class UnitInfo(NamedTuple):
    """One unit. ``parameters`` (elements) and ``bytes`` count the whole unit, ``local_bytes`` this
    rank's shard, padding included. ``modules``: names of those that it was made of, see `shard`'s
    ``unit_bytes``."""

    name: str
    parameters: int
    bytes: int
    local_bytes: int
    modules: tuple[str, ...]


class Introspection:
    """The present state of a sharded model.

    ``transport``: how shards move, and between which ranks. ``precision``: the root's.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.transport = engine.channel
        self.precision = engine.units[0].options.precision

    @property
    def units(self) -> list[UnitInfo]:
        """Every unit, root first."""
        infos = []
        for unit in self._engine.units:
            segments = unit.segments
            info = UnitInfo(
                name=unit.name or "(root)",
                parameters=sum(s.layout.numel for s in segments),
                bytes=sum(s.layout.numel * s.local.element_size() for s in segments),
                local_bytes=sum(s.local.nbytes for s in segments),
                modules=tuple(unit.modules),
            )
            infos.append(info)
        return infos

    @property
    def virtual_ranks(self) -> range:
        """The virtual ranks that this rank computes; empty without (see `virtual_rank`)."""
        return self._engine.virtual_ranks

    @property
    def unit_of_parameter(self) -> dict[str, str]:
        """The title of the unit that holds each sharded parameter, by the parameter's name."""
        titles: dict[str, str] = {}
        for unit in self._engine.units:
            titles.update({member.name: unit.title for member in unit.members})
        return titles

    @property
    def bytes_by_rank(self) -> list[int]:
        """Bytes of the shards of each rank of the shard group, padding included."""
        sizes = [0] * self.transport.world
        for segment in self._engine.segments:
            width = segment.local.element_size()
            for rank in range(self.transport.world):
                sizes[rank] += segment.layout.length(rank) * width
        return sizes

    @property
    def gathered(self) -> Gathered:
        """The number of units that are gathered now, and the bytes of their full vectors."""
        return Gathered(*self._engine.units[0].account.now)

    def take_gathered_peak(self) -> Gathered:
        """Return the peak of `gathered` since the last call."""
        account = self._engine.units[0].account
        peak = Gathered(*account.peak)
        account.peak = account.now.copy()
        return peak

    @property
    def computing(self) -> tuple[str, str]:
        """The phase of the step (``forward``, ``backward`` or ``rest``) and the unit that computes."""
        driver = self._engine.driver
        schedule = driver.schedule
        phase = "rest"
        computing = None
        if schedule.backward:
            phase = "backward"
            computing = next(reversed(schedule.backward.entered), None)
        elif schedule.in_forward:
            phase = "forward"
            computing = next((unit for unit in reversed(driver.units) if unit in schedule.calls), None)
        return phase, computing.title if computing is not None else "the root"

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shards, and of their copies in the dtype in which they are gathered."""
        return sum(s.local.nbytes + (s.wire is not s.local) * s.wire.nbytes for s in self._engine.segments)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The engine's own tensors: shards, their copies, and full vectors."""
        tensors = list[torch.Tensor]()
        for segment in self._engine.segments:
            tensors += [segment.local, segment.wire, segment.full]
        return tensors


def introspect(module: nn.Module) -> Introspection:
    """Return a view into a sharded module. Raises ValueError for any other module."""
    return Introspection(engine_of(module))
