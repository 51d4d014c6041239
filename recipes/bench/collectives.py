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
from shardtrain.comm import Flat, Gradient, Transport
from shardtrain.comm.native import all_gather, reduce_scatter
from shardtrain.comm.trace import ENTER, LEAVE
from shardtrain.device import BACKENDS
from shardtrain.job.format import MIB
from shardtrain.layout import Layout, even

from .compared import Bench
from .contenders import to_run

COPY = "copy"
ENOUGH = 4 * MIB  # bytes that one timing moves at least, by repetition, so that the clock resolves it
MOST = 32  # repetitions

Movement = Callable[[], object]


def measure(bench: Bench) -> None:
    """Measure gathers and reductions of every size."""
    if comm.world_size() == 1:
        bench.note = "A single rank has no collectives: start it with torchrun --nproc-per-node N."
        return
    kinds = {"shardtrain": "auto", "shardtrain_process_group": "process_group"}
    transports = {name: comm.open_transport(kinds[name]) for name in to_run(None) if name in kinds}
    for size in (kib * 1024 for kib in bench.settings.sizes_kib):
        for kind in ("gather", "reduce"):
            _measure(bench, kind, size, movements(kind, size, transports, bench.device))


def _measure(bench: Bench, kind: str, size: int, entrants: Mapping[str, Movement]) -> None:
    times = max(1, min(MOST, ENOUGH // size))  # repetitions in one timing

    def repeated(movement: Movement, _: int) -> None:
        for _ in range(times):
            movement()

    label = f"{size // MIB} MiB" if size >= MIB else f"{size // 1024} KiB"
    references = BACKENDS[bench.device.type], COPY
    comparison = bench.begin([*entrants], f"{kind} {label}", "µs", 1e6 / times, references, None)
    bench.time(comparison, {name: partial(repeated, movement) for name, movement in entrants.items()})


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
    copy = partial(full.clone().copy_, full)
    return {**engines, "shardtrain.comm": public, BACKENDS[device.type]: native, COPY: copy}


def _gather(transport: Transport, layout: Layout, like: Tensor) -> Movement:
    """Return a gather with its barriers, which are its whole cost where ranks share memory."""
    full, local = transport.allocate(layout, like, torch.float32)
    if not transport.in_place:
        full.untyped_storage().resize_(layout.padded * full.element_size())

    def run() -> None:
        transport.fence(ENTER)
        transport.gather("bench", [Flat(full, local, layout)]).wait()
        transport.fence(LEAVE)

    return run


def _reduce(transport: Transport, layout: Layout, like: Tensor) -> Movement:
    transport.allocate(layout, like, like.dtype)  # where ranks share memory, this also allocates gradients
    full, own = like.new_zeros(layout.padded), like.clone()

    def run() -> None:
        # A reduction frees shared memory; other memory can be used again.
        into = transport.gradient(layout, like) if transport.in_place else full
        gradient = Gradient(into, [own], layout, layout.pieces(transport.rank))
        transport.reduce("bench", [gradient]).wait()

    return run
