"""Time single gathers and reductions: the engine's, `shardtrain.comm`'s, the backend's, and a memory copy.

A size is that of the whole flat vector, in bytes. The engine's reduction divides by the number of ranks and
the backend's does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from shardtrain import comm
from shardtrain.bench.contenders import default_is_process_group
from shardtrain.bench.interleave import ratios, spread
from shardtrain.bench.report import Bench, median, quartiles
from shardtrain.comm import Flat, Gradient, Tag, Transport
from shardtrain.comm.native import all_gather, reduce_scatter
from shardtrain.comm.trace import ENTER, LEAVE
from shardtrain.device import BACKENDS
from shardtrain.job.format import MIB
from shardtrain.layout import Layout, even

OURS, GROUP, PUBLIC = "shardtrain", "shardtrain_process_group", "shardtrain_comm"
NATIVE, COPY = "native", "copy"
ENOUGH = 4 * MIB  # bytes that one timing moves at least, by repetition, so that the clock resolves it
MOST = 32  # repetitions

Movement = Callable[[], object]


def measure(bench: Bench) -> None:
    """Measure the smallest vectors first."""
    if comm.world_size() == 1:
        bench.note = "A single rank has no collectives: start it with torchrun --nproc-per-node N."
        return
    kinds = {OURS: "auto"} if default_is_process_group() else {OURS: "auto", GROUP: "process_group"}
    transports = {name: comm.open_transport(kind) for name, kind in kinds.items()}
    size = bench.settings.collectives.smallest_kib * 1024
    while size <= bench.settings.collectives.largest_kib * 1024:
        for kind in ("gather", "reduce"):
            _measure(bench, kind, size, movements(kind, size, transports, bench.device))
        size *= 4


def _measure(bench: Bench, kind: str, size: int, entrants: Mapping[str, Movement]) -> None:
    times = max(1, min(MOST, ENOUGH // size))  # repetitions in one timing

    def repeated(movement: Movement, _: int) -> None:
        for _ in range(times):
            movement()

    label = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
    runners = {name: partial(repeated, movement) for name, movement in entrants.items()}
    samples = bench.timed(runners, f"{kind} {label}")
    native = BACKENDS[bench.device.type]
    titles = {OURS: "shardtrain", GROUP: "process group", PUBLIC: "public", NATIVE: native, COPY: "copy"}
    cells = [("ms", label)]
    for name, own in samples.items():
        cells.append((titles[name], median(spread(own.values), 3, 1e3 / times)))
    compared = {}
    for name in (name for name in samples if name not in (NATIVE, COPY)):
        to = compared[name] = {
            other: ratios(samples[name].values, samples[other].values) for other in (NATIVE, COPY)
        }
        cells.append((f"{titles[name]} / {native}", median(to[NATIVE])))
        cells += [("quartiles", quartiles(to[NATIVE])), (f"{titles[name]} / copy", median(to[COPY]))]
    facts = {"movement": kind, "bytes": size, "repetitions": times, "ratios": compared}
    bench.add(kind, cells, facts, samples)


def movements(
    kind: str, size: int, transports: Mapping[str, Transport], device: torch.device
) -> dict[str, Movement]:
    """Return the engine's collective by each of ``transports``, the public one, the backend's, and a copy."""
    layout = even([size // 4], comm.world_size(), align=4)
    full = torch.zeros(layout.padded, device=device)
    local = torch.zeros(layout.length(comm.rank()), device=device)
    gathers = partial(comm.all_gather_into_tensor, full, local), partial(all_gather, full, local)
    reductions = partial(comm.reduce_scatter_tensor, local, full), partial(reduce_scatter, local, full)
    ours, (public, native) = (_gather, gathers) if kind == "gather" else (_reduce, reductions)
    engines = {name: ours(transport, layout, local) for name, transport in transports.items()}
    return {**engines, PUBLIC: public, NATIVE: native, COPY: partial(full.clone().copy_, full)}


def _gather(transport: Transport, layout: Layout, like: Tensor) -> Movement:
    """Return a gather with its barriers, which are its whole cost where ranks share memory."""
    full, local = transport.allocate(layout, like, torch.float32)
    if not transport.in_place:
        full.untyped_storage().resize_(layout.padded * full.element_size())

    def run() -> None:
        transport.fence(ENTER)
        transport.gather(Tag(0, "bench"), [Flat(full, local, layout)]).wait()
        transport.fence(LEAVE)

    return run


def _reduce(transport: Transport, layout: Layout, like: Tensor) -> Movement:
    transport.allocate(layout, like, like.dtype)  # where ranks share memory, this also allocates gradients
    full, own = like.new_zeros(layout.padded), like.clone()

    def run() -> None:
        # A reduction frees shared memory; other memory can be used again.
        into = transport.gradient(layout, like) if transport.in_place else full
        gradient = Gradient(into, [own], layout, layout.pieces(transport.rank))
        transport.reduce(Tag(0, "bench"), [gradient]).wait()

    return run
