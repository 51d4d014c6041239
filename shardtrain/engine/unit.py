"""A unit: the segments that are gathered and reduced together, and their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from shardtrain.comm.channel import Channel
from shardtrain.comm.transport import Pending
from shardtrain.engine.precision import Precision
from shardtrain.engine.segment import Segment, ShardedParam
from shardtrain.pieces.parameter import Shards


class State(Enum):
    """Where the full vector is."""

    SHARDED = "full is empty, nothing is moving"  # --gather--> GATHERING
    GATHERING = "a gather is filling full"  # --show--> GATHERED, --release--> SHARDED: prefetched, not used
    GATHERED = "full is valid"  # --release--> SHARDED


class Shown(Enum):
    """What the parameters show."""

    SHARD = "local shards"  # --show--> FULL, --show_private--> PRIVATE
    FULL = "views of the full vector"  # --hide--> SHARD
    PRIVATE = "full tensors of this rank's own, inside unsharded()"  # --hide--> SHARD


@dataclass(frozen=True)
class UnitOptions:
    """What `shard` takes for all units, for one of them.

    ``reduces``: False leaves the unit's gradients on each rank, as `no_sync` does for all units.
    ``divide_by``: what the sum of all ranks' gradients is divided by; None is their number.
    """

    precision: Precision = field(default_factory=Precision)
    reshard_after_forward: bool = True
    reduces: bool = True
    divide_by: float | None = None


class Gathered(NamedTuple):
    """What is gathered of a model, counted: units, the root included, and bytes of their full vectors.

    Ranks that share memory hold these bytes once per host, whether gathered or not.
    """

    units: int
    bytes: int


class Account:
    """The units and bytes that are gathered ``now``, and the largest numbers of each, ``peak``."""

    def __init__(self) -> None:
        self.now = [0, 0]
        self.peak = [0, 0]

    def add(self, units: int, size: int) -> None:
        for index, amount in enumerate((units, size)):
            self.now[index] += amount
            self.peak[index] = max(self.peak[index], self.now[index])

    def saw(self, peak: tuple[int, int]) -> None:
        """Count the ``peak`` of a replayed step, which gathers without `add`."""
        self.peak = [max(pair) for pair in zip(self.peak, peak, strict=True)]


class Unit:
    """A unit's shards, and the memory that they are gathered into."""

    def __init__(
        self,
        name: str,
        modules: Mapping[str, nn.Module],
        segments: Sequence[Segment],
        channel: Channel,
        options: UnitOptions,
    ) -> None:
        self.name = name
        self.title = name or "the root"  # its name in messages
        self.modules = dict(modules)  # by name; a call of any of them needs the parameters
        self.segments = tuple(segments)
        self.members = tuple(chain.from_iterable([segment.members for segment in segments]))
        self.channel = channel
        self.options = options
        self.state = State.SHARDED  # only this class writes this and the next
        self.shown = Shown.SHARD
        self.account = Account()  # `Engine` replaces it by one of all units
        self.shards = Shards()  # `Driver` replaces it by one of all units
        self._rests = False
        self._moving = Pending.done(None)

    @property
    def device(self) -> torch.device:
        """The device on which the unit computes; the CPU for a unit without parameters."""
        return self.segments[0].full.device if self.segments else torch.device("cpu")

    @property
    def full_bytes(self) -> int:
        return sum([segment.full.nbytes for segment in self.segments])

    @property
    def gradient_bytes(self) -> int:
        return sum([segment.layout.padded * segment.like_gradient.itemsize for segment in self.segments])

    @property
    def keeps(self) -> bool:
        """Whether `shard` was to keep the full vector after forward; only `Schedule.keeps` is current."""
        return not self.options.reshard_after_forward

    @property
    def trains(self) -> bool:
        """Whether a parameter requires a gradient now."""
        return any(segment.trains for segment in self.segments)

    @property
    def has_owners(self) -> bool:
        """Whether one rank owns all of each parameter, as ``layout="whole"`` cuts them."""
        return any(segment.layout.whole for segment in self.segments)

    @property
    def holders(self) -> dict[nn.Module, Segment]:
        """The modules that directly hold parameters of the unit, each with its last parameter's segment."""
        segments: dict[nn.Module, Segment] = {}
        for segment in self.segments:
            for member in segment.members:
                segments.update({module: segment for module, _ in member.info.holders})
        return segments

    def owns(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in the unit's full vectors."""
        memory = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
        return any(segment.memory == memory for segment in self.segments)

    def hide(self) -> None:
        """Let the parameters show their local shards. The full vector stays allocated."""
        if self.shown is not Shown.SHARD:
            for member in self.members:
                member.param.data = member.local_view
            self.shown = Shown.SHARD
            self.rest()

    def rest(self) -> None:
        """Let the class of parameters say that they show shards, unless something works on them.

        No other object gives or takes this class.
        """
        if self._rests or self.shards.work or self.shown is not Shown.SHARD:
            return
        self._rests = True
        self._give([m.class_at_rest or m.describe(self.shards, self.title) for m in self.members])

    def wake(self) -> None:
        """Undo `rest`."""
        if self._rests:
            self._rests = False
            self._give([member.own_class for member in self.members])

    def _give(self, classes: Sequence[type[nn.Parameter]]) -> None:
        for member, kind in zip(self.members, classes, strict=True):
            member.param.__class__ = kind

    def show_private(self, values: Mapping[ShardedParam, torch.Tensor]) -> None:
        """Let parameters show ``values``, full tensors that no other rank sees, until `hide`.

        The schedule does not know of it. Outside of steps, callers have the unit resharded first.
        """
        assert self.state is State.SHARDED, f"{self.name}: {self.state}"
        self.wake()
        for member, value in values.items():
            member.param.data = value
        self.shown = Shown.PRIVATE

    def cast(self) -> None:
        """Let the next gather include changes of the local shards."""
        for segment in self.segments:
            segment.cast()

    def gather(self) -> None:
        """Start gathering the full vector. It must not be read before `show`."""
        assert self.state is State.SHARDED, f"{self.name}: {self.state}"
        self.account.add(int(bool(self.segments)), self.full_bytes)
        for segment in self.segments:
            segment.hold_full(True)
        flats = [segment.flat for segment in self.segments]
        self._moving = self.channel.gather(self.title, flats) if flats else Pending.done(None)
        self.state = State.GATHERING

    def show(self) -> None:
        """Wait for the gather, and let the parameters show full values."""
        assert self.state is not State.SHARDED, f"{self.name}: {self.state}"
        self._moving.wait()
        self.state = State.GATHERED
        self.wake()
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
