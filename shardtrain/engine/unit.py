"""Gather and release a unit: the segments that are gathered and reduced together, and their state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn

from shardtrain.comm import trace
from shardtrain.comm.messages import unit_number
from shardtrain.comm.trace import GATHER, waiting
from shardtrain.comm.transport import Pending, Tag, Transport
from shardtrain.engine.shard import Segment


class State(Enum):
    SHARDED = "full is empty, nothing is moving"  # --launch--> GATHERING
    GATHERING = "a gather is filling full"  # --finish--> GATHERED
    GATHERED = "full is valid"  # --release--> SHARDED


class Gathered(NamedTuple):
    """Count what is gathered of a model: units, the root included, and bytes of their full vectors.

    Ranks that share memory hold these bytes once per host, whether gathered or not.
    """

    units: int
    bytes: int


class Account:
    """Track what is gathered ``now``, and its ``peak``."""

    def __init__(self) -> None:
        self.now = self.peak = Gathered(0, 0)

    def add(self, units: int, size: int) -> None:
        self.now = Gathered(self.now.units + units, self.now.bytes + size)
        if units > 0:
            self.peak = Gathered(*map(max, self.peak, self.now))


class Unit:
    """Gather and release parameters that are gathered and reduced together.

    ``title``: the unit's name in messages. ``pinned``: `unsharded` keeps it gathered, so `release` does
    nothing. ``account``: shared by all units of a model.
    """

    def __init__(
        self, name: str, index: int, module: nn.Module, segments: Sequence[Segment], transport: Transport
    ) -> None:
        self.name = name
        self.title = name or "the root"
        self.gather_tag = Tag(unit_number(index, 0), self.title)
        self.reduce_tag = Tag(unit_number(index, 1), self.title)
        self.index = index
        self.module = module
        self.segments = tuple(segments)
        self.members = tuple(member for segment in segments for member in segment.members)
        self.transport = transport
        self.state = State.SHARDED
        self.moving = Pending()
        self.pinned = False
        self.account = Account()

    def copied(self, memo: Mapping[int, Any]) -> Unit:
        """Return a unit for copies of its modules; see `Segment.copied`. Collective."""
        segments = [segment.copied(memo) for segment in self.segments]
        return Unit(self.name, self.index, memo[id(self.module)], segments, self.transport)

    @property
    def device(self) -> torch.device:
        """The device on which the unit computes; the CPU for a unit without parameters."""
        return self.segments[0].full.device if self.segments else torch.device("cpu")

    @property
    def full_bytes(self) -> int:
        return sum([segment.full.nbytes for segment in self.segments])

    @property
    def holders(self) -> dict[nn.Module, Segment]:
        """The modules that directly hold parameters of the unit, each with the segment of its last one."""
        return {m: s for s in self.segments for member in s.members for m, _ in member.info.holders}

    def shows(self, tensor: torch.Tensor) -> bool:
        """Return whether ``tensor`` lies in the unit's full vectors."""
        memory = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
        return any(segment.memory == memory for segment in self.segments)

    def show_local(self) -> None:
        """Let the parameters show their local pieces. The full vector stays allocated."""
        for member in self.members:
            if member.shows_full:
                member.show_local()

    def take_over(self) -> None:
        """Adopt the pieces that users have replaced: all, or none and ValueError if one does not fit."""
        replaced = [s for s in self.segments if not s.shows_full and any(m.was_replaced() for m in s.members)]
        held = [(segment, segment.held()) for segment in replaced]
        for segment, local in held:
            segment.take_over(local)

    def take_edits(self) -> bool:
        """Adopt users' changes to local pieces since `Segment.cast`; return whether there were any."""
        if changed := any(member.changed() for member in self.members if not member.shows_full):
            self.take_over()
        return changed

    def refuse_edits(self) -> None:
        """Raise ValueError if a full parameter was changed: ranks would disagree, or the change be lost."""
        edited = [member.name for member in self.members if member.shows_full and member.changed()]
        if edited:
            raise ValueError(
                f"forward changed {', '.join(edited)} while {self.title} was whole, which would be lost or "
                "done once per rank; change parameters between steps, inside shardtrain.unsharded(model)"
            )

    def launch(self) -> None:
        """Start gathering the unit. Its full vector must not be read before `finish`."""
        assert self.state is State.SHARDED, f"{self.name}: {self.state}"
        trace.begin(GATHER.traced, self.title)
        self.account.add(int(bool(self.segments)), self.full_bytes)
        for segment in self.segments:
            segment.hold_full(True)
        flats = [segment.flat for segment in self.segments]
        self.moving = self.transport.gather(self.gather_tag, flats) if flats else Pending()
        self.state = State.GATHERING

    def finish(self) -> None:
        """Wait until the unit's full vector is valid."""
        assert self.state is State.GATHERING, f"{self.name}: {self.state}"
        with waiting(GATHER, self.title, self.device, self.moving.ended):
            self.moving.wait()
        self.state = State.GATHERED

    def open_full(self, with_grads: bool = False) -> None:
        """Gather the unit unless it is gathered, and let its parameters show their full values.

        ``with_grads``: and the pieces' gradients, which users may clear until backward has ended.
        """
        if self.state is State.SHARDED:
            self.launch()
        if self.state is State.GATHERING:
            self.finish()
        for member in self.members:
            if not member.shows_full or (with_grads and member.grad_away is not None):
                member.show_full(with_grads)

    def release(self) -> None:
        """Let the parameters show their local pieces, and free the full vector."""
        if self.pinned:
            return
        self.show_local()
        if self.state is State.SHARDED:
            return
        if self.state is State.GATHERING:
            self.finish()
        self.account.add(-int(bool(self.segments)), -self.full_bytes)
        for segment in self.segments:
            segment.hold_full(False)
        self.state = State.SHARDED
