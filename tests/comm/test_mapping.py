"""Processes that a rank forks have weights and gradients of their own, also where ranks share memory."""

import os
import resource
from collections.abc import Callable
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardtrain
from shardtrain.comm.mapping import map_shared
from shardtrain.engine.hooks import engine_of

from pool import each_rank
from small import assert_same_parameters, classify, sgd, sharded_and_replica, train


def spoil(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.fill_(7.0)


def in_a_child(body: Callable[[], object]) -> None:
    """Run ``body`` in a forked process, and require that it does not raise."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            body()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def by_fork(model: nn.Module) -> None:
    in_a_child(lambda: spoil(model))


def by_a_child_of_the_child(model: nn.Module) -> None:
    """It begins with what the child has written."""

    def requires_what_the_child_wrote() -> None:
        assert all((param.data.as_subclass(torch.Tensor) == 7.0).all() for param in model.parameters())
        for param in model.parameters():
            param.data.zero_()

    def spoils_and_forks() -> None:
        spoil(model)
        in_a_child(requires_what_the_child_wrote)
        requires_what_the_child_wrote()

    in_a_child(spoils_and_forks)


def by_an_optimizer(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    in_a_child(torch.optim.SGD(model.parameters(), lr=1.0).step)
    model.zero_grad()


@pytest.mark.parametrize("spoils", [by_fork, by_a_child_of_the_child, by_an_optimizer])
@each_rank(2)
def test_a_child_has_weights_of_its_own(spoils: Callable[[nn.Module], None]) -> None:
    """And its end disturbs nobody: the ranks train on."""
    model, replica = sharded_and_replica()
    spoils(model)
    dist.barrier()
    assert_same_parameters(model, replica)
    optimizer = sgd(model)
    expected = train(replica, sgd(replica), steps=2)
    assert train(model, optimizer, steps=1) == pytest.approx(expected[:1], rel=1e-5)
    spoils(model)
    dist.barrier()
    optimizer.zero_grad()
    assert train(model, optimizer, steps=1, start=1) == pytest.approx(expected[1:], rel=1e-5)
    assert_same_parameters(model, replica)


@each_rank(2)
def test_a_child_in_a_forward_and_between_two_backwards_has_memory_of_its_own() -> None:
    """Of a whole unit, and of gradients that wait."""
    model, replica = sharded_and_replica()
    block = model.blocks[1]
    handle = block.norm.register_forward_hook(lambda *_: in_a_child(lambda: spoil(block)))
    with shardtrain.no_sync(model), replica.no_sync():
        classify(model, 0).backward()
        classify(replica, 0).backward()
    handle.remove()

    def spoil_gradients() -> None:
        for reduction in engine_of(model).driver.reductions.values():
            for total in chain.from_iterable(reduction._sums.values()):
                for grad in total.grads.values():
                    grad.fill_(7.0)

    in_a_child(spoil_gradients)
    for net in (model, replica):
        classify(net, 1).backward()
        sgd(net).step()
    assert_same_parameters(model, replica)


def test_a_child_that_gets_no_memory_ends_before_it_writes(capfd: pytest.CaptureFixture[str]) -> None:
    size = 1 << 20
    file = os.memfd_create("test")
    os.ftruncate(file, size)
    memory = map_shared(file, size)
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1, limits[1]))
    try:
        process = os.fork()
        if process == 0:
            memory.fill_(7)
            os._exit(0)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 1
    assert not memory.any()
    assert f"shardtrain: [Errno 12] mapping {size} bytes failed: Cannot" in capfd.readouterr().err


def test_memory_is_unmapped_and_its_file_closed_with_the_last_view() -> None:
    file = os.memfd_create("test")
    os.ftruncate(file, 1 << 12)
    view = map_shared(file, 1 << 12)[10:]
    view.fill_(1)
    address = f"{view.data_ptr() - 10:x}-"

    def maps() -> str:
        with open("/proc/self/maps") as lines:
            return lines.read()

    assert address in maps()
    del view
    assert address not in maps()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_memory_that_cannot_be_mapped_is_an_error_with_its_size() -> None:
    with pytest.raises(OSError, match=f"mapping {1 << 60} bytes failed: Cannot allocate memory"):
        map_shared(os.memfd_create("test"), 1 << 60)
