"""The check of a transport: what every one must do right, tried on ranks of this host."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from queue import Empty
from time import monotonic
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import ReduceOp

import shardtrain
from shardtrain.comm.arithmetic import merge
from shardtrain.comm.channel import Channel
from shardtrain.comm.trace import ENTER, LEAVE
from shardtrain.comm.transport import Pending, Transport, Vector
from shardtrain.errors import Diverged
from shardtrain.layout import Layout, cut_of

Make = Callable[[int, int], Transport]

SIZES = (75, 1, 0, 33, 700)  # elements of the parameters of a unit: uneven on purpose
DTYPES = (torch.float32, torch.bfloat16)
MANY = 300  # gathers that nobody waits for: a queue of a transport must not fill up


def check_transport(make: Make, world: int, time_out: timedelta = timedelta(minutes=2)) -> None:
    """Run the checks of this file on ``world`` new processes; each calls ``make(rank, world)``.

    ``make``: a function of a module, since processes import it. It may open a process group first.

    Raises AssertionError, with each rank's error, if a check failed, and TimeoutError if ranks do not answer
    within ``time_out``.
    """
    context = mp.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=_work, args=(make, rank, world, answers)) for rank in range(world)]
    for process in ranks:
        process.start()
    errors = dict[int, str]()
    deadline = monotonic() + time_out.total_seconds()
    try:
        while len(errors) < world:
            rank, error = answers.get(timeout=max(0.1, deadline - monotonic()))
            errors[rank] = error
    except Empty:
        silent = [rank for rank in range(world) if rank not in errors]
        raise TimeoutError(f"ranks {silent} do not answer; errors of others: {errors}") from None
    finally:
        for process in ranks:
            process.join(5 if len(errors) == world else 0)
            process.kill()
    failed = [f"rank {rank}: {error}" for rank, error in sorted(errors.items()) if error]
    assert not failed, "\n".join(failed)


def _work(make: Make, rank: int, world: int, answers: Any) -> None:
    """Run all checks as ``rank``, and answer with an error's text, or an empty one."""
    torch.set_num_threads(1)
    try:
        run_checks(make(rank, world))
    except BaseException:
        answers.put((rank, traceback.format_exc()))
    else:
        answers.put((rank, ""))


def run_checks(transport: Transport) -> None:
    """Run all checks on this rank. Collective. The last one diverges, so ``transport`` is of no use then."""
    channel = Channel(transport)
    for check in (broadcasts, all_reduces, gathers, reductions, many_at_once, training, divergence):
        check(channel)


def broadcasts(channel: Channel) -> None:
    """Check that each rank's tensor arrives, of any dtype, also if it is not contiguous."""
    for src in range(channel.world):
        for dtype in (*DTYPES, torch.int64, torch.uint8, torch.bool):
            tensor = torch.full((3, 2), 1 if channel.rank == src else 0, dtype=dtype).t()
            channel.broadcast(tensor, src)
            assert bool((tensor == 1).all()), f"broadcast of {dtype} from rank {src}: {tensor}"


def all_reduces(channel: Channel) -> None:
    """Check sums and extremes of integers and of fp32, also if they are not contiguous."""
    world = channel.world
    expected = {"sum": world * (world + 1) // 2, "max": world, "min": 1}
    for op, value in expected.items():
        for dtype in (torch.float32, torch.int64):
            tensor = torch.full((5, 2), channel.rank + 1, dtype=dtype)[:, 0]
            channel.all_reduce(tensor, op)
            assert tensor.tolist() == [value] * 5, f"{op} of {dtype}: {tensor.tolist()}, expected {value}"


def _layouts(channel: Channel) -> Iterator[Layout]:
    for policy in ("even", "whole"):
        yield cut_of(policy, channel.world)(SIZES, 16)


def _values(layout: Layout, rank: int, dtype: torch.dtype) -> Tensor:
    """Return rank ``rank``'s flat vector: other values on each rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(layout.padded, generator=generator).to(dtype)


def _filled(channel: Channel, whole: Tensor, layout: Layout) -> Vector:
    """Allocate a unit of which each rank has its interval of ``whole``; all else is not a number.

    Memory that was freed may hold the values of an earlier gather.
    """
    full, local = channel.allocate(layout, torch.empty(0, dtype=whole.dtype), whole.dtype)
    channel.fence(ENTER)
    full.fill_(float("nan"))
    channel.fence(LEAVE)
    channel.fence(ENTER)
    local.copy_(whole[layout.interval(channel.rank)])
    channel.fence(LEAVE)
    return Vector(full, local, layout)


def gathers(channel: Channel) -> None:
    """Check that every rank's interval arrives, also if intervals are empty or differ in length."""
    for layout in _layouts(channel):
        for dtype in DTYPES:
            whole = _values(layout, 0, dtype)
            unit = _filled(channel, whole, layout)
            channel.fence(ENTER)
            channel.gather("a unit", [unit]).wait()
            assert torch.equal(unit.full, whole), f"gather of {dtype} by {layout}"
            channel.fence(LEAVE)


def _start_reduction(channel: Channel, layout: Layout, dtype: torch.dtype) -> Pending[list[Tensor]]:
    full = channel.gradient(layout, torch.empty(0, dtype=dtype))
    full.copy_(_values(layout, channel.rank, dtype))
    full[:75].fill_(-0.0)  # no rank has a gradient of the first parameter
    return channel.reduce("a unit", [Vector(full, full[layout.interval(channel.rank)], layout)])


def reductions(channel: Channel) -> None:
    """Check the mean of all ranks' intervals: fp32, bit for bit in the tree of `arithmetic.merge`.

    A sum of nothing but -0.0 stays -0.0.
    """
    for layout in _layouts(channel):
        for dtype in DTYPES:
            channel.allocate(layout, torch.empty(0, dtype=dtype), dtype)
            channel.fence(ENTER)
            pending = _start_reduction(channel, layout, dtype)
            [mean] = pending.wait()
            parts = []
            for rank in range(channel.world):
                values = _values(layout, rank, dtype)
                values[:75].fill_(-0.0)
                parts.append(values[layout.interval(channel.rank)])
            expected = torch.empty(layout.length(channel.rank))
            merge(parts, expected, ReduceOp.AVG)
            assert mean.dtype == torch.float32, f"the mean has dtype {mean.dtype}, expected float32"
            same = torch.equal(mean.view(torch.int32), expected.view(torch.int32))
            assert same, f"reduction of {dtype} by {layout}: {mean}, expected {expected}"
            channel.fence(LEAVE)


def many_at_once(channel: Channel) -> None:
    """Check gathers and reductions that are under way together, and are waited for in another order."""
    layout = next(_layouts(channel))
    whole = _values(layout, 0, torch.float32)
    unit = _filled(channel, whole, layout)
    channel.fence(ENTER)
    reduction = _start_reduction(channel, layout, torch.float32)
    pending = [channel.gather("a unit", [unit]) for _ in range(MANY)]
    for gather in reversed(pending):
        gather.wait()
    reduction.wait()
    assert torch.equal(unit.full, whole)
    channel.fence(LEAVE)


def training(channel: Channel) -> None:
    """Check that three steps give the parameters of one plain model on all ranks' data."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(9, 19), nn.Tanh(), nn.Linear(19, 5))

    plain = net()
    model = shardtrain.shard(net(), units=[nn.Linear], transport=channel)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.01) for module in (plain, model)]
    for step in range(3):
        batches = []
        for rank in range(channel.world):
            batches.append(torch.randn(4, 9, generator=torch.Generator().manual_seed(10 * step + rank)))
        plain(torch.cat(batches)).square().mean().backward()
        model(batches[channel.rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in shardtrain.full_state_dict(model).items():
        torch.testing.assert_close(value, plain.get_parameter(name).detach(), msg=f"{name} after 3 steps")


def divergence(channel: Channel) -> None:
    """Check that `Diverged` is raised on every rank, before values are used, if ranks gather other units."""
    layout = next(_layouts(channel))
    full, local = channel.allocate(layout, torch.empty(0), torch.float32)
    channel.fence(ENTER)
    last = channel.rank == channel.world - 1
    try:
        channel.gather("first" if last else "second", [Vector(full, local, layout)]).wait()
        channel.fence(LEAVE)
    except Diverged as error:
        text = str(error)
    else:
        raise AssertionError("ranks gather other units, and nothing says so")
    for unit in ("first", "second"):
        assert unit in text, f"the error about ranks that differ does not name the unit {unit}: {text}"
