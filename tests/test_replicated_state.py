"""What replicas save and load, and whole runs of the training program with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

import shardtrain
from shardtrain import checkpoint
from shardtrain.job.build import require_equal_groups
from shardtrain.job.schema import UserError
from shardtrain.optim import Ema

from pool import each_rank
from small import Block, OddNet, assert_at_rest, mesh, raised_soon, sgd, shard, train, whole_state
from test_hosts import hosts
from test_plan import assert_kept, measured, planned
from test_replicated import HYBRID, assert_replicas_are_equal
from test_resume import crash, run
from tiny import configure

Ranks = Callable[..., list[Any]]
State = dict[str, torch.Tensor]


def made(sizes: tuple[int, int]) -> tuple[nn.Module, torch.optim.Optimizer, Ema]:
    torch.manual_seed(0)
    options = {"mesh": mesh(*sizes)} if sizes[0] * sizes[1] > 1 else {}
    model = shard(OddNet(), units=[Block], **options)
    return model, sgd(model), Ema(model, 0.9)


def saved(path: str, sizes: tuple[int, int]) -> tuple[State, list[float]]:
    model, optimizer, ema = made(sizes)
    train(model, optimizer, 3)
    ema.update(1)
    checkpoint.save(path, model, optimizer, extra={"rank": dist.get_rank()}, averages=ema.averages)
    return whole_state(model, optimizer), train(model, optimizer, 3, start=3)


def loaded(path: str, sizes: tuple[int, int], expected: State) -> tuple[int, list[float]]:
    model, optimizer, ema = made(sizes)
    extra = checkpoint.load(path, model, optimizer, averages=ema.averages)
    found = whole_state(model, optimizer)
    torch.testing.assert_close(found, expected)  # three times a buffer, divided by 3, may not be the buffer
    assert all(
        torch.equal(found[name], expected[name]) for name in found.keys() - dict(model.named_buffers())
    )
    assert_at_rest(model)
    losses = train(model, optimizer, 3, start=3)
    assert_replicas_are_equal(model)
    return int(extra["rank"]), losses


@pytest.mark.parametrize(
    ("before", "after"),
    [(HYBRID, (3, 1)), ((1, 3), HYBRID), (HYBRID, HYBRID)],
    ids=str,
)
def test_a_checkpoint_goes_from_any_mesh_to_any_other(
    on_ranks: Ranks, tmp_path: Path, before: tuple[int, int], after: tuple[int, int]
) -> None:
    """On the same mesh, training goes on as if it had never stopped; one replica writes what all hold."""
    path = str(tmp_path / "step")
    before_all = on_ranks(before[0] * before[1], saved, path, before)
    after_all = on_ranks(after[0] * after[1], loaded, path, after, before_all[0][0])
    same_world = len(after_all) == len(before_all)
    assert [rank for rank, _ in after_all] == [rank if same_world else 0 for rank in range(len(after_all))]
    if before == after:
        assert [losses for _, losses in after_all] == [losses for _, losses in before_all]
        for rank in range(4):
            with safe_open(tmp_path / "step" / f"rank-{rank:05}.safetensors", framework="pt") as file:
                kinds = {key.split("/")[0] for key in file.keys()}  # noqa: SIM118
            assert "buffers" in kinds
            assert kinds & {"parameters", "optimizer", "ema"} == (
                {"parameters", "optimizer", "ema"} if rank < 2 else set()
            )


@each_rank(4)
def test_whole_parameters_and_buffers_are_everyones() -> None:
    model, _, _ = made(HYBRID)
    with torch.no_grad(), shardtrain.unsharded(model):
        model.fc.weight.fill_(2.0)  # type: ignore[union-attr]
    whole = shardtrain.full_state_dict(model, rank0_only=True)
    assert bool(whole) == (dist.get_rank() == 0)
    if whole:
        assert bool((whole["fc.weight"] == 2).all())
        whole["fc.bias"].fill_(3.0)
    shardtrain.load_full_state_dict(model, whole)
    assert bool((shardtrain.full_state_dict(model)["fc.bias"] == 3).all())
    for buffer in model.buffers():
        buffer.fill_(dist.get_rank())
    shardtrain.average_buffers(model)
    means = {float(b.mean()) for b in model.buffers() if b.is_floating_point()}
    assert means == {1.5}
    assert_replicas_are_equal(model)


@each_rank(4)
def test_a_model_that_differs_in_another_replica_is_named() -> None:
    odd = nn.Linear(3, 4 if dist.get_rank() == 3 else 5)
    text = raised_soon(ValueError, lambda: shard(odd, mesh=mesh(*HYBRID)))
    assert text.startswith("the model to shard differs")
    assert "rank 3 has weight (4, 3)" in text


@each_rank(4, transport="auto")
def test_memory_is_shared_where_every_shard_group_is_on_one_host() -> None:
    for of_ranks, shared in (([0, 0, 1, 1], True), ([0, 1, 0, 1], False)):
        with hosts(of_ranks):
            model = shardtrain.shard(OddNet(), mesh=mesh(*HYBRID))
        train(model, sgd(model), 1)
        assert_replicas_are_equal(model)
        assert shardtrain.introspect(model).transport.in_place == shared
    with (
        hosts([0, 1, 0, 1]),
        pytest.raises(ValueError, match=r"^transport='shared_memory' is not possi") as caught,
    ):
        shardtrain.shard(OddNet(), mesh=mesh(*HYBRID), transport="shared_memory")
    assert str(caught.value).endswith(": the shard group of ranks 0, 1 is on several hosts")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("parallel.replicate=3", "parallel.replicate=3 does not divide 4 ranks; 1, 2, 4 would"),
        (
            "parallel.replicate=2 parallel.shard=3",
            "parallel.shard=3 × parallel.replicate=2 is not the number of ranks, 4; "
            "parallel.shard=null leaves it to parallel.replicate",
        ),
    ],
)
def test_replicas_that_do_not_fit_are_refused(arguments: str, message: str) -> None:
    require_equal_groups(configure("parallel.replicate=2", "parallel.shard=2").parallel, 4)
    parallel = configure(*arguments.split()).parallel
    assert raised_soon(UserError, lambda: require_equal_groups(parallel, 4)) == message


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "replicate", "more"),
    [
        (4, 2, ["parallel.transport=shared_memory", "parallel.precision=bf16"]),
        (3, 3, ["parallel.transport=process_group", "train.batch_size=15"]),
    ],
)
def test_a_plan_with_replicas_is_kept(on_ranks: Ranks, world: int, replicate: int, more: list[str]) -> None:
    arguments = ["model=squeezenet1_1", f"parallel.replicate={replicate}", *more]
    found = on_ranks(world, measured, *arguments)[0]
    plan = planned(*arguments, f"world_size={world}")
    assert plan.sent["all_reduce"] > 0
    assert_kept(plan, found)


QUIET = ("monitor.tensorboard=false", "ema.decay=null")


@pytest.mark.long
@each_rank(4, transport="auto")
def test_a_killed_run_goes_on_with_another_number_of_replicas(tmp_path: Path) -> None:
    quick = ("train.epochs=1", "checkpoint.every_steps=2", "checkpoint.asynchronous=false", *QUIET)
    assert run(str(tmp_path), "parallel.replicate=2", *quick, at={3: crash}) == "Crash "
    assert run(str(tmp_path), "parallel.replicate=4", *quick) == "finished"
    if dist.get_rank() == 0:
        assert "continuing after step 2 of 5" in (tmp_path / "log.txt").read_text()
