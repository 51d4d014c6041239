"""The public collectives: what torch's own deliver, odd sizes, refusals on every rank, traffic."""

import random
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import distributed as torch_dist
from torch import empty, ones

from shardtrain import comm
from shardtrain import comm as dist
from shardtrain.collectives import calls
from shardtrain.comm import backends, messages

from pool import each_rank
from small import tree_sum, until


def equal(found: torch.Tensor, expected: Any) -> None:
    expected = expected if isinstance(expected, torch.Tensor) else torch.tensor(expected, dtype=found.dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def values(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        return torch.randn(*shape, dtype=dtype, generator=generator)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype)


def finish(work: comm.Work | None, async_op: bool) -> None:
    if not async_op:
        assert work is None
        return
    assert work.wait() is True
    assert work.is_completed()
    assert work.wait() is True


DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.complex128, torch.float8_e4m3fn)


@pytest.mark.smoke
@pytest.mark.parametrize("async_op", [False, True])
@each_rank(1, 2, 3, 4, transport="auto")
def test_gathers(async_op: bool) -> None:
    rank = comm.rank()
    world = comm.world_size()
    cases = [((3, 5), dtype, (world * 3, 5)) for dtype in DTYPES]
    cases += [(shape, torch.int16, (world, *shape)) for shape in ((7,), (0, 3), ())]
    for shape, dtype, gathered in [*cases, ((3, 1), torch.float64, (world * 3,))]:
        inputs = [values(r, shape, dtype) for r in range(world)]
        output = torch.empty(gathered, dtype=dtype)
        finish(comm.all_gather_into_tensor(output, inputs[rank], async_op=async_op), async_op)
        equal(output, torch.stack(inputs).view(gathered))


COMBINE = {
    "SUM": torch.add, "AVG": torch.add, "PRODUCT": torch.mul,
    "MIN": torch.minimum, "MAX": torch.maximum,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip
REDUCTIONS = [
    *product(("SUM", "AVG", "PRODUCT", "MIN", "MAX"), (torch.float32, torch.bfloat16, torch.int8), (5,)),
    *product(("BAND", "BOR", "BXOR"), (torch.int32,), (1,)),
    *product(("SUM", "AVG"), (torch.complex64,), (1,)),
    *(("SUM", torch.float32, 0), ("AVG", torch.float16, 2), ("PRODUCT", torch.int64, 2)),
]


@pytest.mark.smoke
@pytest.mark.parametrize("async_op", [False, True])
@each_rank(1, 2, 3, 4, transport="auto")
def test_reductions(async_op: bool) -> None:
    rank = comm.rank()
    world = comm.world_size()
    for name, dtype, n in REDUCTIONS:
        op = getattr(comm.ReduceOp, name)
        inputs = [values(r, (world, n, 3), dtype) for r in range(world)]
        parts = [full[rank] for full in inputs]
        wide = [part.float() if dtype in (torch.bfloat16, torch.float16) else part for part in parts]
        expected = tree_sum(wide, COMBINE[name])
        if name == "AVG":
            reals = torch.view_as_real(expected) if dtype.is_complex else expected
            reals.div_(world, rounding_mode="trunc" if dtype is torch.int8 else None)
        for reduce, given in (
            (comm.reduce_scatter_tensor, inputs[rank]),
            (comm.reduce_scatter_tensor, inputs[rank].reshape(world * n, 3)),
            (comm.reduce_scatter, list(inputs[rank])),
        ):
            output = torch.empty(n, 3, dtype=dtype)
            finish(reduce(output, given, op, async_op=async_op), async_op)
            equal(output, expected.to(dtype))


@each_rank(1, 2, 3, 4, transport="auto")
def test_uneven_lists() -> None:
    rank = comm.rank()
    world = comm.world_size()
    sizes = [(3 * r + 2) % 4 for r in range(world)]
    lists = [[torch.full((size,), 10.0 * r + i) for i, size in enumerate(sizes)] for r in range(world)]
    output = torch.empty(sizes[rank])
    comm.reduce_scatter(output, lists[rank])
    equal(output, torch.stack([parts[rank] for parts in lists]).sum(0))


@each_rank(3, 4, transport="auto")
def test_exchanges_deliver_what_torch_s_own_do() -> None:
    """Uneven parts, as rows of one tensor and as a list."""
    rank = comm.rank()
    world = comm.world_size()
    rows = [[(2 * r + i) % 3 for i in range(world)] for r in range(world)]  # that r sends to i
    sends = rows[rank]
    gets = [row[rank] for row in rows]
    for dtype in (torch.float32, torch.int64, torch.cfloat):
        sent = values(rank, (sum(sends), 2), dtype)
        expected = torch.empty(sum(gets), 2, dtype=dtype)
        torch_dist.all_to_all_single(expected, sent, gets, sends)
        output = torch.empty_like(expected)
        parts = [*torch.empty_like(expected).split(gets)]
        comm.all_to_all_single(output, sent, gets, sends)
        equal(output, expected)
        comm.all_to_all(parts, [*sent.split(sends)])
        equal(torch.cat(parts), expected)


@each_rank(3, transport="auto")
def test_low_precision_is_summed_in_fp32_and_rounded_once() -> None:
    world = comm.world_size()
    assert torch.tensor(256.0, dtype=torch.bfloat16) + 1 + 1 == 256
    share = 256.0 if comm.rank() == 0 else 1.0
    for dtype in (torch.bfloat16, torch.float8_e5m2):
        output = torch.empty(1, dtype=dtype)
        comm.reduce_scatter_tensor(output, torch.full((world,), share).to(dtype))
        equal(output, torch.tensor([256.0 + world - 1]).to(dtype))


@pytest.mark.parametrize("window", [1, 3, 100])
@each_rank(4, transport="auto")
def test_chunks_change_nothing_and_sums_are_one_tree(window: int) -> None:
    rank = comm.rank()
    world = comm.world_size()
    n = 16 * 11 + 5
    inputs = [torch.randn(world, n, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    expected = tree_sum([full[rank] for full in inputs])
    with patch.object(messages, "CHUNK_BYTES", 64), patch.object(messages, "WINDOW", window):
        output = torch.empty(n)
        gathered = torch.empty(world, n)
        comm.all_gather_into_tensor(gathered, output.fill_(rank))
        equal(gathered, torch.arange(float(world)).view(-1, 1).expand(world, n))
        for async_op in (False, True):
            output.zero_()
            finish(comm.reduce_scatter_tensor(output, inputs[rank], async_op=async_op), async_op)
            equal(output, expected)


@each_rank(1, 2, 3, 4, transport="auto")
def test_odd_tensors() -> None:
    rank = comm.rank()
    world = comm.world_size()
    # inputs that want gradients; complex ones as pairs; results where inputs lie
    output = torch.empty(world)
    comm.all_gather_into_tensor(output, torch.ones(1, requires_grad=True))
    assert not output.requires_grad
    reals = torch.empty(world, 2)
    comm.all_to_all_single(reals, torch.full((world,), 1 + 2j, dtype=torch.cfloat))
    equal(reals, torch.tensor([1.0, 2.0]).expand(world, 2))
    place = torch.zeros(world, 2)
    place[rank] = rank
    comm.all_gather_into_tensor(place, place[rank])
    equal(place, torch.arange(float(world)).view(-1, 1).expand(world, 2))
    comm.reduce_scatter_tensor(place[rank], place)
    equal(place[rank], [float(world * rank)] * 2)
    # inputs where other ranks' parts arrive, short ones and long ones
    for size in (2, 1 << 20):
        place = torch.empty(world, size)
        comm.all_gather_into_tensor(place, place[0].fill_(rank))
        comm.all_to_all_single(place, place)
        equal(place, torch.full((world, size), float(rank)))
        comm.reduce_scatter_tensor(place[0], place)
        equal(place[0], torch.full((size,), float(sum(range(world)))))
    with torch.inference_mode():
        output = torch.empty(world)
        work = comm.reduce_scatter_tensor(output[:1], torch.ones(world), async_op=True)
        finish(work, True)
    equal(output[:1], [float(world)])


@each_rank(2, 3, 4, transport="auto")
def test_calls_under_way_together_keep_apart() -> None:
    """Calls of one size, whose threads run in another order on every rank."""
    rank = comm.rank()
    world = comm.world_size()
    full = torch.arange(float(world * 3))
    outputs = [torch.empty(3) for _ in range(20)]
    delays = random.Random(rank)

    def move_late(*call: Any, move: Any = calls._move) -> None:
        time.sleep(delays.random() / 20)
        move(*call)

    with patch.object(calls, "_move", move_late):
        works = [
            comm.reduce_scatter_tensor(output, full * (index + 1), async_op=True)
            for index, output in enumerate(outputs)
        ]
        for work in reversed(works):
            finish(work, True)
    for index, output in enumerate(outputs):
        equal(output, full.view(world, 3)[rank] * world * (index + 1))


@each_rank(2, transport="auto")
def test_asynchronous_work_completes_by_itself(tmp_path: Path) -> None:
    if comm.rank() == 1:
        until((tmp_path / "asked").exists)
    output = torch.empty(comm.world_size())
    work = comm.all_gather_into_tensor(output, torch.ones(1), async_op=True)
    if comm.rank() == 0:
        assert not work.is_completed()
        (tmp_path / "asked").touch()
    until(work.is_completed)
    assert output.eq(1).all()
    finish(work, True)


@each_rank(3, transport="auto")
def test_groups() -> None:
    rank = comm.rank()
    group = comm.new_group([0, 2])
    if rank == 1:
        with pytest.warns(UserWarning, match="all_to_all_single called on a rank that does not belong"):
            assert comm.all_to_all_single(torch.empty(2), torch.empty(2), group=group) is None
        return
    output = torch.empty(2)
    comm.all_to_all_single(output, torch.tensor([0.0, 1.0]) + rank, group=group)
    equal(output, [[0.0, 2.0], [1.0, 3.0]][rank // 2])


def test_without_a_process_group_the_input_is_the_output() -> None:
    output = torch.empty(1, 3)
    comm.all_gather_single(output, torch.arange(3.0))  # torch's newer name
    equal(output, [[0.0, 1.0, 2.0]])
    comm.reduce_scatter(output, [torch.ones(1, 3)], comm.ReduceOp.AVG)
    finish(comm.all_to_all([output[0]], [torch.arange(3.0)], async_op=True), True)
    equal(output, [[0.0, 1.0, 2.0]])
    for collective in (comm.all_reduce, comm.broadcast):
        finish(collective(output, async_op=True), True)
    equal(output, [[0.0, 1.0, 2.0]])
    with pytest.raises(ValueError, match=r"^all_to_all refused on every rank: rank 0: expected input_list"):
        comm.all_to_all([output[0]], [])


@each_rank(1, 2, 3, 4, transport="auto")
def test_the_meter_counts_the_payload() -> None:
    world = comm.world_size()
    full = torch.zeros(world * 5)
    with comm.meter() as meter:
        comm.all_gather_into_tensor(full, torch.ones(5))
        comm.reduce_scatter_tensor(torch.empty(5), full)
        comm.reduce_scatter(torch.empty(5), list(full.view(world, 5)))
        comm.all_to_all_single(torch.empty(world * 5), full)
        finish(comm.all_to_all(list(torch.empty(world, 5)), list(full.view(world, 5)), async_op=True), True)
    assert meter.calls == {"all_gather": 1, "reduce_scatter": 2, "all_to_all": 2}
    share = (world - 1) * 5 * 4
    assert meter.bytes == {"all_gather": share, "reduce_scatter": 2 * share, "all_to_all": 2 * share}


def call(name: str, **arguments: Any) -> comm.Work | None:
    """Call the collective ``name`` with arguments that fit on every rank, but for ``arguments``."""
    world = comm.world_size()
    whole = torch.ones(world, 3)
    part = torch.ones(3)
    good: dict[str, Any] = {
        "all_gather_into_tensor": {"output": whole, "input": part},
        "reduce_scatter_tensor": {"output": part, "input": whole},
        "reduce_scatter": {"output": part, "input_list": [*whole.clone()]},
        "all_to_all": {"output_list": [*whole], "input_list": [*whole.clone()]},
        "all_to_all_single": {"output": whole, "input": whole.clone()},
    }[name]
    return getattr(comm, name)(**{**good, **arguments})


GATHER = "all_gather_into_tensor"
REDUCE = "reduce_scatter_tensor"
REDUCE_LIST = "reduce_scatter"
TO_ALL = "all_to_all"
SINGLE = "all_to_all_single"
# What rank 1 passes while the others' arguments are good, and what all ranks must read.
REFUSALS: list[tuple[str, dict[str, Any], str]] = [
    (GATHER, {"output": empty(7)}, "expected output to have equal parts for 2 ranks, found float32 [7]"),
    (GATHER, {"input": [1]}, "expected a tensor in input, found list"),
    (GATHER, {"output": empty(6, dtype=torch.float64)},
     "expected all tensors to have one dtype, found torch.float32, torch.float64"),
    (GATHER, {"output": empty(3, 2).t()}, "expected output to be contiguous, found strides (1, 2)"),
    (GATHER, {"output": empty(6, device="meta")}, "expected all tensors on one device, found cpu and meta"),
    (GATHER, {"output": empty(6, device="meta"), "input": empty(3, device="meta")},
     "expected tensors on a device that this group moves (cpu, cuda), found meta"),
    (GATHER, {"input": ones(3).to_sparse()}, "expected dense tensors, found torch.sparse_coo"),
    (GATHER, {"output": empty(8), "input": ones(4)},
     "expected the same as on rank 0, all_gather_into_tensor of float32 [3], "
     "found all_gather_into_tensor of float32 [4]"),
    (REDUCE, {"op": comm.ReduceOp.MAX}, "found reduce_scatter_tensor (MAX) of float32 [2, 3]"),
    (REDUCE, {"op": comm.ReduceOp.BOR}, "expected integers or bool for BOR, found torch.float32"),
    (REDUCE, {"op": "sum"},
     "expected op to be one of SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR, found sum"),
    (REDUCE, {"output": ones(3) > 0, "input": ones(6) > 0, "op": comm.ReduceOp.AVG},
     "expected numbers for AVG, found torch.bool"),
    (REDUCE, {"output": ones(3) * 1j, "input": ones(6) * 1j, "op": comm.ReduceOp.PRODUCT},
     "expected SUM or AVG for torch.complex64, found PRODUCT"),
    (REDUCE_LIST, {"input_list": [ones(3)]}, "expected input_list to hold 2 tensors, one per rank, found 1"),
    (REDUCE_LIST, {"input_list": ones(3)}, "input_list to be a list of 2 tensors, found T"),
    (REDUCE_LIST, {"output": empty(2)},
     "expected output to fit input_list between 2 ranks, found float32 [2] for float32 [3], [3]"),
    (REDUCE_LIST, {"input_list": [ones(2), ones(3)]},
     "expected the same as on rank 0, reduce_scatter (SUM) of float32 [3], [3], "
     "found reduce_scatter (SUM) of float32 [2], [3]"),
    (TO_ALL, {"output_list": [empty(3), empty(4)]},
     "expected output_list to fit input_list between 2 ranks, found float32 [3], [4] for float32 [3], [3]"),
    (TO_ALL, {"input_list": [ones(4), ones(3)]},
     "rank 0: expected 12 bytes from rank 1 (all_to_all of float32 [3], [3]), found that rank 1 sends it 16 "
     "(all_to_all of float32 [4], [3])"),
    (SINGLE, {"output_split_sizes": [1, 2]},
     "expected 2 split sizes of at least 0 that add up to the 2 rows of output, found [1, 2]"),
    (SINGLE, {"input_split_sizes": [2]},
     "expected 2 split sizes of at least 0 that add up to the 2 rows of input, found [2]"),
    (SINGLE, {"input": ones(3, 3), "input_split_sizes": [2, 1]},
     "rank 0: expected 12 bytes from rank 1 (all_to_all_single of float32 [2, 3]), found that rank 1 sends "
     "it 24 (all_to_all_single of float32 [3, 3])"),
]  # fmt: skip


@each_rank(2, transport="auto")
def test_every_rank_refuses_what_one_rank_gets_wrong() -> None:
    """Rank 1, which tries each of `REFUSALS`."""
    rank = comm.rank()
    for name, bad, expected in REFUSALS:
        with pytest.raises(ValueError, match=f"^{name} refused on every rank: rank") as caught:
            call(name, **(bad if rank == 1 else {}))
        assert expected in str(caught.value)
        # the group is as good as before
        output = torch.empty(6)
        total = torch.empty(3)
        comm.all_gather_into_tensor(output, torch.full((3,), float(rank)))
        equal(output, torch.arange(2.0).repeat_interleave(3))
        comm.reduce_scatter_tensor(total, output)
        equal(total, torch.full((3,), 2.0 * rank))
    with pytest.raises(ValueError, match=r"refused.*: rank 0: expected output .*; rank 1: expected output "):
        call(GATHER, output=torch.empty(7))


@pytest.mark.parametrize("large", [False, True])
@each_rank(3, transport="auto")
def test_ranks_in_different_collectives_are_told(large: bool) -> None:
    n = messages.CHUNK_BYTES * 3 if large else 5
    world = comm.world_size()
    odd = (comm.reduce_scatter_tensor, n, world * n)
    others = (comm.all_gather_into_tensor, world * 7, 7)
    collective, elements, input = odd if comm.rank() == 2 else others
    output = torch.zeros(elements)
    with pytest.raises(ValueError, match=r"rank 2: .* as on rank 0, all_gather_into_tensor of float32 \[7\]"):
        collective(output, torch.ones(input))
    equal(output, torch.zeros(elements))


@each_rank(2, transport="auto")
def test_asynchronous_refusals_come_from_wait() -> None:
    size = 4 if comm.rank() == 1 else 3
    work = call(GATHER, output=torch.empty(2 * size), input=torch.empty(size), async_op=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="rank 1: expected the same as on rank 0"):
            work.wait()
    assert work.is_completed()


@each_rank(2, 3, transport="auto")
def test_the_backend_s_own_collectives() -> None:
    """As on other backends than gloo."""
    rank = comm.rank()
    world = comm.world_size()
    with patch.object(backends, "has_gloo", lambda _: False):
        output = torch.empty(world * 3)
        finish(comm.all_gather_into_tensor(output, torch.full((3,), float(rank)), async_op=True), True)
        equal(output, torch.arange(float(world)).repeat_interleave(3))
        stacked = torch.empty(world, 3)
        comm.all_gather_into_tensor(stacked, torch.full((3,), float(rank)))
        equal(stacked, output.view(world, 3))
        total = torch.empty(3)
        comm.reduce_scatter_tensor(total, stacked, comm.ReduceOp.MAX)
        equal(total, [float(rank)] * 3)
        comm.reduce_scatter(total, list(stacked))
        equal(total, [float(world * rank)] * 3)
        comm.all_to_all_single(output, torch.arange(float(world)).repeat_interleave(3))
        equal(output, [float(rank)] * 3 * world)
        pairs = torch.empty(world, dtype=torch.cfloat)
        comm.all_to_all_single(pairs, torch.full((world,), 1j * rank))
        equal(pairs, 1j * torch.arange(world))
        named = f"refused on every rank: rank 1: expected output to have equal parts for {world} ranks"
        with pytest.raises(ValueError, match=named):
            call(GATHER, output=torch.empty(world * 3 + (rank == 1)))
        splits = [2, 0, *[1] * (world - 2)] if rank == 0 else None
        with pytest.raises(ValueError, match="refused on every rank: rank"):
            call(SINGLE, input_split_sizes=splits)


def test_a_simulated_world_looks_at_its_own_arguments_only() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch_dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=5)
    try:
        comm.all_gather_into_tensor(torch.empty(15), torch.ones(3))
        comm.all_to_all_single(torch.empty(6), torch.ones(5), [0, 1, 1, 2, 2], [1, 0, 1, 3, 0])
        with pytest.raises(ValueError, match="rank 2: expected output to fit input between 5 ranks"):
            comm.all_gather_into_tensor(torch.empty(10), torch.ones(3))
    finally:
        torch_dist.destroy_process_group()


@each_rank(2, transport="auto")
def test_all_reduce_takes_torchs_operations_too() -> None:
    mine = torch.tensor([1.0, 5.0 - dist.get_rank()])
    for op, expected in (("sum", [2.0, 9.0]), ("max", [1.0, 5.0]), ("min", [1.0, 4.0])):
        equal(dist.all_reduce(mine.clone(), op), expected)
        equal(dist.all_reduce(mine.clone(), getattr(dist.ReduceOp, op.upper())), expected)


@each_rank(2, transport="auto")
def test_what_lies_between_the_elements_of_a_tensor_stays() -> None:
    rank = dist.get_rank()
    whole = torch.arange(6.0)
    equal(dist.all_reduce(whole[::2]), [0.0, 4.0, 8.0])
    equal(dist.broadcast(whole[1::2].add_(10 * rank), 1), [11.0, 13.0, 15.0])
    equal(whole, [0.0, 11.0, 4.0, 13.0, 8.0, 15.0])
    for collective in (dist.all_reduce, dist.broadcast):
        with pytest.raises(
            ValueError, match=r"^expected a contiguous tensor with async_op, found strides \(2,\)"
        ):
            collective(whole[::2], async_op=True)


@each_rank(3, transport="auto")
def test_torchs_keywords_groups_and_results() -> None:
    """Snippets that were written for torch: its keywords, groups, and results that are waited for."""
    rank = dist.get_rank()
    group = dist.new_group([1, 2])
    with dist.meter() as meter:
        output = torch.empty(3, 1)
        dist.all_gather_into_tensor(output_tensor=output, input_tensor=torch.full((1,), float(rank)))
        equal(output.flatten(), [0.0, 1.0, 2.0])
        outputs = [torch.empty(1) for _ in range(3)]
        dist.all_to_all(output_tensor_list=outputs, input_tensor_list=list(torch.arange(3.0).split(1)))
        equal(torch.cat(outputs), [float(rank)] * 3)
        mine = torch.full((2,), float(rank))
        for start in (dist.all_reduce, partial(dist.broadcast, src=1)):
            work = start(mine, async_op=True)
            assert isinstance(work, dist.Work)
            work.wait()
        equal(mine, [3.0, 3.0])
    assert meter.calls == {"all_gather": 1, "all_to_all": 1, "all_reduce": 1, "broadcast": 1}
    result = 2 if rank else 0  # rank 0 does not belong to the group
    equal(dist.all_reduce(torch.tensor([rank]), op=dist.ReduceOp.MAX, group=group), [result])
    equal(dist.broadcast(torch.tensor([rank]), src=2, group=group), [result])
    with pytest.warns(FutureWarning, match="reduce_op"):
        equal(dist.all_reduce(torch.ones(1), dist.reduce_op.SUM), [3.0])


@pytest.mark.parametrize("op", [dist.ReduceOp.AVG, "mean"])
def test_another_operation_is_refused_by_a_single_rank_as_well(op: Any) -> None:
    with pytest.raises(ValueError, match=r"^expected op to be ReduceOp.SUM, MAX or MIN, found .*(AVG|mean)"):
        dist.all_reduce(torch.ones(1), op)
