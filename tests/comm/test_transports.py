"""Ranks that share memory, on one host and on several that are simulated; offload; hybrid sharding."""

import logging
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardtrain
from shardtrain import checkpoint, comm
from shardtrain.comm import signals
from shardtrain.comm.channel import gather_texts
from shardtrain.comm.shared_memory import SharedMemoryTransport
from shardtrain.config.errors import UserError
from shardtrain.job.build import require_equal_groups
from shardtrain.layout import Policy, cut_of, even
from shardtrain.optim import Ema
from shardtrain.recipes.muon import Muon

from pool import Ranks, each_rank
from small import (
    Block,
    OddNet,
    Parts,
    Vit,
    assert_at_rest,
    classify,
    like_a_replica,
    mean_in_a_tree,
    mesh,
    partly_frozen,
    raised_soon,
    sgd,
    shard,
    sharded_and_replica,
    train,
    train_alike,
    until,
    whole_state,
)
from tiny import configure

CPU = torch.device("cpu")
KINDS = ("all_reduce", "reduce_scatter")
# the host of each rank
BLOCKS = [0, 0, 1, 1]
INTERLEAVED = [0, 1, 0, 1]


def hosts(of_ranks: list[int]) -> Any:
    """Simulate hosts in a ``with``: ``of_ranks`` has the number of each rank's."""
    return patch.dict(os.environ, SHARDTRAIN_HOST_KEY=f"host {of_ranks[dist.get_rank()]}")


def sharded(of_ranks: list[int], **options: Any) -> nn.Module:
    torch.manual_seed(0)
    with hosts(of_ranks):
        return shardtrain.shard(OddNet(), **{"units": [Block], **options})


# Another user's process. It connects to whatever ranks listen on, and is silent, sends garbage, or poses as
# rank 1, until it is told to end; it adds a byte to a file each time. Then it prints how often it connected,
# and how many bytes it was sent.
STRANGER = """
import os, select, socket, sys, time
told = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
os.setgid(65534)
os.setuid(65534)
links, made, heard = [], 0, 0
print("ready", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    for line in open("/proc/net/unix"):
        if "@shardtrain-" not in line:
            continue
        links.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        links[-1].settimeout(0.01)
        try:
            links[-1].connect(chr(0) + line.split("@")[1].strip())
            made += 1
            os.write(told, b".")
            if made % 3:
                links[-1].send([bytes(99), (1).to_bytes(8, "big")][made % 2])
        except OSError:
            pass
    for link in links:
        try:
            heard += len(link.recv(99, socket.MSG_DONTWAIT))
        except OSError:
            pass
    del links[:-100]
    time.sleep(0.001)
print(made, heard)
"""


def opened_among_strangers(told: list[Path]) -> None:
    def slowly(text: str, *arguments: Any) -> list[str]:
        """Wait until each stranger has connected once more to those that listen, as this rank does."""
        before = [file.stat().st_size for file in told]
        if text.startswith("shardtrain-"):
            until(lambda: all(file.stat().st_size > size for file, size in zip(told, before, strict=True)))
        return gather_texts(text, *arguments)

    with patch.object(signals, "gather_texts", slowly):
        transport = comm.open_transport("shared_memory")
        assert isinstance(transport.transport, SharedMemoryTransport)
        cut = patch.object(signals, "map_shared", lambda file, length: os.ftruncate(file, 0))
        with cut, pytest.raises(PermissionError):  # who reads what is cut off dies
            transport.transport.signals.share(0, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="nobody else can start another user's processes")
def test_other_users_learn_nothing_and_disturb_nobody(on_ranks: Ranks, tmp_path: Path) -> None:
    told = [tmp_path / "first", tmp_path / "second"]
    for file in told:
        file.touch()
    command = [sys.executable, "-c", STRANGER]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    strangers = [subprocess.Popen([*command, file], text=True, **pipes) for file in told]
    try:
        assert [next(stranger.stdout) for stranger in strangers] == ["ready\n"] * 2
        on_ranks(3, opened_among_strangers, told)
        counts = [stranger.communicate("end", timeout=100)[0].split() for stranger in strangers]
    finally:
        for stranger in strangers:
            with stranger:
                stranger.kill()
    assert all(int(made) > 1 and heard == "0" for made, heard in counts), counts


@each_rank(4, transport="auto")
def test_two_jobs_with_the_same_names_do_not_meet() -> None:
    """Of one user, at the same time: the kernel's word on who is at the other end keeps them apart."""
    job, rank = divmod(dist.get_rank(), 2)
    group = [dist.new_group([0, 1]), dist.new_group([2, 3])][job]
    shared = torch.zeros(1)

    def together(*arguments: Any) -> list[str]:
        dist.barrier()  # of both jobs: all have bound their names, then all have connected or given up
        return gather_texts(*arguments)

    with (
        patch.object(signals, "gather_texts", together),
        patch.object(signals, "_LINK_S", 1.0),
        patch.object(signals.secrets, "token_hex", lambda size: f"{rank:0{2 * size}}"),
        suppress(ValueError),  # the ranks of the job that came second cannot reach one another
    ):
        shared = comm.open_transport("shared_memory", group).transport.signals.share(0, 1)
        if rank == 0:
            shared[0] = 1
    dist.barrier()
    assert sorted(comm.gather_texts(str(int(shared[0])), comm.plain_transport())) == ["0", "0", "1", "1"]


MESH = "pass a 2-D mesh with one row per host, and memory is shared inside each"


@each_rank(3, transport="auto")
def test_several_hosts_exchange_messages_and_one_line_says_so() -> None:
    of_ranks = [0, 0, 1]
    why = f"the shard group of ranks 0, 1, 2 is on several hosts; {MESH}"
    with patch.object(logging.getLogger("shardtrain"), "info") as told:
        transport = shardtrain.introspect(sharded(of_ranks)).transport
    assert type(transport.transport) is comm.MessagesTransport
    messages = [call.args[0] % call.args[1:] for call in told.call_args_list]
    assert messages == ([f"not sharing memory between ranks: {why}"] if dist.get_rank() == 0 else [])
    with hosts(of_ranks):
        refusal = raised_soon(ValueError, lambda: shardtrain.shard(OddNet(), transport="shared_memory"))
    assert refusal == f"transport='shared_memory' is not possible: {why}"


# offloaded shards: the CPU stands in for the device, with memory of its own


@each_rank(2, transport="auto")
def test_parameters_that_left_the_cpu_are_refused_with_a_way_out() -> None:
    """As after `shard` on the CPU and ``.to("cuda")``: the new shards are allocated there."""
    link = comm.open_transport("shared_memory")
    with FakeTensorMode():
        like = torch.empty(0, device="cuda:0")
    message = raised_soon(ValueError, lambda: link.allocate(even([30], 2, 16), like, torch.float32))
    assert message == (
        "ranks share memory on the CPU only, but the parameters are on cuda:0: move the model before "
        "shard(), or call shard(..., device='cuda:0'); its transport is then 'auto' or 'process_group'"
    )


@each_rank(2)
def test_on_the_cpu_there_is_nothing_to_offload() -> None:
    model = shard(OddNet(), units=[Block], offload=True)
    assert not isinstance(shardtrain.introspect(model).transport, comm.Offloaded)


# hybrid sharding: replicas against DDP, one another and theory; what they save and load


HYBRID = (2, 2)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, foreach=True)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(Muon.groups(model), lr=0.02)


def hybrid_and_replica(
    make: Callable[[], nn.Module], sizes: tuple[int, int], **options: Any
) -> tuple[nn.Module, DistributedDataParallel]:
    model, replica = sharded_and_replica(make, mesh=mesh(*sizes), **options)
    replica.register_comm_hook(None, mean_in_a_tree)
    return model, replica


def assert_replicas_are_equal(model: nn.Module) -> None:
    """Every rank's pieces are those of the ranks at the same place in the other shard groups, to the bit."""
    pieces = torch.cat([param.detach().as_subclass(torch.Tensor).flatten() for param in model.parameters()])
    transport = shardtrain.introspect(model).transport
    found: list[torch.Tensor] = [pieces] * dist.get_world_size()
    dist.all_gather_object(found, pieces)
    assert all(torch.equal(other, pieces) for other in found[transport.rank :: transport.world])


@pytest.mark.parametrize(
    ("make", "sizes", "optimizer"),
    [
        (Vit, HYBRID, adamw),
        (OddNet, HYBRID, sgd),
        (partly_frozen, HYBRID, sgd),
        (OddNet, (4, 1), sgd),  # DDP
    ],
)
@each_rank(4, transport="each")
def test_training_equals_ddp_bit_for_bit(make: Any, sizes: tuple[int, int], optimizer: Any) -> None:
    model, replica = hybrid_and_replica(make, sizes, units=None)
    train_alike(model, replica, tolerance=0, optimizer=optimizer)
    assert_replicas_are_equal(model)


def sometimes() -> nn.Module:
    """One layer is used on some ranks only, or on none; the loss may leave the second output alone."""

    def forward(self: Any, x: torch.Tensor, uses: bool) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.always(x)
        return self.sometimes(x) if uses else x, self.head(x)

    head = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    return Parts(forward, always=nn.Linear(7, 7), sometimes=nn.Linear(7, 7), head=head)


@pytest.mark.parametrize("skips", [True, False], ids=["layers of the root", "outputs of nested units"])
@each_rank(4, transport="each")
def test_what_is_used_on_some_ranks_only(skips: bool) -> None:
    """Weight decay would move what has a gradient of zeros; what has none must stay as it is."""
    for users, layout in (([3], "even"), ([1, 2], "even"), ([], "even"), ([1, 2], "whole")):
        uses = dist.get_rank() in users

        def step(net: nn.Module, number: int, uses: bool = uses) -> None:
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))
            first, second = net(x, uses or not skips)
            (first.square().mean() + (second.mean() if uses else 0.0)).backward()

        units = [] if skips else [nn.Linear, nn.Sequential]
        model = like_a_replica(sometimes, step, mesh=mesh(*HYBRID), units=units, layout=layout)
        assert_replicas_are_equal(model)


@pytest.mark.smoke
@pytest.mark.parametrize("sizes", [(2, 2), (4, 1)], ids=str)
@each_rank(4, transport="each")
def test_a_gradient_of_minus_zeros_is_none_that_is_absent(sizes: tuple[int, int]) -> None:
    """Where the weight is used at all, its gradient is -0.0."""

    def forward(self: Any, x: torch.Tensor, uses: bool) -> torch.Tensor:
        return self.always(x) + (self.touched * -0.0).sum() if uses else self.always(x)

    for users in (1, 0):
        parts = {"always": nn.Linear(5, 5), "touched": nn.Parameter(torch.ones(9))}
        model = shard(Parts(forward, **parts), mesh=mesh(*sizes), units=[])
        model(torch.ones(1, 5), dist.get_rank() < users).sum().backward()
        if len(model.touched):
            assert (model.touched.grad is not None) == bool(users)


@pytest.mark.parametrize("sizes", [HYBRID, (4, 1)], ids=str)
@each_rank(4, transport="each")
def test_traffic_is_as_theory_says(sizes: tuple[int, int]) -> None:
    """Inside as in a shard group alone, across 2 (R-1)/R of the interval; nothing under no_sync."""
    replicate, group = sizes
    model = shard(OddNet(), mesh=mesh(*sizes), units=[Block])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, optimizer, 1)
    with comm.meter() as waiting, shardtrain.no_sync(model):
        classify(model, 1).backward()
    assert waiting.bytes["reduce_scatter"] == waiting.bytes["all_reduce"] == waiting.calls["all_reduce"] == 0
    with comm.meter() as found:
        train(model, optimizer, 1)
    root, *blocks = shardtrain.introspect(model).units
    reduced = root.local_bytes + sum(block.local_bytes for block in blocks)
    gathered = root.local_bytes + sum(block.local_bytes for block in [*blocks, *blocks[:-2]])
    assert found.bytes["reduce_scatter"] == (group - 1) * reduced
    assert found.bytes["all_gather"] == (group - 1) * gathered
    across = 2 * (replicate - 1) * reduced / replicate
    assert found.bytes["all_reduce"] == pytest.approx(across, abs=3)
    assert found.calls["all_reduce"] == 4
    with comm.meter() as clipping:
        assert shardtrain.clip_grad_norm_(model, 1e9, norm_type=float("inf")) > 0
    assert clipping.calls == {"all_reduce": 1}


@each_rank(4, transport="auto")
def test_bad_meshes_and_replicas_that_differ_are_refused() -> None:
    def refused(on: DeviceMesh, **options: Any) -> str:
        return raised_soon(ValueError, lambda: shardtrain.shard(OddNet(), mesh=on, **options))

    texts = [refused(DeviceMesh("cpu", ranks)) for ranks in ([[[0, 1], [2, 3]]], [[0, 1]], [[0, 2], [3, 1]])]
    assert texts == [
        "mesh must be a 1-D DeviceMesh or a 2-D one (replicate, shard), got 3 dimensions",
        "a 2-D mesh must hold every rank: expected 4 ranks, got 1×2",
        "the ranks of a 2-D mesh must ascend along both dimensions, got [[0, 2], [3, 1]]",
    ]
    made = comm.open_transport("process_group").transport
    assert refused(mesh(*HYBRID), transport=made).startswith(
        "transport=MessagesTransport(...) is between the"
    )
    odd = nn.Linear(3, 4 if dist.get_rank() == 3 else 5)
    text = raised_soon(ValueError, lambda: shard(odd, mesh=mesh(*HYBRID)))
    assert re.match(r"the model to shard differs.*rank 3 has weight \(4, 3\)", text), text
    outside = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() == 3:
        assert refused(outside) == "rank 3 is not in the mesh, which holds [0, 1]"


@each_rank(4, transport="auto")
def test_the_meter_counts_waits_for_averages_across_replicas() -> None:
    model, _ = hybrid_and_replica(OddNet, HYBRID, units=[Block], transport="process_group")
    with comm.meter() as meter:
        train(model, sgd(model), 2)
    waited = {kind: {wait.unit for wait in meter.exposed() if wait.kind == kind} for kind in KINDS}
    assert waited["all_reduce"] == waited["reduce_scatter"]
    assert "blocks.0" in waited["all_reduce"]


@each_rank(2, transport="auto")
def test_the_devices_of_vectors_choose_what_moves_them() -> None:
    """Vectors on the CPU move by messages, others by the backend's own collectives, under one guard."""
    channel = comm.open_transport("process_group")
    layout = cut_of("even", 2)([64], 16)
    full, local = channel.allocate(layout, torch.empty(0), torch.float32)
    for kinds, expected in {
        ("cpu", "meta"): comm.MessagesTransport,
        ("cpu", "cuda"): comm.BackendTransport,
        ("cuda",): comm.BackendTransport,
        ("cpu",): comm.MessagesTransport,
    }.items():
        channel.place(map(torch.device, kinds))
        assert type(channel.transport) is expected
        assert channel.transport.open_guard() is channel.guard
        local.fill_(channel.rank)
        channel.gather("a unit", [comm.Vector(full, local, layout)]).wait()
        assert full.tolist() == [0.0] * 32 + [1.0] * 32
    assert type(comm.ProcessGroupTransport(dist.group.WORLD).on([CPU])) is comm.MessagesTransport


class Allocations(TorchDispatchMode):
    """The memory of the results of torch's functions that is none of their arguments'."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, torch.UntypedStorage] = {}  # which hold it, so that addresses differ

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self.storages[storage.data_ptr()] = storage
        return result


def tensors_in(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@each_rank(2, 3, transport="auto")
def test_a_reduction_receives_the_others_parts_alone() -> None:
    """It allocates no place for this rank's own part, which nobody sends."""
    channel = comm.open_transport("process_group")
    layout = cut_of("even", channel.world)([16 * channel.world * 100], 16)
    full = torch.ones(layout.padded)
    gradient = comm.Vector(full, full[layout.interval(channel.rank)], layout)
    with Allocations() as allocations:
        pending = channel.reduce("a unit", [gradient])
    allocated = sum(storage.nbytes() for storage in allocations.storages.values())
    assert allocated == (channel.world - 1) * gradient.local.nbytes
    assert torch.equal(pending.wait()[0], gradient.local)


@each_rank(2, transport="auto")
def test_the_transport_follows_a_model_to_another_device() -> None:
    """What the next forward adopts has the devices of its vectors looked at again."""
    model, replica = sharded_and_replica(OddNet, transport="process_group")
    channel = shardtrain.introspect(model).transport
    channel.place([torch.device("cuda")])
    train_alike(model, replica)
    assert type(channel.transport) is comm.BackendTransport
    model.double()
    model(torch.zeros(2, 3, 5, 5, dtype=torch.float64))
    assert type(channel.transport) is comm.MessagesTransport


State = dict[str, torch.Tensor]


class Setup(NamedTuple):
    sizes: tuple[int, int]  # replicas, and ranks of a shard group
    layout: Policy = "even"
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd
    units: tuple[type[nn.Module], ...] = (Block,)
    memory_format: torch.memory_format = torch.channels_last


def made(setup: Setup) -> tuple[nn.Module, torch.optim.Optimizer, Ema]:
    torch.manual_seed(0)
    net = OddNet().to(memory_format=setup.memory_format)
    model = shard(net, units=setup.units, mesh=mesh(*setup.sizes), layout=setup.layout)
    return model, setup.optimizer(model), Ema(model, 0.9)


def saved(path: str, setup: Setup) -> tuple[State, list[float]]:
    model, optimizer, ema = made(setup)
    train(model, optimizer, 3)
    ema.update(1)
    checkpoint.save(path, model, optimizer, extra={"rank": dist.get_rank()}, averages=ema.averages)
    return whole_state(model, optimizer), train(model, optimizer, 3, start=3)


def loaded(path: str, setup: Setup, expected: State) -> tuple[int, list[float]]:
    model, optimizer, ema = made(setup)
    extra = checkpoint.load(path, model, optimizer, averages=ema.averages)
    found = whole_state(model, optimizer)
    torch.testing.assert_close(found, expected)  # three times a buffer, divided by 3, may not be the buffer
    assert all(
        torch.equal(found[name], expected[name]) for name in found.keys() - dict(model.named_buffers())
    )
    assert_at_rest(model)
    assert {float(state.get("step", 3)) for state in optimizer.state.values()} <= {3.0}
    losses = train(model, optimizer, 3, start=3)
    assert_replicas_are_equal(model)
    return int(extra["rank"]), losses


@pytest.mark.long
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Setup(HYBRID), Setup((3, 1))),
        (Setup((1, 3)), Setup(HYBRID)),
        (Setup(HYBRID), Setup(HYBRID)),
        (Setup((1, 2), "whole", muon), Setup((1, 3), "whole", muon)),
        (Setup((1, 2), "whole", adamw), Setup((1, 3), "even", adamw)),
        (Setup((1, 3), "even", adamw), Setup((1, 2), "whole", adamw)),
        (Setup((1, 3)), Setup((1, 3), units=(), memory_format=torch.contiguous_format)),
    ],
    ids=lambda setup: f"{setup.sizes} {setup.layout}",
)
def test_a_checkpoint_goes_from_any_mesh_and_layout_to_any_other(
    on_ranks: Ranks, tmp_path: Path, before: Setup, after: Setup
) -> None:
    """With the same setup, training continues as if never stopped; one replica writes what all hold."""
    path = str(tmp_path / "step")
    before_all = on_ranks(math.prod(before.sizes), saved, path, before)
    assert len(before_all[0][0]) > 20
    after_all = on_ranks(math.prod(after.sizes), loaded, path, after, before_all[0][0])
    same_world = len(after_all) == len(before_all)
    assert [rank for rank, _ in after_all] == [rank if same_world else 0 for rank in range(len(after_all))]
    if before == after:
        assert [losses for _, losses in after_all] == [losses for _, losses in before_all]
        for rank in range(4):
            with safe_open(tmp_path / "step" / f"rank-{rank:05}.safetensors", framework="pt") as file:
                kinds = {key.split("/")[0] for key in file.keys()}  # noqa: SIM118
            pieces = {"parameters", "optimizer", "ema"} if rank < 2 else set()
            assert kinds - {"averaged"} == {"buffers"} | pieces


@pytest.mark.long
@each_rank(4)
def test_whole_parameters_and_buffers_are_everyones() -> None:
    net = OddNet()
    norm = net.blocks[0].norm
    norm.running_mean.fill_(dist.get_rank())
    model = shard(net, units=[Block], mesh=mesh(*HYBRID))
    assert norm.running_mean.eq(0).all()
    with torch.no_grad(), shardtrain.unsharded(model):
        model.fc.weight.fill_(2.0)
    whole = shardtrain.full_state_dict(model, rank0_only=True)
    assert bool(whole) == (dist.get_rank() == 0)
    shardtrain.load_full_state_dict(model, whole | {"fc.bias": torch.full((5,), 3.0)} if whole else {})
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank())
    whole = shardtrain.full_state_dict(model)
    for name, value in (("fc.weight", 2), ("fc.bias", 3), ("blocks.0.norm.running_mean", 1.5)):
        assert whole[name].eq(value).all(), name
    assert norm.running_mean.eq(dist.get_rank()).all()
    shardtrain.average_buffers(model)
    assert norm.running_mean.eq(1.5).all()
    assert norm.num_batches_tracked == 0
    assert_replicas_are_equal(model)


@pytest.mark.long
@each_rank(4, transport="auto")
def test_memory_is_shared_where_every_shard_group_is_on_one_host() -> None:
    for of_ranks, shared in ((BLOCKS, True), (INTERLEAVED, False)):
        with hosts(of_ranks):
            model = shardtrain.shard(OddNet(), mesh=mesh(*HYBRID))
        train(model, sgd(model), 1)
        assert_replicas_are_equal(model)
        assert shardtrain.introspect(model).transport.in_place == shared
    why = "transport='shared_memory' is not possible: the shard group of ranks 0, 1 is on several hosts"
    with hosts(INTERLEAVED), pytest.raises(ValueError, match=f"^{why}; {MESH}$"):
        shardtrain.shard(OddNet(), mesh=mesh(*HYBRID), transport="shared_memory")


def test_replicas_that_do_not_fit_are_refused() -> None:
    require_equal_groups(configure("parallel.replicate=2").parallel, 4)
    with pytest.raises(UserError, match=r"^parallel.replicate=3 does not divide 4 ranks; 1, 2, 4 would$"):
        require_equal_groups(configure("parallel.replicate=3").parallel, 4)


class ByTheBackend(comm.BackendTransport):
    """A transport of flat vectors on the CPU, too, by the backend's own collectives, as on an accelerator."""

    def on(self, devices: Any) -> Any:
        return self


@each_rank(2, transport="auto")
def test_gloo_is_asked_for_sums_of_equal_intervals() -> None:
    """It has no mean, and it refuses or mistakes intervals of other lengths."""
    transport = ByTheBackend(dist.group.WORLD, comm.open_transport("process_group").guard)
    like_a_replica(transport=transport)
    with pytest.raises(ValueError, match="moves tensors on cpu in equal intervals only: use layout='even'"):
        like_a_replica(layout="whole", transport=transport)
