"""The mean over ranks that hold the same interval, one of each replica; the same bits on all of them."""

from __future__ import annotations

from collections.abc import Sequence

from shardtrain.comm.meter import count
from shardtrain.comm.process_group import ProcessGroupTransport
from shardtrain.comm.transport import Interval, Pending, Tag


class Column:
    """The ranks of ``part``. ``silent``: as of a `Transport`."""

    silent = False

    def __init__(self, part: ProcessGroupTransport) -> None:
        self.part = part

    def average(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        """Start turning each interval, which every rank has, into its mean over ranks, alike on all."""
        sizes = [values.numel() * wire.itemsize for values, wire in intervals]
        count("all_reduce", (2 * size * (self.part.world - 1) // self.part.world for size in sizes))
        if not self.part.by_messages([values for values, _ in intervals]):
            return self.part.backend_for("averaging", tag).average(intervals)
        return self._swap(tag, intervals) if self.part.world == 2 else self._in_two_stages(tag, intervals)

    def _swap(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        """Two ranks send each other everything, which is as many bytes as halves twice, and one wait less."""
        sets = []
        for values, wire in intervals:
            sent = values.to(wire, copy=True)
            if wire != values.dtype:
                values.copy_(sent)  # so that both ranks add the same numbers
            sets.append([values, sent] if self.part.rank == 0 else [sent, values])
        return self.part.combine(tag, sets, "averaging")

    def _in_two_stages(self, tag: Tag, intervals: Sequence[Interval]) -> Pending:
        """Each rank makes the mean of its part of every interval, and sends it to the others."""
        rank, world = self.part.rank, self.part.world
        moved = [values.to(wire) for values, wire in intervals]
        parts = [list(each.tensor_split(world)) for each in moved]
        own = [values.tensor_split(world)[rank] for values, _ in intervals]
        sets = [[*each[:rank], mine, *each[rank + 1 :]] for each, mine in zip(parts, own, strict=True)]
        halfway = self.part.combine(tag, sets, "averaging")

        def finish() -> None:
            halfway.wait()
            for each, mine in zip(parts, own, strict=True):
                each[rank].copy_(mine)
            self.part.send_to_all(tag, [(each[rank], each) for each in parts], "averaging").wait()
            for (values, _), all_parts in zip(intervals, moved, strict=True):
                values.copy_(all_parts)

        return Pending(finish)
