"""What code around the engine may know of a sharded model: its units, what is gathered, what a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from shardtrain.engine.hooks import Engine, engine_of
from shardtrain.engine.shard import Segment
from shardtrain.engine.unit import Gathered


class UnitInfo(NamedTuple):
    """One unit. ``parameters`` and ``bytes`` count the whole unit; ``local`` (elements, padding included) and
    ``local_bytes`` this rank's shard, ``most_bytes`` the largest shard of any rank."""

    name: str
    parameters: int
    local: int
    bytes: int
    local_bytes: int
    most_bytes: int


class Introspection:
    """A sharded model as seen from outside. Every figure is of the moment at which it is asked for.

    ``transport``: how the shards move. ``all_ranks``: the ranks that train this model, replicas included.
    ``primary_ranks``: those that hold what all replicas have alike. ``precision``: as given to `shard`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.transport = engine.transport
        self.all_ranks = engine.transport.all_ranks
        self.primary_ranks = engine.transport.primary_ranks
        self.precision = engine.precision

    @property
    def units(self) -> list[UnitInfo]:
        """Every unit, root first."""
        return [_describe(unit.name or "(root)", unit.segments) for unit in self._engine.units]

    @property
    def unit_of_parameter(self) -> dict[str, str]:
        """The title of the unit that holds each sharded parameter, by the parameter's name."""
        units = self._engine.units
        return {info.name: unit.title for unit in units for s in unit.segments for info in s.infos}

    @property
    def device(self) -> torch.device:
        """Where units compute."""
        return self._engine.device

    @property
    def bytes_by_rank(self) -> list[int]:
        """Bytes of the shards of each rank of the shard group, padding included."""
        return _bytes_by_rank(self._engine.segments) or [0] * self.transport.world

    @property
    def elements_by_rank(self) -> dict[nn.Parameter, list[int]]:
        """How many elements of each sharded parameter each rank of the shard group holds."""
        return {
            param: [segment.layout.pieces(rank)[index].numel for rank in range(segment.layout.world)]
            for segment in self._engine.segments
            for index, param in enumerate(segment.params)
        }

    @property
    def gathered(self) -> Gathered:
        """How many units are gathered now, and their bytes."""
        return self._engine.account.now

    def take_gathered_peak(self) -> Gathered:
        """Return the most that was gathered at once since the last call."""
        return self._engine.account.take_peak()

    @property
    def under_way(self) -> tuple[str, str]:
        """The phase of the step (``forward``, ``backward`` or ``rest``) and the unit that computes."""
        phase, unit = self._engine.schedule.under_way
        return phase, unit.title if unit is not None else "the root"

    @property
    def shard_bytes(self) -> int:
        """Bytes of this rank's shards, and of their copies in the dtype that is gathered."""
        return sum(s.local.nbytes + (s.wire is not s.local) * s.wire.nbytes for s in self._engine.segments)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The engine's own tensors: shards, their copies, and full vectors."""
        return [tensor for s in self._engine.segments for tensor in (s.local, s.wire, s.full)]


def introspect(module: nn.Module) -> Introspection:
    """Look inside a sharded module.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    return Introspection(engine_of(module))


def _describe(name: str, segments: Sequence[Segment]) -> UnitInfo:
    sizes = [(s.layout.numel, s.local.numel(), s.local.element_size()) for s in segments]
    return UnitInfo(
        name=name,
        parameters=sum(whole for whole, _, _ in sizes),
        local=sum(local for _, local, _ in sizes),
        bytes=sum(whole * width for whole, _, width in sizes),
        local_bytes=sum(local * width for _, local, width in sizes),
        most_bytes=max(_bytes_by_rank(segments), default=0),
    )


def _bytes_by_rank(segments: Sequence[Segment]) -> list[int]:
    lengths = [[s.layout.length(r) * s.local.element_size() for r in range(s.layout.world)] for s in segments]
    return [sum(held) for held in zip(*lengths, strict=True)]
