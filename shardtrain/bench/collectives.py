"""Gather and reduce by themselves: the engine's, the backend's own, and a memory copy of the same bytes.

A size is that of the whole flat vector, in bytes. Results are compared once per size before anything is
timed. The engine's reduction divides by the number of ranks and the backend's does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardtrain import comm
from shardtrain.bench.contenders import TITLES, default_is_process_group
from shardtrain.bench.interleave import Runner, Samples, attempt, interleave, ratios, spread
from shardtrain.bench.report import Point, Program, Results, Row, median, of_points, quartiles
from shardtrain.comm import Flat, Gradient, Tag, Transport
from shardtrain.comm.movement import ENTER, LEAVE
from shardtrain.device import backend_for
from shardtrain.job.format import MIB
from shardtrain.layout import Layout, even

OURS, GROUP, NATIVE, COPY = "shardtrain", "shardtrain_process_group", "native", "copy"
ENOUGH = 4 * MIB  # bytes that one timing moves at least, in repetitions, so that a clock can see it
MOST = 32  # repetitions

# Renamed in torch 2.13, where the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Does a movement and returns its result; with a value this rank's input is filled with that before.
Movement = Callable[[float | None], Tensor]


@dataclass
class CollectivePoint(Point):
    """One movement, ``table``, at one size."""

    size: int  # bytes of the flat vector
    native: str  # the backend's name

    @property
    def repetitions(self) -> int:
        """How often one timing does it."""
        return max(1, min(MOST, ENOUGH // self.size))

    def row(self) -> Row:
        """Return milliseconds of each, and ratios of ours to the backend's own and to a copy."""
        titles = {OURS: "shardtrain", GROUP: "process group", NATIVE: self.native, COPY: "copy"}
        seconds = {name: samples.values for name, samples in self.samples.items()}
        found = {
            name: {other: ratios(seconds[name], seconds[other]) for other in (NATIVE, COPY)}
            for name in (OURS, GROUP)
            if name in seconds
        }
        cells = [("ms", self.label)]
        for name, values in seconds.items():
            each = spread(values) if values else None
            cells.append((titles[name], median(each, 3, 1e3 / self.repetitions)))
        for name, to in found.items():
            cells.append((f"{titles[name]} / {self.native}", median(to[NATIVE])))
            cells += [("quartiles", quartiles(to[NATIVE])), (f"{titles[name]} / copy", median(to[COPY]))]
        facts = {
            "movement": self.table,
            "bytes": self.size,
            "repetitions": self.repetitions,
            "seconds": seconds,
            "failures": {name: samples.failure for name, samples in self.samples.items()},
            "ratios": found,
        }
        return Row(cells, {f"{self.table}, {TITLES[name]}": to[NATIVE] for name, to in found.items()}, facts)


class CollectiveBench(Program):
    def measure(self) -> None:
        """Measure the smallest vectors first."""
        self.points: list[CollectivePoint] = []
        kinds = {OURS: "auto"} if default_is_process_group() else {OURS: "auto", GROUP: "process_group"}
        transports = {name: comm.open_transport(kind) for name, kind in kinds.items()}
        size = self.settings.collectives.smallest_kib * 1024
        while size <= self.settings.collectives.largest_kib * 1024 and comm.world_size() > 1:
            for movement in ("gather", "reduce"):
                self._measure(movement, size, contests(movement, size, transports, self.device))
            size *= 4

    def _measure(self, movement: str, size: int, entrants: Mapping[str, Contest]) -> None:
        samples = {name: Samples() for name in entrants}
        label = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
        point = CollectivePoint(movement, label, samples, size, backend_for(self.device))
        self.points.append(point)
        for name, contest in entrants.items():
            attempt(contest.check, samples[name], self.device)
        runners = {name: contest.repeated(point.repetitions) for name, contest in entrants.items()}
        warmup, rounds = self.settings.warmup, self.settings.rounds
        interleave(runners, samples, self.device, warmup, rounds, f"{movement} {label}", lines=1)

    def results(self) -> Results:
        results = of_points(self.points, f"time over {backend_for(self.device)}'s own (less is better)")
        alone = ["A single rank has no collectives: start it with torchrun --nproc-per-node N."]
        return results if self.points else results._replace(lines=alone)


class Contest(NamedTuple):
    """One way to do a movement, and its result where rank r starts from values r + 1."""

    run: Movement
    expected: Tensor

    def check(self) -> None:
        if not torch.equal(self.run(comm.rank() + 1.0), self.expected):
            raise ValueError("the result is wrong")

    def repeated(self, times: int) -> Runner:
        def runner(_: int) -> None:
            for _ in range(times):
                self.run(None)

        return runner


def contests(
    movement: str, size: int, transports: Mapping[str, Transport], device: torch.device
) -> dict[str, Contest]:
    """Return the engine's movement by each of ``transports``, the backend's own, and a copy.

    Of two ranks a gather gives ``1 … 1 2 … 2``; a reduction gives their mean, 1.5, and the backend's own
    their sum, 3.
    """
    world, rank = comm.world_size(), comm.rank()
    layout = even([size // 4], world, align=4)
    full, local = torch.zeros(layout.padded, device=device), torch.zeros(layout.length(rank), device=device)
    total = world * (world + 1) / 2
    if movement == "gather":
        whole = torch.arange(1.0, world + 1, device=device).repeat_interleave(layout.length(0))
        found = {name: Contest(_gather(each, layout, local), whole) for name, each in transports.items()}
        native = Contest(_native(_all_gather, full, local), whole)
    else:
        mean = torch.full_like(local, total / world)
        found = {name: Contest(_reduce(each, layout, local), mean) for name, each in transports.items()}
        native = Contest(_native(_reduce_scatter, local, full), torch.full_like(local, total))
    copy = Contest(_native(Tensor.copy_, full.clone(), full.clone()), torch.full_like(full, rank + 1.0))
    return {**found, NATIVE: native, COPY: copy}


def _gather(transport: Transport, layout: Layout, like: Tensor) -> Movement:
    """Gather with the fences about it, which are what a gather costs where ranks share memory."""
    full, local = transport.allocate(layout, like, torch.float32)
    if not transport.in_place:
        full.untyped_storage().resize_(layout.padded * full.element_size())

    def run(value: float | None = None) -> Tensor:
        if value is not None:
            local.fill_(value)
        transport.fence(ENTER)
        transport.gather(Tag(0, "bench"), [Flat(full, local, layout)]).wait()
        transport.fence(LEAVE)
        return full

    return run


def _reduce(transport: Transport, layout: Layout, like: Tensor) -> Movement:
    transport.allocate(layout, like, like.dtype)  # where ranks share memory, this also allocates gradients
    full, own = like.new_zeros(layout.padded), like.clone()

    def run(value: float | None = None) -> Tensor:
        # Shared memory is given back by a reduction; other memory can serve again.
        into = transport.gradient(layout, like) if transport.in_place else full
        gradient = Gradient(into, [own], layout, layout.pieces(transport.rank))
        if value is not None:
            gradient.full.fill_(value)
            own.fill_(value)
        transport.reduce(Tag(0, "bench"), [gradient]).wait()
        return gradient.own[0]

    return run


def _native(move: Callable[[Tensor, Tensor], object], output: Tensor, input: Tensor) -> Movement:
    def run(value: float | None = None) -> Tensor:
        if value is not None:
            input.fill_(value)
        move(output, input)
        return output

    return run
