"""Steps that are captured and replayed, on the simulated device with a recorder of graphs for it."""

import gc
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import shardtrain
from shardtrain import comm
from shardtrain import device as devices
from shardtrain.comm import guard
from shardtrain.comm.guard import Paths
from shardtrain.engine.watchdog import LOOKS, Watchdog
from shardtrain.job.errors import UserError
from shardtrain.job.launch import Context
from shardtrain.monitor import Monitor
from shardtrain.optim import Ema
from shardtrain.train import ways as program
from shardtrain.train.loop import train

import ways
from pool import each_rank
from simulated_device import DEVICE, SimulatedDevice
from simulated_graph import Recordings, recorder
from small import Block, OddNet, images, mesh, raised_soon, until
from tiny import ALONE, TINY, commanded, composed
from ways import WAYS, Way

Step = Callable[..., Any]

# Captured, a way that offloads, scales its loss or has virtual ranks is refused. Averages and checkpoints are
# no part of a step, and what `in_way` does not do tells nothing here.
CAPTURABLE = [
    name
    for name, way in WAYS.items()
    if not (way.virtual or way.scale or "offload" in way.options)
    and not (way.around or way.between or way.autocast or way.together or way.reduces_each or way.compiled)
    and name not in ("EMA", "checkpoint", "whole, bf16, checkpoint")
]


# A silent rank; a rank over a group of one, with streams and launches of NCCL; and rank 2 of eight.
WORLDS = {"silent": 0, "one": 1, "eight": 8}


@contextmanager
def simulated(size: int = 0) -> Iterator[tuple[SimulatedDevice, Recordings]]:
    """Let this process be the last rank of a fake group of ``size``, or a silent one; steps are captured."""
    with SimulatedDevice()(pytest.MonkeyPatch()) as device, recorder(device) as records:
        if size:
            dist.init_process_group("cpu:fake,cuda:fake", store=FakeStore(), rank=size // 4, world_size=size)
        try:
            yield device, records
        finally:
            if size:
                dist.destroy_process_group()


@pytest.fixture
def records() -> Iterator[Recordings]:
    with simulated() as (device, made):
        yield made
        assert list(device.findings) == []


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True, **options)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True, **options)


def batch(step: int, rank: int = 0, n: int = 6) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in images(step, rank, n)]


def sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shardtrain.shard(OddNet().to(DEVICE), units=[Block], **options)


def learn(loss: Tensor, optimizer: torch.optim.Optimizer) -> Tensor:
    """Take the step that ``loss`` asks for, and clear gradients last."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return the step that clears gradients last."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).float(), y)
        return learn(loss, optimizer)

    return step


class Run:
    """A model, its optimizer and its step, captured or not."""

    def __init__(
        self,
        captures: bool,
        make: Callable[..., torch.optim.Optimizer] = sgd,
        step: Callable[..., Step] = plain_step,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.model = model if model is not None else sharded()
        self.optimizer = make(self.model)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.place_rates()
        self.step = step(self.model, self.optimizer)
        if captures:
            self.step = shardtrain.capture(self.step, self.model, self.optimizer, **options)

    def place_rates(self) -> None:
        """Let rates be tensors, as captured steps do: a number is not rounded to fp32."""
        for group in self.optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=DEVICE)

    def losses(self, steps: range) -> list[float]:
        return [self.step(*batch(number)).item() for number in steps]

    def state(self) -> dict[str, Tensor]:
        """Return everything that training changes."""
        state = {**shardtrain.full_state_dict(self.model)}
        for name, param in self.model.named_parameters():
            for key, value in self.optimizer.state[param].items():
                state[f"{name} {key}"] = value.detach().cpu().clone()
            grad = torch.zeros(0) if param.grad is None else param.grad.as_subclass(Tensor)
            state[f"{name} gradient"] = grad.cpu()
        return state


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Return the names of what differs in any bit."""
    return [name for name in {**one, **other} if not torch.equal(one[name], other[name])]


def test_a_replay_is_a_step(records: Recordings) -> None:
    """Losses, parameters, statistics and the optimizer's state have the bits of steps as they are."""
    for make in (sgd, adamw):
        eager = Run(False, make)
        captured = Run(True, make)
        assert eager.losses(range(8)) == captured.losses(range(8))
        assert same(eager.state(), captured.state()) == []
        assert captured.step.replayed == 5
        assert captured.step.eager == {"to warm up": 3}


def in_way(way: Way, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a whole step of ``way`` on its micro-batches."""

    def step(*batches: Any) -> list[Tensor]:
        losses = []
        for number, (x, y) in enumerate(batches, 1):
            with nullcontext() if number == len(batches) else shardtrain.no_sync(model):
                loss = F.cross_entropy(model(x).float(), y)
                (loss / len(batches)).backward()
            losses.append(loss)
        if way.clip:
            losses.append(shardtrain.clip_grad_norm_(model, way.clip))
        optimizer.step()
        optimizer.zero_grad()
        return losses

    return step


def train_in_way(way: Way, captures: bool, rank: int = 0, **options: Any) -> tuple[list[float], Run]:
    """Take steps of ``way``; return what they returned, and the run."""
    model = ways.sharded(way, DEVICE, **options)
    run = Run(captures, step=partial(in_way, way), model=model, warmup=2)
    results: list[float] = []
    for number in range(5):
        batches = [batch(10 * number + micro, rank) for micro in range(way.micro_batches)]
        results += [value.item() for value in run.step(*batches)]
    return results, run


# Captured by default: what finds a planted fault. Over a group of one the others are long, as each value can
# be compared there; in other worlds they are for releases.
SHORT = {"silent": {"clip"}, "one": {"even"}, "eight": {"frozen, no_sync, clip"}}


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(
            name,
            size,
            id=f"{name}, {world}",
            marks=() if name in SHORT[world] else pytest.mark.long if size == 1 else pytest.mark.release,
        )
        for world, size in WORLDS.items()
        for name in CAPTURABLE
        if not WAYS[name].replicas or size == 1
    ],
)
def test_every_way_can_be_captured(name: str, size: int) -> None:
    way = WAYS[name]
    with simulated(size) as (device, _):
        options: dict[str, Any] = {}
        if way.replicas:
            options["mesh"] = mesh(1, 1)
        elif size == 1:
            options["transport"] = comm.ProcessGroupTransport(dist.group.WORLD)
        expected, eager = train_in_way(way, False, **options)
        device.next_step()
        results, captured = train_in_way(way, True, **options)
        if size <= 1:  # what a fake group gathers is nobody's values
            assert results == expected
            assert same(eager.state(), captured.state()) == []
        assert captured.step.summary == "3 replayed, 2 not: 2 to warm up"
        assert list(device.findings) == []


# What a graph has fixed, and what a user changes between two calls.


def change_rate_by_number(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 0.03


def change_rate_by_schedule(run: Run) -> None:
    run.schedule.step()


def load_into_memory(run: Run) -> None:
    state = shardtrain.full_state_dict(run.model)
    shardtrain.load_full_state_dict(run.model, {**state, "fc.weight": state["fc.weight"] * 1.5})


def change_weights(run: Run) -> None:
    with shardtrain.unsharded(run.model), torch.no_grad():
        run.model.fc.weight.mul_(1.5)


def evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(batch(77)[0])
    run.model.train()


def replace_memory(run: Run) -> None:
    """Between steps other memory is copied into the shards."""
    for param in run.model.parameters():
        param.data = param.data.clone() * 1.5


def train_without(run: Run) -> None:
    """A forward that no backward follows leaves the root whole."""
    run.model(batch(78)[0])


ACTS = (
    change_rate_by_number,
    change_rate_by_schedule,
    load_into_memory,
    change_weights,
    evaluate,
    replace_memory,
    train_without,
)


@pytest.mark.long
@pytest.mark.parametrize("change", [evaluate, train_without, change_weights])
def test_what_comes_before_the_recording_leaves_it_no_memory(
    records: Recordings, change: Callable[[Run], None]
) -> None:
    """Such as a root that is whole: the graph would read that memory, and not own it."""
    runs = Run(False), Run(True, warmup=1)
    losses = [run.losses(range(1)) for run in runs]
    for run in runs:
        change(run)
    losses += [run.losses(range(1, 4)) for run in runs]
    assert losses[0::2] == losses[1::2]
    assert runs[1].step.replayed == 3


@pytest.mark.parametrize("change", ACTS)
def test_what_acts_without_another_recording(records: Recordings, change: Callable[[Run], None]) -> None:
    runs = Run(False), Run(True, warmup=1)
    losses = [run.losses(range(3)) for run in runs]
    for run in runs:
        change(run)
    losses += [run.losses(range(3, 6)) for run in runs]
    assert losses[0::2] == losses[1::2]
    assert same(*(run.state() for run in runs)) == []
    assert runs[1].step.eager == {"to warm up": 1}


@pytest.mark.long
@pytest.mark.parametrize("act", [train_without, evaluate, load_into_memory])
def test_a_recording_waits_for_nothing_that_came_before_it(act: Callable[[Run], None]) -> None:
    """A unit that an earlier forward has left whole has an event of work that is not recorded."""
    with simulated(1) as (device, _):
        transport = comm.ProcessGroupTransport(dist.group.WORLD)
        runs = [
            Run(False, model=sharded(transport=transport)),
            Run(True, model=sharded(transport=transport), warmup=1),
        ]
        losses = [run.losses(range(1)) for run in runs]
        for run in runs:
            act(run)
        losses += [run.losses(range(1, 4)) for run in runs]
        assert losses[0::2] == losses[1::2]
        assert same(*(run.state() for run in runs)) == []
        assert list(device.findings) == []
    assert runs[1].step.summary == "3 replayed, 1 not: 1 to warm up"


def freeze(run: Run) -> None:
    run.model.blocks[0].requires_grad_(False)


def unfreeze(run: Run) -> None:
    run.model.stem.requires_grad_(True)


def to_eval(run: Run) -> None:
    run.model.blocks[1].eval()


def set_attribute(run: Run) -> None:
    run.model.blocks[1].norm.momentum = 0.5


def hook_output(run: Run) -> None:
    run.model.fc.register_forward_hook(lambda module, args, output: output * 2)


def hook_input(run: Run) -> None:
    run.model.fc.register_forward_pre_hook(lambda module, args: (args[0] * 2,))


def hook_gradient(run: Run) -> None:
    run.model.fc.weight.register_hook(lambda grad: grad * 2)


def hook_after_accumulation(run: Run) -> None:
    run.model.fc.weight.register_post_accumulate_grad_hook(lambda param: param.grad.mul_(2))


def halve(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"].mul_(0.5)


def hook_step(run: Run) -> None:
    run.optimizer.register_step_pre_hook(halve)


def hook_after_step(run: Run) -> None:
    run.optimizer.register_step_post_hook(halve)


def replace_tensor(run: Run) -> None:
    run.model.blocks[1].factor = torch.full((1,), 0.5, device=DEVICE)


def replace_in_list(run: Run) -> None:
    run.model.blocks[1].factors[0] = torch.full((1,), 0.5, device=DEVICE)


def replace_shards(run: Run) -> None:
    """Casts are adopted as the local shards' new memory."""
    for dtype in (torch.float64, torch.float32):
        for param in run.model.parameters():
            param.data = param.data.to(dtype)
        shardtrain.full_state_dict(run.model)


def replace_module(run: Run) -> None:
    run.model.blocks[2].relu = nn.Tanh()


def replace_buffer(run: Run) -> None:
    norm = run.model.blocks[0].norm
    norm.running_mean = norm.running_mean + 1


def decay(run: Run) -> None:
    run.optimizer.param_groups[0]["weight_decay"] = 0.1


def divide(run: Run) -> None:
    engine = run.model._shardtrain_engine
    engine.driver.reductions[engine.units[0]].divide_by = 2.0


def keep(run: Run) -> None:
    engine = run.model._shardtrain_engine
    engine.driver.schedule.keep_after_forward(engine.units[1], True)


def replace_state(run: Run) -> None:
    for state in run.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"] * 2


def add_group(run: Run) -> None:
    weights = [run.optimizer.param_groups[0]["params"].pop()]
    run.optimizer.add_param_group({"params": weights, "lr": 0.01})


def leave_gradient(run: Run) -> None:
    F.cross_entropy(run.model(batch(79)[0]), batch(79)[1]).backward()


CHANGES = {
    freeze: "requires_grad of blocks.0.conv.weight was True and is False",
    unfreeze: "requires_grad of stem.weight was False and is True",
    to_eval: "training of blocks.1 was True and is False",
    set_attribute: "momentum of blocks.1.norm was 0.1 and is 0.5",
    hook_output: "the hooks of fc changed",
    hook_input: "the hooks of fc changed",
    hook_gradient: "the hooks of fc.weight changed",
    hook_after_accumulation: "the post-accumulate hooks of fc.weight changed",
    hook_step: "the hooks of the optimizer before a step changed",
    hook_after_step: "the hooks of the optimizer after a step changed",
    replace_tensor: "factor of blocks.1 changed",
    replace_in_list: "factors of blocks.1 changed",
    replace_shards: "the memory of ",
    replace_module: "the modules in blocks.2 changed",
    replace_buffer: "the memory of buffers of blocks.0.norm changed",
    decay: "weight_decay of group 0 of SGD was 0 and is 0.1",
    divide: "divide_by of the root was None and is 2.0",
    keep: "reshard_after_forward of blocks.0 was False and is True",
    replace_state: "momentum_buffer of the state of SGD changed",
    add_group: "the parameters of group 0 of SGD changed",
    leave_gradient: "scale has a gradient before the step, unlike when recorded",
}


def multiply(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    scaled: Tensor = output * module.factor * module.factors[0]
    return scaled


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_records_again(change: Callable[[Run], None], caplog: pytest.LogCaptureFixture) -> None:
    """In one line of the log, after one step as it is."""
    with simulated(1):
        runs = []
        for captures in (False, True):
            model = sharded(transport=comm.ProcessGroupTransport(dist.group.WORLD))
            if change is unfreeze:
                model.stem.requires_grad_(False)
            model.blocks[1].factor = torch.ones(1, device=DEVICE)
            model.blocks[1].factors = [torch.ones(1, device=DEVICE)]
            model.blocks[1].register_forward_hook(multiply)
            make = adamw if change is unfreeze else sgd
            runs.append(Run(captures, make, model=model, **({"warmup": 1} if captures else {})))
        losses = [run.losses(range(2)) for run in runs]
        for run in runs:
            change(run)
        losses += [run.losses(range(2, 5)) for run in runs]
        assert losses[0::2] == losses[1::2]
        assert same(*(run.state() for run in runs)) == []
    captured = runs[1].step
    assert captured.eager == {"to warm up": 1, "after a change": 1}
    assert captured.replayed == 3
    lines = [record.getMessage() for record in caplog.records if record.name == "shardtrain"]
    assert len(lines) == 1
    assert lines[0].startswith(f"the captured step is recorded again: {CHANGES[change]}")


@contextmanager
def in_inference_mode() -> Iterator[None]:
    """Let grad mode be as it was."""
    with torch.inference_mode(), torch.enable_grad():
        yield


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        (nullcontext, partial(torch.autocast, "cuda", torch.bfloat16), "autocast was False and is True"),
        (
            partial(torch.autocast, "cuda", torch.bfloat16),
            partial(torch.autocast, "cuda", torch.float16),
            "the dtype of autocast was torch.bfloat16 and is torch.float16",
        ),
        (nullcontext, torch.no_grad, "grad mode was True and is False"),
        (nullcontext, in_inference_mode, "inference mode was False and is True"),
    ],
    ids=["autocast", "dtype", "no_grad", "inference"],
)
def test_another_mode_of_torch_records_again(
    records: Recordings,
    caplog: pytest.LogCaptureFixture,
    before: Callable[[], Any],
    after: Callable[[], Any],
    what: str,
) -> None:
    run = Run(True, warmup=1)
    with before():
        run.losses(range(2))
    with after(), suppress(RuntimeError):  # no_grad, inference_mode: there is no backward
        run.losses(range(2, 3))
    assert what in caplog.text
    assert run.step.eager["after a change"] == 1


def test_units_whose_gradients_are_to_wait_record_again(caplog: pytest.LogCaptureFixture) -> None:
    """As `set_requires_gradient_sync(False)` of `shardtrain.fsdp` has it. A replay would reduce them."""
    with simulated(1):
        run = Run(True, model=sharded(transport=comm.ProcessGroupTransport(dist.group.WORLD)), warmup=1)
        run.losses(range(2))
        engine = run.model._shardtrain_engine
        engine.driver.schedule.accumulate([engine.units[1]])
        with pytest.raises(ValueError, match="gradients wait"):
            run.losses(range(2, 3))
    assert "whether gradients wait of blocks.0 was False and is True" in caplog.text


def test_deterministic_kernels_and_the_precision_of_products_record_again(
    records: Recordings, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(True, warmup=1)
    run.losses(range(2))
    try:
        torch.use_deterministic_algorithms(True)
        run.losses(range(2, 4))
        torch.set_float32_matmul_precision("high")
        run.losses(range(4, 6))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert "deterministic algorithms was False and is True" in caplog.text
    assert "the precision of matrix products was highest and is high" in caplog.text
    assert run.step.replayed == 3


REGISTRIES = (
    nn.modules.module.register_module_forward_pre_hook,
    nn.modules.module.register_module_forward_hook,
    nn.modules.module.register_module_full_backward_pre_hook,
    nn.modules.module.register_module_full_backward_hook,
    register_optimizer_step_pre_hook,
    register_optimizer_step_post_hook,
)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of the stem: images need no gradient
@pytest.mark.parametrize("number", range(6))
def test_hooks_of_all_record_again(
    records: Recordings, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """Of modules, and of optimizers."""
    calls = []
    run = Run(True, warmup=1)
    for relu in filter(lambda module: isinstance(module, nn.ReLU), run.model.modules()):
        relu.inplace = False  # full backward hooks refuse it
    run.losses(range(2))
    handle = REGISTRIES[number](lambda *_: calls.append(0))
    try:
        run.losses(range(2, 5))
    finally:
        handle.remove()
    kind = "modules" if number < 4 else "optimizers"
    assert f"recorded again: the hooks of all {kind} changed" in caplog.text
    assert calls
    assert run.step.replayed == 3


def test_an_attribute_that_the_step_computes_is_not_compared(records: Recordings) -> None:
    """Such as a part of the loss. A tensor without a gradient would be what the next step reads."""
    for keeps in (False, True):
        run = Run(True, warmup=1)
        run.model.blocks[1].register_forward_hook(
            lambda module, args, output, keeps=keeps: setattr(
                module, "kept", output.mean().detach() if keeps else output.mean()
            )
        )
        run.losses(range(1))
        if keeps:
            with pytest.raises(ValueError, match=r"changes what a replay cannot: kept of blocks\.1 changed"):
                run.losses(range(1, 2))
        else:
            run.losses(range(1, 3))
            assert run.step.replayed == 2


def test_a_step_that_changes_something_each_time_is_never_recorded(records: Recordings) -> None:
    run = Run(True, warmup=1)
    for number in range(4):
        run.optimizer.param_groups[0]["momentum"] = 0.1 * number
        run.losses(range(number, number + 1))
    assert run.step.summary == "0 replayed, 4 not: 4 to warm up"
    assert records.recordings == []


def test_other_inputs_run_as_they_are(records: Recordings) -> None:
    """Also the first one: the shapes that come as often as warm-up has steps are recorded."""
    sizes = [3, 6, 6, 6, 3, 6, 3]
    losses = []
    for captures in (False, True):
        run = Run(captures, **({"warmup": 2} if captures else {}))
        losses.append([run.step(*batch(number, 0, n)).item() for number, n in enumerate(sizes)])
    assert losses[0] == losses[1]
    assert run.step.summary == "2 replayed, 5 not: 3 to warm up, 2 with other inputs"
    assert run.step.summary.startswith(str(records.replays))


def clears_first(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def never_clears(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def clears_by_zeros(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return loss

    return step


def scales(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Gradients decay instead of being cleared, and are other tensors after each step."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        for param in model.parameters():
            param.grad = param.grad * 0.5
        return loss

    return step


@pytest.mark.parametrize("step", [clears_first, never_clears, clears_by_zeros, scales])
@pytest.mark.parametrize("size", [pytest.param(0, marks=pytest.mark.long), 1])
def test_gradients_are_what_a_step_leaves(step: Callable[..., Step], size: int) -> None:
    """Also if users put other ones there, or a step of other inputs comes between."""
    results = []
    with simulated(size):
        for captures in (False, True):
            options = {"transport": comm.ProcessGroupTransport(dist.group.WORLD)} if size else {}
            run = Run(captures, step=step, model=sharded(**options), **({"warmup": 2} if captures else {}))
            losses = run.losses(range(5))
            losses.append(run.step(*batch(90, 0, 3)).item())
            for param in run.model.parameters():
                param.grad = param.grad * 3
            losses += run.losses(range(5, 7))
            results.append((losses, run.state()))
        assert results[0][0] == results[1][0]
        assert same(results[0][1], results[1][1]) == []
        assert run.step.replayed == 5


def test_gradients_that_the_step_leaves_can_be_cleared_between_calls(records: Recordings) -> None:
    losses = []
    for captures in (False, True):
        run = Run(captures, step=never_clears, **({"warmup": 1} if captures else {}))
        losses.append([])
        for number in range(5):
            losses[-1] += run.losses(range(number, number + 1))
            assert run.model.fc.weight.grad.abs().sum().item() > 0
            run.optimizer.zero_grad()
    assert losses[0] == losses[1]
    assert run.step.replayed == 4


def test_what_it_returns(records: Recordings) -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        step = plain_step(model, optimizer)
        return lambda batch, scale: {"loss": step(*batch) * scale, "text": ["as it is"]}

    for copies in (True, False):
        run = Run(True, step=make, warmup=1, copies=copies)
        results = [run.step(batch(number), 2.0) for number in range(4)]
        assert all(result["text"] == ["as it is"] for result in results)
        assert not any(result["loss"].requires_grad for result in results)
        pointers = {result["loss"].data_ptr() for result in results[1:]}
        assert len(pointers) == (3 if copies else 1)
        run.step(batch(4), 3.0)  # a number is no input of a graph
        assert run.step.eager["with other inputs"] == 1


def test_dropout_draws_as_in_other_steps(records: Recordings) -> None:
    losses = []
    for captures in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(75, 30), nn.Dropout(0.5), nn.Linear(30, 5)).to(DEVICE)
        model = shardtrain.shard(net, units=[nn.Linear])
        run = Run(captures, model=model, **({"warmup": 1} if captures else {}))
        torch.manual_seed(1)
        losses.append(run.losses(range(5)))
        torch.manual_seed(2)  # as the program does in each step
        losses[-1] += run.losses(range(5, 6))
        losses[-1].append(torch.rand(1).item())
    assert losses[0] == losses[1]
    assert run.step.replayed == 5


def test_counts_go_on_in_replays() -> None:
    """Of the guard, the meter, and the peak of what is gathered."""
    with simulated(8):
        counts = []
        for captures in (False, True):
            step = partial(in_way, WAYS["no_sync"])  # of three forwards
            run = Run(captures, step=step, model=sharded(), **({"warmup": 1} if captures else {}))
            for number in range(3):
                run.step(batch(number), batch(10), batch(11))
            info = shardtrain.introspect(run.model)
            info.take_gathered_peak()
            with comm.meter() as meter:
                run.step(batch(3), batch(10), batch(11))
            forward = info.transport.guard.paths.forward
            exposed = dict(meter.exposed())
            counts.append((meter.calls, meter.bytes, info.take_gathered_peak(), info.gathered, forward))
        assert counts[0] == counts[1]
        assert counts[0][0]["all_gather"] > 0
        assert exposed == {}


@pytest.mark.long
def test_averages_and_checkpoints_between_replays(records: Recordings, tmp_path: Path) -> None:
    results = []
    for captures in (False, True):
        run = Run(captures, make=adamw, **({"warmup": 1} if captures else {}))
        ema = Ema(run.model, 0.5)
        losses = []
        for number in range(6):
            losses += run.losses(range(number, number + 1))
            ema.update(number + 1)
            if number == 2:
                shardtrain.checkpoint.save(tmp_path / str(captures), run.model, run.optimizer)
            if number == 4:
                shardtrain.checkpoint.load(tmp_path / str(captures), run.model, run.optimizer)
                if not captures:
                    run.place_rates()
        with ema.swapped():
            results.append((losses, {**shardtrain.full_state_dict(run.model)}))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1]) == []
    assert run.step.eager == {"to warm up": 1, "after a change": 1}  # `load_state_dict` replaces tensors


# What cannot be captured.


def refused_by_capture(text: str, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    with pytest.raises(ValueError, match=text):
        shardtrain.capture(plain_step(model, optimizer), model, optimizer, **options)


def test_refusals_before_the_first_step(records: Recordings) -> None:
    model = sharded()
    params = [*model.parameters()]
    refused_by_capture(r"warmup=0\): expected at least 1", model, sgd(model), warmup=0)
    slow = torch.optim.SGD(params, 0.1)
    refused_by_capture(r"SGD reads its learning rate .*: SGD\(\.\.\., fused=True\)", model, slow)
    adam = torch.optim.Adam(params, fused=True)
    refused_by_capture(r"Adam decides on the host .*: Adam\(\.\.\., capturable=True\)", model, adam)
    nadam = torch.optim.NAdam(params, capturable=True)
    refused_by_capture("NAdam would keep its learning rate, a number, for ever", model, nadam)
    assert nadam.param_groups[0]["lr"] == 2e-3
    nadam.param_groups[0]["lr"] = torch.tensor(2e-3, device=DEVICE)
    shardtrain.capture(plain_step(model, nadam), model, nadam)
    with pytest.raises(ValueError, match="Linear is not sharded"):
        shardtrain.capture(plain_step(model, adam), nn.Linear(2, 2), adam)
    with shardtrain.unsharded(model):
        refused_by_capture(r"capture\(\) cannot be called inside", model, sgd(model))
    offloaded = sharded(offload=True)
    refused_by_capture("offload has the host wait", offloaded, sgd(offloaded))
    torch.use_deterministic_algorithms(True)
    try:
        virtual = sharded(virtual_ranks=2)
    finally:
        torch.use_deterministic_algorithms(False)
    refused_by_capture("virtual ranks compute and compare on the host", virtual, sgd(virtual))


def test_steps_on_the_cpu_are_refused() -> None:
    model = shardtrain.shard(OddNet(), units=[Block])
    refused_by_capture("only steps on a CUDA device can be captured, .* on cpu", model, sgd(model))


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    scaler = shardtrain.GradScaler("cuda", init_scale=8.0)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss

    return step


def with_another(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    step = plain_step(model, optimizer)
    another = adamw(model)

    def both(x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y)
        another.step()
        return loss

    return both


def without(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return lambda x, y: F.cross_entropy(model(x), y)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (scaled, "a GradScaler has the host decide whether to step"),
        (with_another, r"AdamW steps the model, which capture\(\) was not given"),
        (without, "the step did not step its SGD"),
    ],
)
def test_refusals_after_warm_up(records: Recordings, step: Callable[..., Step], text: str) -> None:
    """Before anything is recorded; later calls are steps as they are."""
    run = Run(True, step=step, warmup=2)
    run.losses(range(2))
    with pytest.raises(ValueError, match=f"the step cannot be captured: {text}"):
        run.losses(range(2, 3))
    run.losses(range(3, 4))
    assert run.step.eager == {"to warm up": 2, "since it cannot be captured": 1}
    assert records.recordings == []


def test_gradients_that_may_be_absent_are_refused() -> None:
    with simulated(8) as (_, records):
        torch.manual_seed(0)
        net = OddNet().to(DEVICE)
        net.blocks[0].unused = nn.Linear(30, 30).to(DEVICE)
        run = Run(True, model=shardtrain.shard(net, units=[Block]), warmup=1)
        run.losses(range(1))
        with pytest.raises(ValueError, match=r"blocks\.0\.unused\.weight has no gradient on this rank, and"):
            run.losses(range(1, 2))
        assert records.recordings == []


def reads_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        if loss.item() > 100:  # read on the host
            return loss
        return learn(loss, optimizer)

    return step


def reads_in_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        logits = model(x)
        logits.register_hook(lambda grad: grad * float(grad.isfinite().all()))  # read on the host
        loss = F.cross_entropy(logits, y)
        return learn(loss, optimizer)

    return step


def moves(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    step = plain_step(model, optimizer)
    return lambda x, y: step(x + torch.ones(1).to(DEVICE), y)  # read on the host


def recomputes(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        options = {"use_reentrant": False, "determinism_check": "none"}
        logits = checkpoint(model, x, **options)  # read on the host
        loss = F.cross_entropy(logits, y)
        return learn(loss, optimizer)

    return step


@pytest.mark.parametrize("step", [reads_loss, reads_in_backward, moves, recomputes])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_step_that_waits_is_refused_by_its_line(
    records: Recordings, step: Callable[..., Step], make: Callable[..., torch.optim.Optimizer]
) -> None:
    """And trains on as it is; a recording leaves nothing."""
    runs = Run(False, make, step), Run(True, make, step, warmup=1)
    losses = [run.losses(range(2)) if run is runs[0] else run.losses(range(1)) for run in runs]
    line = r"test_capture\.py:\d+, `.*# read on the host`: .*may not wait for the device"
    with pytest.raises(ValueError, match=line):
        runs[1].losses(range(1, 2))
    losses[1] += runs[1].losses(range(1, 2))
    losses = [losses[0] + runs[0].losses(range(2, 4)), losses[1] + runs[1].losses(range(2, 4))]
    assert losses[0] == losses[1]
    assert same(*(run.state() for run in runs)) == []
    assert runs[1].step.eager == {"to warm up": 1, "since it cannot be captured": 3}


# What the simulated device finds in a recording, each planted in a step.


def gives_back(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step that replaces a tensor which it has read: a replay reads the first one for ever."""
    step = plain_step(model, optimizer)
    scales = [torch.ones(1, device=DEVICE)]

    def replacing(x: Tensor, y: Tensor) -> Tensor:
        loss = step(x * scales[0], y)
        scales[0] = scales[0] * 1.5
        return loss

    return replacing


def on_a_stream_of_its_own(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    """Return a step that launches and allocates where nothing is recorded."""
    step = plain_step(model, optimizer)
    stream = devices.new_stream(DEVICE)

    def apart(x: Tensor, y: Tensor) -> Tensor:
        with devices.inside(stream):
            torch.ones(3, device=DEVICE)
        return step(x, y)

    return apart


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (gives_back, "outside: mul in a replay uses memory of before ((1,)), which was given back"),
        (on_a_stream_of_its_own, "outside: ones on a stream of priority 0, which is not recorded"),
    ],
)
def test_memory_outside_of_the_graph_is_found(step: Callable[..., Step], text: str) -> None:
    with simulated() as (device, _):
        run = Run(True, step=step, warmup=1)
        run.losses(range(3))
        assert run.step.replayed == 2
        assert next(iter(device.findings)).startswith(text)


@pytest.mark.parametrize("after", [0, 8])
def test_memory_that_a_recording_or_others_resize_is_found(after: int) -> None:
    """Of what was there before. What a recording allocates itself is the graph's."""
    with simulated() as (device, _):
        scale, apart, own = (torch.ones(1, device=DEVICE) for _ in range(3))
        own.untyped_storage().resize_(0)

        def run() -> None:
            own.untyped_storage().resize_(4)
            own.copy_(scale * apart)
            own.untyped_storage().resize_(0)
            scale.untyped_storage().resize_(after)

        _, launch = devices.Recorder(DEVICE).record(run)
        text = "outside: memory of before is used in a recording, and given back there, at test_capture"
        assert [finding[: len(text)] for finding in device.findings] == [text]
        apart.untyped_storage().resize_(0)
        apart.untyped_storage().resize_(1 << 20)
        device.findings.clear()
        launch()
        texts = {re.sub(", at .*", "", finding) for finding in device.findings}
        assert texts == {"outside: mul in a replay uses memory of before ((1,)), which was given back"}


def waits_for_before(side: Any, event: Any, x: Tensor) -> None:
    devices.current_stream(DEVICE).wait_event(event)


def leaves_open(side: Any, event: Any, x: Tensor) -> None:
    side.wait_event(devices.current_stream(DEVICE).record_event())
    with devices.inside(side):
        x.add_(1)


def synchronizes(side: Any, event: Any, x: Tensor) -> None:
    devices.synchronize(DEVICE)


@pytest.mark.parametrize(
    ("acts", "text"),
    [
        (waits_for_before, "dependency created on uncaptured work in another stream"),
        (leaves_open, "capturing stream has unjoined work"),
        (synchronizes, r"operation not permitted when stream is capturing \(synchronize\(\)\)"),
    ],
)
def test_streams_that_no_graph_can_have_are_refused(acts: Callable[..., None], text: str) -> None:
    """In the words of CUDA, as capture() passes them on."""
    with simulated() as (_, records):
        run = Run(False)
        step = run.step
        side = devices.new_stream(DEVICE)

        def acting(x: Tensor, y: Tensor) -> Tensor:
            loss: Tensor = step(x, y)
            acts(side, event, x)
            return loss

        with devices.inside(side):
            torch.ones(1, device=DEVICE)
            event = side.record_event()
        run.step = shardtrain.capture(acting, run.model, run.optimizer, warmup=1)
        run.losses(range(1))
        with pytest.raises(ValueError, match=f"the step cannot be captured.*: CUDA error: {text}"):
            run.losses(range(1, 2))
        assert records.recordings == []


class Planted(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_an_error_of_the_user_s_passes_a_recording(records: Recordings, where: str) -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def fail(*_: object) -> None:
            if records_now and where in records_now:
                raise Planted(where)

        model.blocks[1].register_forward_hook(lambda *_: fail() if where == "forward" else None)
        optimizer.register_step_pre_hook(lambda *_: fail() if where == "step" else None)
        step = plain_step(model, optimizer)

        def hooked(x: Tensor, y: Tensor) -> Tensor:
            if where == "backward":
                x = x.clone().requires_grad_()
                x.register_hook(lambda grad: fail())
            return step(x, y)

        return hooked

    records_now: set[str] = set()
    runs = Run(False, step=make), Run(True, step=make, warmup=1)
    losses = [run.losses(range(1)) for run in runs]
    records_now.add(where)
    with pytest.raises(Planted, match=where):
        runs[1].losses(range(1, 2))
    records_now.clear()
    losses += [run.losses(range(1, 4)) for run in runs]
    assert losses[0::2] == losses[1::2]
    assert same(*(run.state() for run in runs)) == []


def schedules(run: Run, model: nn.Module) -> None:
    run.schedule.step()


def counts(run: Run, model: nn.Module) -> None:
    model.count = getattr(model, "count", 0) + 1


def freezes(run: Run, model: nn.Module) -> None:
    model.stem.requires_grad_(not model.stem.weight.requires_grad)


def grows(run: Run, model: nn.Module) -> None:
    state = run.optimizer.state[model.fc.weight]
    state["count"] = state.get("count", 0) + 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (schedules, "the step changes its learning rate, .*: call the schedule after"),
        (counts, "the step changes what a replay cannot: count of the model was 1 and is 2"),
        (freezes, "the step changes what a replay cannot: requires_grad of stem.weight was"),
        (grows, "the step changes what a replay cannot: count of the state of AdamW was 1 and is 2"),
    ],
)
def test_what_the_step_itself_changes_is_refused(
    records: Recordings, change: Callable[..., None], text: str
) -> None:
    run = Run(False, adamw)
    step = run.step

    def changing(*inputs: Tensor) -> Tensor:
        loss: Tensor = step(*inputs)
        change(run, run.model)
        return loss

    run.step = shardtrain.capture(changing, run.model, run.optimizer, warmup=1)
    run.losses(range(1))
    with pytest.raises(ValueError, match=text):
        run.losses(range(1, 2))
    assert not records.is_held
    run.losses(range(2, 3))
    assert run.step.summary == "0 replayed, 2 not: 1 to warm up, 1 since it cannot be captured"


def test_inputs_that_no_graph_can_have(records: Recordings) -> None:
    run = Run(True)
    x, y = batch(0)
    with pytest.raises(ValueError, match="an input of a captured step is on cpu, the model on cuda:0"):
        run.step(*images(0, 0))
    with pytest.raises(ValueError, match="an input of a captured step requires a gradient"):
        run.step(x.clone().requires_grad_(), y)
    with pytest.raises(ValueError, match="an input of a captured step is a Run, in which tensors would go"):
        run.step(run)
    with shardtrain.no_sync(run.model):
        F.cross_entropy(run.model(x), y).backward()
    run.losses(range(1))  # a single rank has nothing to reduce
    with shardtrain.unsharded(run.model), pytest.raises(ValueError, match="a captured step cannot be called"):
        run.step(x, y)


def test_gradients_that_wait_are_refused() -> None:
    with simulated(8):
        run = Run(True, warmup=1)
        run.losses(range(1))
        with shardtrain.no_sync(run.model):
            F.cross_entropy(run.model(batch(0)[0]), batch(0)[1]).backward()
        with pytest.raises(ValueError, match="a captured step while gradients wait under no_sync"):
            run.losses(range(1, 2))


# Two real ranks, each with a simulated device, whose values gloo moves through host memory.


@contextmanager
def simulated_rank() -> Iterator[tuple[SimulatedDevice, Recordings]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEARDOWN_CUPTI", "0")  # as the recorder sets it, so that it is as before in the end
        with SimulatedDevice()(pytest.MonkeyPatch()) as device, recorder(device) as records:
            yield device, records


OTHER_WAYS = [
    pytest.param(name, marks=pytest.mark.long) for name in ("even", "kept, no_sync", "bf16", "replicas")
]


@pytest.mark.parametrize("name", ["frozen, no_sync, clip", *OTHER_WAYS])
@each_rank(2, transport="auto")
def test_two_ranks_replay_what_they_would_compute(name: str) -> None:
    way = WAYS[name]
    options: dict[str, Any] = {"transport": "process_group"}
    if way.replicas:
        options["mesh"] = mesh(2, 1)
    with simulated_rank() as (device, _):
        rank = dist.get_rank()
        expected, eager = train_in_way(way, False, rank, **options)
        results, captured = train_in_way(way, True, rank, **options)
        assert results == expected
        assert same(eager.state(), captured.state()) == []
        assert captured.step.summary == "3 replayed, 2 not: 2 to warm up"
        assert list(device.findings) == []


@each_rank(2, transport="auto")
def test_a_rank_that_runs_what_another_replays_is_named() -> None:
    """At the next comparison of paths, which both begin the step with."""
    with simulated_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "EVERY", 6)
        run = Run(True, model=sharded(transport="process_group"), warmup=2)
        odd = 3 if dist.get_rank() == 1 else 6
        run.losses(range(5))
        with pytest.raises(comm.Diverged) as raised:
            run.step(*batch(5, 0, odd))
        text = str(raised.value)
        assert text.startswith("forward 6: ranks 0 and 1 take different paths: rank 0 is replaying a step, ")
        assert "rank 1 is entering a step. A captured step must run on all ranks alike: inputs of" in text


@each_rank(2, transport="auto")
def test_ranks_that_replay_different_steps_are_named() -> None:
    with simulated_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "EVERY", 6)
        run = Run(True, model=sharded(transport="process_group"), warmup=2)
        run.losses(range(3))
        if dist.get_rank() == 1:
            run.model.blocks[1].eval()
        run.losses(range(3, 5))
        with pytest.raises(comm.Diverged, match="ranks 0 and 1 take different paths"):
            run.losses(range(5, 6))


@pytest.mark.parametrize("evaluates", [False, True])
@each_rank(2, transport="auto")
def test_replays_of_several_forwards_are_compared_as_often(evaluates: bool) -> None:
    """Their forwards are counted at once, so that the number at which paths are compared may be left out."""
    with simulated_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "EVERY", 6)
        step = partial(in_way, WAYS["no_sync"])
        run = Run(True, step=step, model=sharded(transport="process_group"), warmup=1)
        if evaluates:
            evaluate(run)

        def train(steps: range) -> None:
            for number in steps:
                run.step(batch(number), batch(10))

        train(range(2))
        name = f"of rank {dist.get_rank()}"
        run.step._graph = run.step._graph._replace(name=name)
        with pytest.raises(comm.Diverged, match="ranks 0 and 1 take different paths"):
            train(range(2, 5))


@each_rank(2, transport="auto")
def test_what_ranks_must_agree_on_before_a_step_is_recorded() -> None:
    rank = dist.get_rank()
    with simulated_rank() as (_, records):
        model = sharded(transport="process_group")
        with pytest.raises(ValueError, match=r"what is to be captured differs between ranks: .*warmup=2"):
            Run(True, model=model, warmup=1 + rank)
        run = Run(True, model=model, warmup=1)
        run.losses(range(1))
        with pytest.raises(ValueError, match=r"a captured step differs between ranks: .*recorded now: False"):
            run.step(*batch(1, 0, 6 - rank))
        if rank == 1:
            run.model.eval()
        else:
            run.model.note = 1
        with pytest.raises(ValueError, match="differs between ranks: rank 1 has training=False of the model"):
            run.step(*batch(1))
        assert records.recordings == []


@each_rank(2, transport="auto")
def test_a_reason_of_one_rank_is_every_rank_s() -> None:
    rank = dist.get_rank()
    with simulated_rank() as (_, records):
        run = Run(True, model=sharded(transport="process_group"), warmup=1)
        run.losses(range(1))
        if rank == 1:
            run.step._warm_up.reason = "planted"
        with pytest.raises(ValueError, match=r"the step cannot be captured: planted \(rank 1\)"):
            run.losses(range(1, 2))
        run.losses(range(2, 3))
        assert records.recordings == []


@each_rank(2, transport="auto")
def test_gloo_is_refused_for_what_needs_no_host() -> None:
    with simulated_rank(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices.Recorder, "only_capturable", True)
        model = sharded(transport="process_group")
        refused_by_capture("collectives of BackendTransport need the host: .* NCCL", model, sgd(model))


@each_rank(2, transport="auto")
def test_a_rank_that_is_lost_ends_the_replays_of_others() -> None:
    with simulated_rank():
        run = Run(True, model=sharded(transport="process_group"), warmup=2)
        run.losses(range(4))
        if dist.get_rank() == 1:
            return
        text = raised_soon(comm.PeerLost, lambda: run.losses(range(4, 6)))
        assert re.match("rank 1 has ended: rank 0 was at forward 5, replaying a step", text), text


def with_sums(model: nn.Module, optimizer: torch.optim.Optimizer, of_host: bool) -> Step:
    step = plain_step(model, optimizer)

    def more(x: Tensor, y: Tensor) -> Tensor:
        loss = step(x, y).detach()
        dist.all_reduce(loss)
        if of_host:
            dist.all_reduce(torch.ones(1))
        return loss

    return more


@each_rank(2, transport="auto")
def test_collectives_of_the_host_are_refused() -> None:
    """They would run once. Those of the device are a part of the graph."""
    with simulated_rank() as (_, records):
        losses = []
        for captures in (False, True):
            run = Run(
                captures,
                step=partial(with_sums, of_host=False),
                model=sharded(transport="process_group"),
                **({"warmup": 1} if captures else {}),
            )
            losses.append(run.losses(range(4)))
        assert losses[0] == losses[1]
        assert run.step.replayed == 3
        assert "allreduce_" in records.recordings[0].names
        run = Run(True, step=partial(with_sums, of_host=True), model=run.model, warmup=1)
        run.losses(range(1))
        with pytest.raises(
            ValueError, match=r"a collective \(c10d::allreduce_\) on the CPU, which no replay"
        ):
            run.losses(range(1, 2))
        run.losses(range(2, 3))


def test_a_scaler_that_is_off_is_no_reason(records: Recordings) -> None:
    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        scaler = shardtrain.GradScaler("cuda", enabled=False)

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        return step

    run = Run(True, step=make, warmup=1)
    run.losses(range(3))
    assert run.step.replayed == 2


def test_a_graph_that_is_released_is_recorded_again(records: Recordings) -> None:
    """A process group of NCCL ends only when no graph has its collectives."""
    eager = Run(False)
    run = Run(True, warmup=1)
    losses = run.losses(range(3))
    assert records.is_held
    run.step.release()
    assert not records.is_held
    losses += run.losses(range(3, 5))
    assert eager.losses(range(5)) == losses
    assert same(eager.state(), run.state()) == []
    assert run.step.summary == "4 replayed, 1 not: 1 to warm up"


def test_a_change_frees_the_graph_s_memory_before_the_next_step(records: Recordings) -> None:
    run = Run(True, warmup=1)
    run.losses(range(2))
    decay(run)
    run.losses(range(2, 3))
    assert not records.is_held


def test_the_recorder_of_a_card_deletes_its_graph_and_keeps_the_profiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = Mock()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *args, **kwargs: nullcontext())
    monkeypatch.setenv("TEARDOWN_CUPTI", "")
    monkeypatch.delenv("TEARDOWN_CUPTI")
    with SimulatedDevice()(monkeypatch):
        recorder = devices.Recorder(DEVICE)
        assert os.environ["TEARDOWN_CUPTI"] == "0"
        recorder.release()
        result, launch = recorder.record(lambda: 1)
    assert (result, launch) == (1, graph.replay)
    recorder.release()
    recorder.release()
    graph.reset.assert_called_once_with()


def test_a_recording_that_fails_returns_to_the_stream_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch leaves its context without doing so if CUDA has given the recording up."""
    with simulated() as (device, _):

        @contextmanager
        def graph(recording: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
            device.set_stream(stream)
            yield
            raise RuntimeError("capture_end")

        monkeypatch.setattr(torch.cuda, "graph", graph)
        before = device.current
        with pytest.raises(RuntimeError, match="capture_end"):
            devices.Recorder(DEVICE).record(lambda: 1)
        assert device.current is before


def test_a_warm_up_that_fails_is_waited_for(records: Recordings) -> None:
    [x, _] = batch(0)

    def fail() -> None:
        x.add_(1)
        raise Planted

    with pytest.raises(Planted):
        devices.Recorder(DEVICE).warm_up(fail)
    x.add_(1)  # the fixture finds races


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_nccl_would_register_wrongly_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:64,expandable_segments:True")
    with simulated(8):
        model = sharded()
        refused_by_capture(
            "hangs with expandable_segments:True .*: set NCCL_GRAPH_REGISTER=0", model, sgd(model)
        )
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
        Run(True, model=model)
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    with simulated():  # a single rank has no collectives
        Run(True)


# Replays that do not end.


def watchdog_of(run: Run) -> Watchdog:
    watchdog = run.step._watchdog
    assert isinstance(watchdog, Watchdog)
    return watchdog


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "shardtrain-replays"}


def test_a_replay_that_does_not_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a whole time-out of looks, by its number, the host's step and where the host waits."""
    with simulated(8) as (device, _):
        run = Run(True, model=sharded(), warmup=1)
        run.losses(range(3))
        watchdog = watchdog_of(run)
        assert watchdog.look() == ""
        inputs = batch(3)
        device.next_step()
        run.step(*inputs)
        assert device.waits == []
        assert watchdog.look() == ""
        with monkeypatch.context() as patch:
            patch.setattr(devices.HostNumber, "write", lambda *_: None)  # the device does not get there
            run.losses(range(4, 6))
        assert [watchdog.look() for _ in range(LOOKS)] == [""] * LOOKS
        reason = watchdog.look()
        assert reason.startswith(
            "rank 2 ends: replay 4 of the captured step has taken more than 1800 s, the time-out of the "
            "process group. The host was at forward 6, replaying a step ("
        )
        assert "), its main thread at " in reason
        assert "from test_capture.py:" in reason
        assert reason.endswith(
            "Another rank hangs, has ended or makes other collectives: see where the others are"
        )
        run.losses(range(6, 7))
        assert watchdog.look() == ""
        assert list(device.findings) == []


def test_pauses_and_slow_replays_are_no_alarm() -> None:
    with simulated(8):
        run = Run(True, model=sharded(), warmup=1)
        run.losses(range(3))
        watchdog = watchdog_of(run)
        assert not any(watchdog.look() for _ in range(3 * LOOKS))  # nothing has been launched since
        watchdog.launched(100)  # the host is far ahead
        for number in range(3, 50):
            watchdog._ended.write(number)
            assert not any(watchdog.look() for _ in range(LOOKS))


def test_only_replays_with_other_ranks_have_a_thread() -> None:
    gc.collect()
    before = threads()
    with simulated():
        Run(True, warmup=1).losses(range(3))
    with simulated(1):
        transport = comm.ProcessGroupTransport(dist.group.WORLD)
        Run(True, model=sharded(transport=transport), warmup=1).losses(range(3))
    assert threads() <= before
    with simulated(8):
        run = Run(True, model=sharded(), warmup=1)
        run.losses(range(1))
        assert threads() <= before
        run.losses(range(1, 3))
        run.step.release()
        run.losses(range(3, 5))
        assert len(threads() - before) == 1
        del run
        gc.collect()
        until(lambda: threads() <= before)


@each_rank(2, transport="auto")
def test_the_time_out_is_that_of_the_process_group() -> None:
    with simulated_rank():
        run = Run(True, model=sharded(transport="process_group"), warmup=1)
        run.losses(range(3))
        comm.set_time_out(timedelta(seconds=77))
        assert watchdog_of(run).time_out_s() == 77


def test_the_thread_ends_with_the_process_group() -> None:
    def time_out_s() -> float:
        if ended:
            raise ValueError
        return 0.1

    before = threads()
    ended = list[bool]()
    watchdog = Watchdog(torch.device("cpu"), Paths(0, [1]), time_out_s)
    assert len(threads() - before) == 1
    ended.append(True)
    until(lambda: threads() <= before)
    assert watchdog.look() == ""


HANGS = """
import ctypes, time, torch
from shardtrain.comm.guard import Paths
from shardtrain.engine.watchdog import LOOKS, Watchdog

time_out_s = 0.2
looks = []
watchdog = Watchdog(torch.device("cpu"), Paths(0, [1]), lambda: looks.append(0) or time_out_s)
watchdog.launched(1)
while len(looks) < 3 * LOOKS:
    time.sleep(0.01)
print("has paused", flush=True)
watchdog._ended.write = lambda number: None  # the device does not get there
time_out_s = 1.0
watchdog.launched(2)
ctypes.CDLL(None).pause()
"""


def test_the_process_ends_while_the_host_waits_outside_of_python() -> None:
    """Not while it pauses between steps."""
    command = [sys.executable, "-c", HANGS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert (result.returncode, result.stdout) == (1, "has paused\n"), result.stderr
    assert "rank 0 ends: replay 2 of the captured step has taken more than 1 s, the time-out" in result.stderr
    assert "its main thread at <string>:16 in <module>" in result.stderr


# The training program.


def run_program(folder: Path, *keys: str, warmup: int = 3) -> tuple[dict[str, Any], list[str], str]:
    """Train on the simulated device; return result.json, the lines of metrics, and log.txt."""
    lengths = ("train.log_every=1", "train.eval_every=1", "monitor.writers=[]")
    with simulated() as (device, _), pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "capture", partial(shardtrain.capture, warmup=warmup))
        words = ("+recipe=resnet", *TINY, *lengths, "train.capture=true", *keys)
        train(composed(*words), Context(ALONE, DEVICE, folder, commanded(*words).words))
        assert list(device.findings) == []
    log = (folder / "log.txt").read_text()
    return json.loads((folder / "result.json").read_text()), re.findall(r"loss [\d.]+", log), log


def saved(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a run's last checkpoint."""
    return load_file(folder / "checkpoints/step-00000010/rank-00000.safetensors")


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(("optim=sgd",), marks=pytest.mark.long),
        (
            *("optim=adamw", "train.accumulate=2", "ema.decay=0.5"),
            "train.class_weights=[1,9,1,4,1,1,1,1,1,1]",
        ),
    ],
)
def test_the_program_replays_its_steps(tmp_path: Path, keys: tuple[str, ...]) -> None:
    """Losses, scores, schedules and state are those of steps that run as they are."""
    _, expected, log = run_program(tmp_path / "eager", *keys, warmup=1000)
    assert "captured steps: 0 replayed, 10 not: 10 to warm up" in log
    result, losses, log = run_program(tmp_path / "captured", *keys)
    assert losses == expected
    assert "captured steps: 7 replayed, 3 not: 3 to warm up" in log
    assert result["captured_steps"] == "7 replayed, 3 not: 3 to warm up"
    state = saved(tmp_path / "captured")
    assert same(saved(tmp_path / "eager"), state) == []
    run_program(tmp_path / "plain", *keys, "train.capture=false")
    plain = saved(tmp_path / "plain")
    assert plain.keys() == state.keys()
    apart = {
        name: (state[name].double() - value.double()).abs().mean().item()
        for name, value in plain.items()
        if value.numel()
    }
    assert max(apart.values()) < 5e-3, apart  # rates are rounded to fp32 where steps are captured


@pytest.mark.long
def test_a_captured_run_resumes_to_the_bit(tmp_path: Path) -> None:
    keys = ("optim=adamw", "ema.decay=0.5", "sched=constant", "sched.warmup_epochs=0")
    run_program(tmp_path / "whole", *keys)
    run_program(tmp_path / "parts", *keys, "train.max_steps=5")
    _, _, log = run_program(tmp_path / "parts", *keys, "train.max_steps=null")
    assert "captured steps: 2 replayed, 3 not: 3 to warm up" in log
    assert same(saved(tmp_path / "whole"), saved(tmp_path / "parts")) == []


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (("parallel.precision=fp16",), "parallel.precision=fp16 has the host decide"),
        (("parallel.offload=true",), "offload has the host wait"),
        (("parallel.activation_checkpoint=true",), "parallel.activation_checkpoint has the host read random"),
        (("parallel.virtual_ranks=2",), "virtual ranks compute and compare on the host"),
        (("optim=muon",), "Muon decides on the host unless it is capturable"),
    ],
)
def test_what_the_program_cannot_capture(tmp_path: Path, keys: tuple[str, ...], text: str) -> None:
    with pytest.raises(UserError, match=f"train.capture=true: .*{text}"):
        run_program(tmp_path, *keys)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_program_that_ends_early_leaves_no_graph(tmp_path: Path, error: type[BaseException]) -> None:
    """The traceback refers to the captured step while the process group ends."""

    def end(monitor: Monitor, step: int) -> None:
        if step == 6:
            raise error

    keys = ("train.capture=true", "monitor.writers=[]")
    with simulated() as (_, records), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "step", end)
        with pytest.raises(error) as raised:
            train(composed("+recipe=resnet", *TINY, *keys), Context(ALONE, DEVICE, tmp_path))
        assert raised.traceback
        assert records.replays == 3
        assert not records.is_held
