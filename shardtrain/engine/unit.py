"""Gather and release a unit: the segments that are gathered and reduced together, and their state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

import torch
from torch import nn

from shardtrain.comm.channel import Channel
from shardtrain.comm.transport import Pending
from shardtrain.engine.precision import Precision
from shardtrain.engine.shard import Segment, ShardedParam


class State(Enum):
    """Say where the full vector is."""

    SHARDED = "full is empty, nothing is moving"  # --gather--> GATHERING
    GATHERING = "a gather is filling full"  # --show--> GATHERED
    GATHERED = "full is valid"  # --release--> SHARDED


class Shown(Enum):
    """Say what the parameters show."""

    SHARD = "local shards"  # --show--> FULL, --show_private--> PRIVATE
    FULL = "views of the full vector"  # --hide--> SHARD
    PRIVATE = "full tensors of this rank's own, inside unsharded()"  # --hide--> SHARD


@dataclass(eq=False)
class UnitOptions:
    """Hold what `shard` takes for all units, for one of them. The flags may be changed between steps.

    ``reduces``: False leaves the unit's gradients on each rank, as `no_sync` does for all units.
    ``divide_by``: what the sum of all ranks' gradients is divided by; None is their number.
    """

    precision: Precision = field(default_factory=Precision)
    reshard_after_forward: bool = True
    reduces: bool = True
    divide_by: float | None = None


class Gathered(NamedTuple):
    """Count what is gathered of a model: units, the root included, and bytes of their full vectors.

    Ranks that share memory hold these bytes once per host, whether gathered or not.
    """

    units: int
    bytes: int


class Account:
    """Count the units and bytes that are gathered ``now``, and the largest numbers of each, ``peak``."""

    def __init__(self) -> None:
        self.now = [0, 0]
        self.peak = [0, 0]

    def add(self, units: int, size: int) -> None:
        for index, more in enumerate((units, size)):
            self.now[index] += more
            self.peak[index] = max(self.peak[index], self.now[index])


class Unit:
    """Gather and release parameters that are gathered and reduced together.

    ``title``: the unit's name in messages. ``state``, ``shown``: written here only. ``account``: shared by
    all units of a model.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        segments: Sequence[Segment],
        transport: Channel,
        options: UnitOptions,
    ) -> None:
        self.name = name
        self.title = name or "the root"
        self.module = module
        self.segments = tuple(segments)
        self.members = tuple(member for segment in segments for member in segment.members)
        self.transport = transport
        self.options = options
        self.state = State.SHARDED
        self.shown = Shown.SHARD
        self.account = Account()
        self._moving = Pending.done(None)
        self._seen: dict[Shown, list[tuple[int, int]]] = {}  # `_look` by what was shown

    @property
    def device(self) -> torch.device:
        """The device on which the unit computes; the CPU for a unit without parameters."""
        return self.segments[0].full.device if self.segments else torch.device("cpu")

    @property
    def full_bytes(self) -> int:
        return sum([segment.full.nbytes for segment in self.segments])

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the unit's full gradient."""
        return sum([segment.layout.padded * segment.like_gradient.itemsize for segment in self.segments])

    @property
    def keeps(self) -> bool:
        """Whether the full vector stays gathered from forward to backward."""
        return not self.options.reshard_after_forward

    @property
    def trains(self) -> bool:
        """Whether a parameter requires a gradient now."""
        return any(member.param.requires_grad for member in self.members)

    @property
    def holders(self) -> dict[nn.Module, Segment]:
        """The modules that directly hold parameters of the unit, each with the segment of its last one."""
        return {m: s for s in self.segments for member in s.members for m, _ in member.info.holders}

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in the unit's full vectors."""
        memory = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
        return any(segment.memory == memory for segment in self.segments)

    def hide(self) -> None:
        """Let the parameters show their local shards. The full vector stays allocated."""
        if self.shown is not Shown.SHARD:
            for member in self.members:
                member.show_local()
            self.shown = Shown.SHARD

    def show_private(self, values: Mapping[ShardedParam, torch.Tensor]) -> None:
        """Let parameters show ``values``, full tensors that no other rank sees."""
        assert self.state is State.SHARDED, f"{self.name}: {self.state}"
        for member, value in values.items():
            member.param.data = value
        self.shown = Shown.PRIVATE

    def adopt(self, before_conversion: Callable[[], None]) -> None:
        """Adopt the pieces that users have replaced: all, or none and ValueError if one does not fit.

        ``before_conversion`` is called first if a piece has another dtype or device; it may raise.
        """
        replaced = [s for s in self.segments if any(m.was_replaced() for m in s.members)]
        held = [
            (segment, segment.shown_pieces()) for segment in (replaced if self.shown is Shown.SHARD else [])
        ]
        if any(segment.converts(local) for segment, local in held):
            before_conversion()
        for segment, local in held:
            segment.adopt(local)

    def refresh(self) -> None:
        """Let the next gather include changes of the local shards."""
        for segment in self.segments:
            segment.cast()
        self.note_values()

    def note_values(self) -> None:
        """Note the values that parameters show now, to notice edits of them."""
        self._seen[self.shown] = self._look()

    def _look(self) -> list[tuple[int, int]]:
        """Return what tells that users change a parameter: autograd's version of it, and where it lies."""
        return [(member.param._version, member.param.data_ptr()) for member in self.members]

    def _edited(self) -> list[str]:
        """Return the names of parameters that users have changed."""
        new = self._look()
        seen = self._seen.get(self.shown, new)
        if new == seen:
            return []
        return [m.name for m, state, old in zip(self.members, new, seen, strict=True) if state != old]

    def refuse_edits(self) -> None:
        """Raise ValueError if a full parameter was changed: ranks would disagree, or the change be lost."""
        if self.shown is Shown.FULL and (edited := self._edited()):
            raise ValueError(
                f"{', '.join(edited)} changed while {self.title} was whole, which would be lost or done once "
                "per rank; change parameters between steps, inside shardtrain.unsharded(model). After a "
                "forward with gradients, the root is whole until its backward: evaluate under torch.no_grad()"
            )

    def refuse_edits_inside_forward(self) -> None:
        """Raise ValueError if local pieces were changed since forward began: other ranks may read them."""
        if self.shown is Shown.SHARD and (edited := self._edited()):
            raise ValueError(
                f"forward changed {', '.join(edited)} of {self.title}, with which other ranks may compute "
                "now; change parameters between steps (a momentum encoder after optimizer.step())"
            )

    def gather(self) -> None:
        """Start gathering the full vector. It must not be read before `show`."""
        assert self.state is State.SHARDED, f"{self.name}: {self.state}"
        self.account.add(int(bool(self.segments)), self.full_bytes)
        for segment in self.segments:
            segment.hold_full(True)
        flats = [segment.flat for segment in self.segments]
        self._moving = self.transport.gather(self.title, flats) if flats else Pending.done(None)
        self.state = State.GATHERING

    def show(self) -> None:
        """Wait for the gather, and let the parameters show full values."""
        assert self.state is not State.SHARDED, f"{self.name}: {self.state}"
        self._moving.wait()
        self.state = State.GATHERED
        for member in self.members:
            member.param.data = member.full_view
        self.shown = Shown.FULL

    def release(self) -> None:
        """Free the full vector, whose parameters show their local shards."""
        assert self.shown is Shown.SHARD, f"{self.name}: {self.shown}"
        self._moving.settle()
        self.account.add(-int(bool(self.segments)), -self.full_bytes)
        for segment in self.segments:
            segment.hold_full(False)
        self.state = State.SHARDED
