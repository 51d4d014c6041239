"""Steps that are captured and replayed, on the simulated device with a recorder of graphs for it."""

import copy
import json
import os
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardtrain
from shardtrain import comm, public
from shardtrain import device as devices
from shardtrain.comm import guard
from shardtrain.config.errors import UserError
from shardtrain.graphs.capture import Captured
from shardtrain.launch.launcher import Context
from shardtrain.monitor import Monitor
from shardtrain.train import step_variants as program
from shardtrain.train.loop import train

import ways
from pool import each_rank
from simulated_device import DEVICE, SimulatedDevice
from simulated_graph import Recordings, recorder
from small import Block, OddNet, images, mesh, raised_soon
from tiny import ALONE, TINY, commanded, composed, handlers_restored
from ways import CAPTURABLE, WAYS, Way

Step = Callable[..., Any]
WARM = "to warm up"
CLEARS = "optimizer.zero_grad(); "


@contextmanager
def simulated(size: int = 0) -> Iterator[tuple[SimulatedDevice, Recordings]]:
    """Capture steps of the last rank of a fake group of ``size``; 0: of a silent rank, or of a real one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEARDOWN_CUPTI", "0")  # as the recorder sets it, so that it is as before in the end
        with SimulatedDevice()(patch) as device, recorder(device) as records:
            if size:
                backends = "cpu:fake,cuda:fake"
                dist.init_process_group(backends, store=FakeStore(), rank=size // 4, world_size=size)
            try:
                yield device, records
            finally:
                torch.use_deterministic_algorithms(False)
                if size:
                    dist.destroy_process_group()
    assert list(device.findings) == []


@pytest.fixture
def records() -> Iterator[Recordings]:
    with simulated() as (_, made):
        yield made


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True, capturable=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def batch(step: int, rank: int = 0, n: int = 6) -> list[Tensor]:
    return [tensor.to(DEVICE) for tensor in images(step, rank, n)]


def sharded(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shardtrain.shard(OddNet().to(DEVICE), units=[Block], **options)


def over_one() -> nn.Module:
    return sharded(transport=comm.ProcessGroupTransport(dist.group.WORLD))


def over_gloo() -> nn.Module:
    return sharded(transport="process_group")


def doing(last: str, model: nn.Module, optimizer: torch.optim.Optimizer, first: str = "") -> Step:
    """Return a training step that also runs the code ``first`` and ``last``."""
    own = globals() | {"model": model, "optimizer": optimizer}

    def step(x: Tensor, y: Tensor) -> Tensor:
        exec(first, own | {"x": x})
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
        optimizer.step()
        exec(last, own | {"x": x})
        return loss

    return step


plain_step = partial(doing, CLEARS)


class Run:
    """A model, its optimizer and its step, captured after one as it is, or not captured."""

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
            options = {"warmup": 1} | options
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


def twins(
    act: Callable[[Run], object] = lambda run: None,
    model: Callable[[], nn.Module] = sharded,
    before: int = 2,
    **options: Any,
) -> Run:
    """Train as it is and captured, with ``act`` after some steps: bits are equal. Return the captured run."""
    runs = [Run(captures, model=model(), **options) for captures in (False, True)]
    losses = [run.losses(range(before)) for run in runs]
    for run in runs:
        act(run)
    losses += [run.losses(range(before, before + 3)) for run in runs]
    assert losses[0::2] == losses[1::2]
    assert same(*(run.state() for run in runs)) == []
    return runs[1]


def compare_way(way: Way, rank: int, compares: bool, **options: Any) -> None:
    """Train in ``way`` as it is and captured."""
    results = []
    for captures in (False, True):
        model = ways.sharded(way, DEVICE, **options)
        run = Run(captures, step=partial(ways.step_of, way), model=model, warmup=2)
        values = []
        for number in range(5):
            batches = [batch(10 * number + micro, rank) for micro in range(way.micro_batches)]
            values += [value.item() for value in run.step(*batches)]
        results.append((values, run.state()))
    if compares:
        assert results[0][0] == results[1][0]
        assert same(results[0][1], results[1][1]) == []
    assert run.step.summary == "3 replayed, 2 not: 2 to warm up"


# Of a group of one, with streams and launches of NCCL, each value can be compared.
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("clip", 0),
        ("frozen, no_sync, clip", 8),
        *(pytest.param(way, 1, marks=() if way == "even" else pytest.mark.long) for way in CAPTURABLE),
    ],
)
def test_every_way_can_be_captured(name: str, size: int) -> None:
    with simulated(size):
        options: dict[str, Any] = {}
        if WAYS[name].replicas:
            options["mesh"] = mesh(1, 1)
        elif size == 1:
            options["transport"] = comm.ProcessGroupTransport(dist.group.WORLD)
        # What a fake group gathers is nobody's values.
        compare_way(WAYS[name], 0, size != 8, **options)


@pytest.mark.parametrize("name", ["frozen, no_sync, clip", pytest.param("replicas", marks=pytest.mark.long)])
@each_rank(2, transport="auto")
def test_two_ranks_replay_what_they_would_compute(name: str) -> None:
    options: dict[str, Any] = {"mesh": mesh(2, 1)} if WAYS[name].replicas else {}
    with simulated():
        compare_way(WAYS[name], dist.get_rank(), True, transport="process_group", **options)


def test_a_replay_is_a_step(records: Recordings) -> None:
    """Losses, parameters, statistics and the optimizer's state have the bits of steps as they are."""
    for make in (sgd, adamw):
        assert twins(make=make, before=5, warmup=3).step.summary == "5 replayed, 3 not: 3 to warm up"


# What users do between two calls, and what acts in replays.
EVALUATES = "model.eval()(batch(77)[0]).sum().item(); model.train()"
ACTS = [
    "optimizer.param_groups[0]['lr'] = 0.03",
    "run.schedule.step()",
    "state = full_state_dict(model); state['scale'] *= 2; load_full_state_dict(model, state)",
    EVALUATES,
    "for param in model.parameters(): param.data = param.data.clone() * 1.5",
]
# The step is recorded again, for the reason that stands below.
CHANGES = {
    "model.blocks[0].requires_grad_(False)": "requires_grad of parameters changed",
    "model.blocks[1].eval()": "training of modules changed",
    "cast(run, torch.float64); cast(run, torch.float32)": "the memory of parameters changed",
    "model.fc.bias = nn.Parameter(torch.ones(5, device=DEVICE))": "modules or their tensors changed",
    "model.blocks[2].relu = nn.Tanh()": "modules or their tensors changed",
    "model.blocks[0].norm.running_mean = torch.ones(7, device=DEVICE)": "modules or their tensors changed",
    "optimizer.param_groups[0]['weight_decay'] = 0.1": "groups of the optimizer changed",
    "engine.driver.reductions[engine.units[0]].divide_by = 2.0": "options of units changed",
    "engine.driver.schedule.keep_after_forward(engine.units[1], True)": "options of units changed",
    "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())); run.place_rates()": (
        "state of the optimizer changed"
    ),
    "params = optimizer.param_groups[0]['params']; params.reverse(); params.pop()": (
        "groups of the optimizer changed in number"
    ),
    "model(batch(79)[0]).sum().backward()": "scale has a gradient before the step, unlike when recorded",
}


def cast(run: Run, dtype: torch.dtype) -> None:
    """Casts are adopted as the local shards' new memory."""
    for param in run.model.parameters():
        param.data = param.data.to(dtype)
    shardtrain.full_state_dict(run.model)


def act(code: str, run: Run) -> None:
    engine = run.model._shardtrain_engine
    own = {"run": run, "model": run.model, "optimizer": run.optimizer, "engine": engine, "copy": copy}
    exec(code, globals() | vars(public) | own)


# Before the recording a forward without backward leaves the root whole, with an event of work of before.
@pytest.mark.parametrize(("code", "before"), [*((code, 3) for code in ACTS), ("model(batch(78)[0])", 1)])
def test_what_acts_without_another_recording(code: str, before: int) -> None:
    with simulated(1):
        assert twins(partial(act, code), over_one, before).step.eager == {WARM: 1}


def lines_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "shardtrain"]


@pytest.mark.parametrize("code", CHANGES)
def test_a_change_records_again(code: str, caplog: pytest.LogCaptureFixture) -> None:
    """In one line of the log, after one step as it is."""
    with simulated(1) as (_, records):
        captured = twins(partial(act, code), over_one).step
        assert [recording.is_deleted for recording in records.recordings] == [True, False]
    assert captured.summary == "3 replayed, 2 not: 1 to warm up, 1 after a change"
    [line] = lines_of(caplog)
    assert line.startswith(f"the captured step is recorded again: {CHANGES[code]}")


def test_units_whose_gradients_are_to_wait_record_again(caplog: pytest.LogCaptureFixture) -> None:
    """As `set_requires_gradient_sync(False)` of `shardtrain.fsdp` has it. A replay would reduce them."""
    with simulated(1):
        run = Run(True, model=over_one())
        run.losses(range(2))
        act("engine.driver.schedule.accumulate([engine.units[1]])", run)
        with pytest.raises(ValueError, match="gradients wait"):
            run.losses(range(2, 3))
    assert "options of units changed" in caplog.text


def test_what_is_not_compared_takes_a_release(records: Recordings) -> None:
    """Such as a hook. The graph is deleted: NCCL ends a group only when no graph has its collectives."""

    def hook(run: Run) -> None:
        run.model.fc.register_forward_hook(lambda module, args, output: output * 2)
        if isinstance(run.step, Captured):
            assert records.is_held
            run.step.release()
            assert not records.is_held

    assert twins(hook).step.summary == "3 replayed, 2 not: 1 to warm up, 1 after a change"


def test_memory_that_nobody_compares_is_held(records: Recordings) -> None:
    """A tensor of a closure that is replaced: the replay reads the first one, and no other memory."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        step = plain_step(model, optimizer)
        return lambda x, y: step(x * scales[0], y)

    scales = [torch.ones(1, device=DEVICE)]
    eager = Run(False)
    run = Run(True, step=make)
    losses = run.losses(range(2))
    scales[0] = scales[0] * 1.5
    assert losses + run.losses(range(2, 4)) == eager.losses(range(4))


# The momentum varies, as with OneCycleLR; or the number of images does.
@pytest.mark.parametrize(
    ("more", "why"),
    [(0, "groups of the optimizer changed"), (1, "no shapes and numbers of inputs came 2 times")],
)
def test_a_step_that_is_never_replayed_says_why(
    records: Recordings, caplog: pytest.LogCaptureFixture, more: int, why: str
) -> None:
    """In one line, at the tenth call."""
    run = Run(True, warmup=2)
    for number in range(12):
        if not more:
            run.optimizer.param_groups[0]["momentum"] = 0.1 + 0.01 * number
        run.step(*batch(number, 0, 3 + more * number))
        assert len(lines_of(caplog)) == (number >= 9)
    assert lines_of(caplog)[0].startswith(f"the captured step was replayed in none of 10 calls: {why}")
    assert run.step.replayed == 0


def test_other_inputs_run_as_they_are(records: Recordings) -> None:
    """Also the first one: the shapes that come as often as warm-up has steps are recorded."""
    losses = []
    for captures in (False, True):
        run = Run(captures, warmup=2) if captures else Run(False)
        losses.append([run.step(*batch(at, 0, n)).item() for at, n in enumerate([3, 6, 6, 6, 3, 6, 3])])
    assert losses[0] == losses[1]
    assert run.step.summary == "2 replayed, 5 not: 3 to warm up, 2 with other inputs"
    assert records.replays == 2


DECAY = "for param in model.parameters(): param.grad = param.grad * 0.5"
# Others are put there, and a step of other inputs comes between; or they are cleared between calls.
REPLACE = "run.step(*batch(90, 0, 3))\nfor param in model.parameters(): param.grad = param.grad * 3"
CLEAR = "for n in range(5, 8): optimizer.zero_grad(); run.losses(range(n, n + 1))\noptimizer.zero_grad()"


@pytest.mark.parametrize(
    ("first", "last", "between", "before", "replayed"),
    [
        (CLEARS, "", REPLACE, 5, 7),
        ("", "", REPLACE, 5, 7),
        ("", DECAY, REPLACE, 5, 7),
        ("", "", CLEAR, 1, 5),
    ],
)
def test_gradients_are_what_a_step_leaves(
    first: str, last: str, between: str, before: int, replayed: int
) -> None:
    with simulated(1):
        run = twins(partial(act, between), over_one, before, step=partial(doing, last, first=first))
        assert run.step.replayed == replayed


def test_what_it_returns(records: Recordings) -> None:
    """Copies, without a gradient, in containers as they are."""

    def make(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        step = plain_step(model, optimizer)
        return lambda batch, scale: {"losses": [step(*batch) * scale]}

    run = Run(True, step=make)
    losses = [run.step(batch(number), 2.0)["losses"][0] for number in range(4)]
    assert not any(loss.requires_grad for loss in losses)
    assert len({loss.data_ptr() for loss in losses[1:]}) == 3
    run.step(batch(4), 3.0)  # a number is no input of a graph
    assert run.step.eager["with other inputs"] == 1


def test_counts_go_on_in_replays() -> None:
    """Of the guard, the meter, and the peak of what is gathered."""
    with simulated(8):
        counts = []
        for captures in (False, True):
            run = Run(captures, step=partial(ways.step_of, WAYS["no_sync"]))  # of three forwards
            for number in range(3):
                run.step(batch(number), batch(10), batch(11))
            info = shardtrain.introspect(run.model)
            info.take_gathered_peak()
            with comm.meter() as meter:
                run.step(batch(3), batch(10), batch(11))
            forward = info.transport.guard.paths.forward
            counts.append((meter.calls, meter.bytes, info.take_gathered_peak(), info.gathered, forward))
        assert counts[0] == counts[1]
        assert counts[0][0]["all_gather"] > 0
        assert dict(meter.exposed()) == {}


# What cannot be captured, on a sharded ``model`` with its ``params``, and the message.
CALLS = {
    "capture(step, model, sgd(model), warmup=0)": r"warmup=0\): expected at least 1",
    "capture(step, model, SGD(params))": r"SGD reads its learning rate .*: SGD\(\.\.\., fused=True\)",
    "capture(step, model, Adam(params))": r"Adam decides on the host .*: Adam\(\.\.\., capturable=True\)",
    "capture(step, model, NAdam(params, capturable=True))": "NAdam would keep its learning rate",
    "capture(step, offloaded := sharded(offload=True), sgd(offloaded))": "offload has the host wait",
    "torch.use_deterministic_algorithms(True); v = sharded(virtual_ranks=8); capture(step, v, sgd(v))": (
        "virtual ranks compute and compare on the host"
    ),
    "with unsharded(model): capture(step, model, sgd(model))": "cannot be called inside",
    "capture(step, plain := shard(OddNet()), sgd(plain))": "only steps on a CUDA device can .* on cpu",
    "Run(True, model=model).step(*images(0, 0))": "a captured step is on cpu, the model on cuda:0",
    "Run(True, model=model).step(batch(0)[0].requires_grad_())": "a captured step requires a gradient",
    "Run(True, model=model).step(model)": "a captured step is a OddNet, in which tensors would go unseen",
    "run = Run(True, model=model)\nwith unsharded(model): run.step(*batch(0))": "a captured step cannot be",
    "run = Run(True, model=model)\nwith no_sync(model): model(batch(0)[0]).sum().backward()\nrun.step()": (
        "a captured step while gradients wait under no_sync"
    ),
}


@pytest.mark.parametrize("code", CALLS)
def test_refusals_before_the_first_step(code: str) -> None:
    with simulated(8):
        model = sharded()
        names = vars(torch.optim) | vars(public) | {"model": model, "params": [*model.parameters()]}
        with pytest.raises(ValueError, match=CALLS[code]):
            exec(code, globals() | names | {"step": None})


def test_memory_that_nccl_would_register_wrongly_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_GRAPH_REGISTER", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    with simulated():  # a single rank has no collectives
        Run(True)
    with simulated(8):
        with pytest.raises(ValueError, match=r"hangs with expandable_segments:True .*: set NCCL_GRAPH_REG"):
            Run(True)
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", "0")
        Run(True)


def test_gradients_that_may_be_absent_are_refused() -> None:
    with simulated(8) as (_, records):
        net = OddNet().to(DEVICE)
        net.blocks[0].unused = nn.Linear(30, 30).to(DEVICE)
        run = Run(True, model=shardtrain.shard(net, units=[Block]))
        run.losses(range(1))
        with pytest.raises(ValueError, match=r"blocks\.0\.unused\.weight has no gradient on this rank, and"):
            run.losses(range(1, 2))
        assert records.recordings == []


# What a step does besides training, and the message. The first two are found before anything is recorded.
DOES = {
    "adamw(model).step()": r"cannot be captured: AdamW steps the model, which capture\(\) was not given",
    "scaler = shardtrain.GradScaler('cuda'); scaler.scale(model(x).sum()).backward(); "
    "scaler.step(optimizer); scaler.update(); optimizer.zero_grad()": (
        "cannot be captured: a GradScaler has the host decide whether to step"
    ),
    "x.sum().item()": "CUDA error: ",
    "random.random()": "the step draws from Python's random, and each replay",
    "np.random.rand()": "the step draws from NumPy's random, and each replay",
    "torch.rand(())": "the step draws from torch's generator of the CPU, and each replay",
    "optimizer.param_groups[0]['lr'].mul_(0.5)": "the step changes its learning rate, .*: call the schedule",
    "model.blocks[0].train(not model.blocks[0].training)": (
        "the step changes what a replay cannot: training of modules changed"
    ),
}


@pytest.mark.parametrize("code", DOES)
def test_what_a_recording_finds_is_refused(records: Recordings, code: str) -> None:
    """By name. It trains on as it is; the recording leaves nothing."""
    losses = []
    states = []
    for captures in (False, True):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        run = Run(captures, step=partial(doing, CLEARS + code))
        losses.append(run.losses(range(1)))
        if captures:
            with pytest.raises((ValueError, RuntimeError), match=DOES[code]):  # the latter are torch's
                run.losses(range(1, 2))
            assert not records.is_held
        losses[-1] += run.losses(range(1, 3))
        drawn = torch.tensor([random.random(), np.random.rand(), torch.rand(()).item()])
        states.append({**run.state(), "drawn": drawn})
    if "train(" not in code:  # which Python has changed
        assert losses[0] == losses[1]
        assert same(*states) == []
    assert run.step.eager == {WARM: 1, "since it cannot be captured": 2}


FAILS = Mock(side_effect=ZeroDivisionError)


@pytest.mark.parametrize(
    "hook",
    [
        "model.blocks[1].register_forward_hook(FAILS)",
        "model.blocks[1].register_full_backward_hook(FAILS)",
        "optimizer.register_step_pre_hook(FAILS)",
    ],
)
def test_an_error_of_the_user_s_passes_a_recording(records: Recordings, hook: str) -> None:
    code = f"handle = {hook}\nwith pytest.raises(ZeroDivisionError): run.losses(range(1, 2))\nhandle.remove()"
    twins(lambda run: isinstance(run.step, Captured) and act(code, run), before=1)


# Two real ranks.


@pytest.mark.parametrize("how", ["other inputs", "another mode"])
@each_rank(2, transport="auto")
def test_ranks_that_take_other_steps_are_named(how: str) -> None:
    """At the next comparison of paths, which both begin the step with."""
    with simulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "EVERY", 6)
        run = Run(True, model=over_gloo(), warmup=2)
        run.losses(range(3))
        is_odd = dist.get_rank() == 1
        if is_odd and how == "another mode":
            run.model.blocks[1].eval()
        sizes = [6, 6, 3 if is_odd and how == "other inputs" else 6]
        with pytest.raises(comm.Diverged, match="ranks 0 and 1 take different paths") as raised:
            [run.step(*batch(number, 0, n)) for number, n in enumerate(sizes, 3)]
        if how == "other inputs":
            text = str(raised.value)
            assert text.startswith("forward 6: ")
            assert "paths: rank 0 is replaying a step" in text
            assert "rank 1 is entering a step. A captured step must run on all ranks alike: inputs of" in text


@pytest.mark.parametrize("evaluates", [False, True])
@each_rank(2, transport="auto")
def test_replays_of_several_forwards_are_compared_as_often(evaluates: bool) -> None:
    """Their forwards are counted at once, so that the number at which paths are compared may be left out."""
    with simulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard, "EVERY", 6)
        run = Run(True, step=partial(ways.step_of, WAYS["no_sync"]), model=over_gloo())
        if evaluates:
            act(EVALUATES, run)
        for number in range(2):
            run.step(batch(number), batch(10))
        run.step._graph = run.step._graph._replace(name=f"of rank {dist.get_rank()}")
        later = [(batch(number), batch(10)) for number in range(2, 5)]
        with pytest.raises(comm.Diverged, match="ranks 0 and 1 take different paths"):
            [run.step(*batches) for batches in later]


@each_rank(2, transport="auto")
def test_what_ranks_must_agree_on_before_a_step_is_recorded() -> None:
    rank = dist.get_rank()
    with simulated() as (_, records):
        model = over_gloo()
        with pytest.raises(ValueError, match=r"what is to be captured differs between ranks: .*warmup=2"):
            Run(True, model=model, warmup=1 + rank)
        run = Run(True, model=model)
        run.losses(range(1))
        with pytest.raises(ValueError, match=r"a captured step differs between ranks: .*recorded now: False"):
            run.step(*batch(1, 0, 6 - rank))
        run.model.train(rank == 0)
        with pytest.raises(ValueError, match=r"differs between ranks: .*rank 1 has .*"):
            run.step(*batch(1))
        run = Run(True, model=model.train())
        run.losses(range(1))
        if rank == 1:
            run.step._reason = "planted"
        with pytest.raises(ValueError, match=r"the step cannot be captured: planted \(rank 1\)"):
            run.losses(range(1, 2))
        run.losses(range(2, 3))
        assert records.recordings == []


@each_rank(2, transport="auto")
def test_a_rank_that_is_lost_ends_the_replays_of_others() -> None:
    with simulated():
        run = Run(True, model=over_gloo(), warmup=2)
        run.losses(range(4))
        if dist.get_rank() == 1:
            return
        text = raised_soon(comm.PeerLost, lambda: run.losses(range(4, 6)))
        assert re.match("rank 1 has ended: rank 0 was at forward 5, replaying a step", text), text


@each_rank(2, transport="auto")
def test_collectives_of_the_host_are_refused() -> None:
    """They would run once. Those of the device are a part of the graph."""
    with simulated() as (_, records), pytest.MonkeyPatch.context() as patch:
        run = twins(model=over_gloo, step=partial(doing, CLEARS + "dist.all_reduce(x.clone())"))
        assert run.step.replayed == 4
        assert "allreduce_" in records.recordings[0].names
        run = Run(True, step=partial(doing, CLEARS + "dist.all_reduce(torch.ones(1))"), model=run.model)
        run.losses(range(1))
        text = r"a collective \(c10d::allreduce_\) on the CPU, which no replay"
        with pytest.raises(ValueError, match=text):
            run.losses(range(1, 2))
        run.losses(range(2, 3))
        patch.setattr(devices.Recorder, "only_capturable", True)  # as it is, but for these tests
        with pytest.raises(ValueError, match=r"collectives of BackendTransport need the host: .* NCCL"):
            Run(True, model=run.model)


# The recorder of a card.


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
        assert recorder.record(lambda: 1) == (1, graph.replay)
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


# What the simulated device finds in a recording.


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("now.wait_event(event)", "dependency created on uncaptured work in another stream"),
        ("side.wait_event(now.record_event())\nwith devices.inside(side): x.add_(1)", "unjoined work"),
    ],
)
def test_streams_that_no_graph_can_have_are_refused(records: Recordings, code: str, text: str) -> None:
    side = devices.new_stream(DEVICE)
    with devices.inside(side):
        torch.ones(1, device=DEVICE)
        event = side.record_event()
    x = torch.ones(1, device=DEVICE)
    own = globals() | {"side": side, "event": event, "x": x}
    with pytest.raises(RuntimeError, match=f"CUDA error: .*{text}"):
        devices.Recorder(DEVICE).record(lambda: exec(code, own | {"now": devices.current_stream(DEVICE)}))


def test_memory_outside_of_a_recording_is_found() -> None:
    """What others resize or free, and what is on a stream that takes no part."""
    with simulated() as (device, _):
        scale, apart, own = (torch.ones(1, device=DEVICE) for _ in range(3))
        own.untyped_storage().resize_(0)
        stream = devices.new_stream(DEVICE)

        def run() -> None:
            own.untyped_storage().resize_(4)
            own.copy_(scale * apart)
            own.untyped_storage().resize_(0)
            scale.untyped_storage().resize_(8)
            with devices.inside(stream):
                torch.ones(3, device=DEVICE)

        _, launch = devices.Recorder(DEVICE).record(run)
        texts = [re.sub(", at .*", "", finding) for finding in device.findings]
        assert texts[0] == "outside: memory of before is used in a recording, and given back there"
        assert "outside: ones on a stream of priority 0, which is not recorded" in texts
        apart.untyped_storage().resize_(0)
        apart.untyped_storage().resize_(1 << 20)
        device.findings.clear()
        launch()
        texts = [re.sub(", at .*", "", finding) for finding in device.findings]
        assert {*texts} == {"outside: mul in a replay uses memory of before ((1,)), which was given back"}
        device.findings.clear()


# The training program.


def run_program(folder: Path, *keys: str, warmup: int = 3) -> tuple[list[str], str, dict[str, Tensor]]:
    """Train on the simulated device; return the losses in log.txt, the summary, and the last checkpoint."""
    lengths = ("train.log_every=1", "train.eval_every=1", "monitor.writers=[]")
    with simulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "capture", partial(shardtrain.capture, warmup=warmup))
        words = ("+recipe=resnet", *TINY, *lengths, "train.capture=true", *keys)
        train(composed(*words), Context(ALONE, DEVICE, folder, commanded(*words).words))
    log = (folder / "log.txt").read_text()
    summary = json.loads((folder / "result.json").read_text()).get("captured_steps", "")
    assert summary in log
    saved = load_file(folder / "checkpoints/step-00000010/rank-00000.safetensors")
    return re.findall(r"loss [\d.]+", log), summary, saved


def test_the_program_replays_its_steps(tmp_path: Path) -> None:
    """Losses, scores, schedules and state are those of steps that run as they are."""
    keys = ("optim=adamw", "train.accumulate=2", "ema.decay=0.5", "train.class_weights=[1,9,1,4,1,1,1,1,1,1]")
    expected, summary, state = run_program(tmp_path / "eager", *keys, warmup=1000)
    assert summary == "0 replayed, 10 not: 10 to warm up"
    losses, summary, captured = run_program(tmp_path / "captured", *keys)
    assert summary == "7 replayed, 3 not: 3 to warm up"
    assert losses == expected
    assert same(state, captured) == []
    bias = "encoder.layers.encoder_layer_0.ln_1.bias"
    assert captured[f"ema/{bias}"].abs().sum() > 0  # it was zeros
    _, summary, plain = run_program(tmp_path / "plain", *keys, "train.capture=false")
    assert summary == ""
    for name, value in plain.items():  # rates are rounded to fp32 where steps are captured
        torch.testing.assert_close(captured[name], value, rtol=0.02, atol=0.02)


# What the program cannot capture, and the message.
KEYS = {
    "parallel.precision=fp16": "parallel.precision=fp16 has the host decide",
    "parallel.activation_checkpoint=true": "parallel.activation_checkpoint has the host read random",
    "optim=muon": "Muon decides on the host unless it is capturable",
}


@pytest.mark.parametrize("key", KEYS)
def test_what_the_program_cannot_capture(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match=f"train.capture=true: .*{KEYS[key]}"):
        run_program(tmp_path, key)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_program_that_ends_early_leaves_no_graph(tmp_path: Path, error: type[BaseException]) -> None:
    """The traceback refers to the captured step while the process group ends."""

    def end(monitor: Monitor, step: int) -> None:
        if step == 6:
            raise error

    keys = ("train.capture=true", "monitor.writers=[]")
    with simulated() as (_, records), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Monitor, "step", end)
        with handlers_restored(), pytest.raises(error) as raised:
            train(composed("+recipe=resnet", *TINY, *keys), Context(ALONE, DEVICE, tmp_path))
        assert raised.traceback
        assert records.replays == 3
        assert not records.is_held
