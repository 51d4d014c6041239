"""Plans against what real ranks measure; worlds that nobody has; the planner's command line."""

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import shardtrain
from shardtrain import comm
from shardtrain.config.errors import UserError
from shardtrain.job.build import build
from shardtrain.job.step import Step
from shardtrain.plan.__main__ import PlanSettings, plan, read
from shardtrain.plan.memory import MEMORY_KINDS, MemoryPoint, MemoryTimeline, memory_of_step, state_bytes
from shardtrain.plan.report import headline, rank_table
from shardtrain.plan.simulate import Plan, simulate
from shardtrain.plan.transport import Simulated

from small import Parts
from tiny import ALONE, CPU, VIT, composed, over_transport

MIB = 2**20
RESNET = ["model=resnet18", "data.image_size=16"]
DEEPER = ["model=vit_cifar", "model.layers=4", "model.width=96"]
FAKE = ["+recipe=resnet", "data=fake", "data.limit=96", "train.batch_size=16"]


def settings(*arguments: str) -> PlanSettings:
    return read([*FAKE, *arguments], speak=False)


def planned(*arguments: str) -> Plan:
    with over_transport(arguments) as words:
        found = settings(*words)
    return simulate(found.config, found.question)


class _EndsOfOperations(TorchDispatchMode):
    """A mode that marks in a profile where each operation ends."""

    NAME = "an operation ends"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        with torch.autograd.profiler.record_function(self.NAME):
            return result


def allocated(step: Callable[[], object]) -> int:
    """Return the most that the CPU's allocator had given out at the end of an operation of ``step()``.

    Counted above what it had given out before. Scratch memory of kernels, which depends on the processor, is
    not counted: it is free again at the end of the operation.
    """
    with torch.autograd.profiler.profile(profile_memory=True) as profile, _EndsOfOperations():
        step()
    events = sorted(profile.kineto_results.events(), key=lambda event: event.start_ns())
    most = 0
    held = 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
        elif event.name() == _EndsOfOperations.NAME:
            most = max(most, held)
    return most


def measured(*arguments: str) -> dict[str, Any]:
    """The second step of a real run: memory by the tracker and by the allocator, traffic by the meter.

    The allocator is read between operations: what kernels take for a moment depends on the processor.
    """
    with over_transport(arguments) as words:
        job, config = build(composed(*FAKE, *words), comm.rank(), comm.world_size(), CPU)
    step = Step(job.model, job.loss, job.optimizer, config.train.clip_grad_norm, job.ema)
    batches = [batch[:2] for batch in itertools.islice(iter(job.train), config.train.accumulate)]
    step(batches)
    with comm.meter() as traffic:
        timeline = memory_of_step(step, batches)
    first = timeline.points[0]
    gathered = first.bytes[MEMORY_KINDS.index("gathered")]
    return {
        "state": state_bytes(job.model, job.optimizer, job.ema),
        "sent": dict(traffic.bytes),
        "calls": dict(traffic.calls),
        "peak": timeline.peak.total,
        "allocated": allocated(lambda: step(batches)) + first.total - gathered,
    }


def assert_kept(plan: Plan, found: dict[str, Any]) -> None:
    """State and traffic exactly, the peak within a tenth."""
    for name in ("state", "sent", "calls"):
        assert getattr(plan, name) == found[name], name
    assert plan.peak == pytest.approx(found["peak"], rel=0.1)


AGAIN = "parallel.activation_checkpoint=true"
MESSAGES = "SHARDTRAIN_TRANSPORT=process_group"
LOW_GRADIENTS = "parallel.reduce=bf16"


CHANGES = "train.accumulate=2 parallel.precision=bf16 optim=adamw parallel.reshard_after_forward=false"


@pytest.mark.parametrize(
    ("world", "arguments"),
    [
        pytest.param(2, [*VIT, "SHARDTRAIN_TRANSPORT=shared_memory"], marks=pytest.mark.long),
        (2, [*VIT, MESSAGES, *CHANGES.split(), "ema.decay=0.9"]),
        pytest.param(1, [*DEEPER, MESSAGES, AGAIN], marks=pytest.mark.long),
        pytest.param(2, [*VIT, MESSAGES, "optim=muon"], marks=pytest.mark.long),
        pytest.param(2, [*RESNET, MESSAGES, AGAIN], marks=pytest.mark.long),
        pytest.param(4, [*VIT, "parallel.replicate=2", "parallel.precision=bf16"], marks=pytest.mark.long),
        pytest.param(3, [*VIT, MESSAGES, LOW_GRADIENTS, "train.batch_size=18"], marks=pytest.mark.long),
    ],
)
def test_a_plan_is_kept(on_ranks: Any, world: int, arguments: list[str]) -> None:
    plan = planned(*arguments, f"world_size={world}")
    found = on_ranks(world, measured, *arguments)[plan.question.rank]
    assert_kept(plan, found)
    assert plan.peak == pytest.approx(found["allocated"], rel=0.1)


def test_activations_are_computed_again() -> None:
    kept, again = (planned(*DEEPER, "world_size=1", *words).timeline for words in ((), (AGAIN,)))
    assert again.most("activations") < kept.most("activations")


class Words(nn.Module):
    """A language model of one block: indices in, a dictionary out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 4 * width, batch_first=True)

    def forward(self, words: torch.Tensor, mask: torch.Tensor) -> dict[str, Any]:
        return {"logits": self.block(self.embedding(words) * mask[..., None]), "text": "nothing"}


def with_inputs(width: int = 8) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    return Words(width), torch.zeros(3, 7, dtype=torch.int64), torch.ones(3, 7)


def on_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten())


def not_a_module() -> tuple[int, int]:
    return 1, 2


def of_function(name: str, *words: str) -> Plan:
    found = read([f"test_plan.{name}", "optim=adamw", *words], speak=False)
    assert found is not None
    return simulate(found.config, found.question)


def test_any_module_that_a_function_returns_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    small = of_function("with_inputs", "world_size=4")
    large = of_function("with_inputs", "world_size=4", "model.width=16")
    whole = sum(param.numel() for param in Words(8).parameters())
    assert small.state["parameters"] == pytest.approx(4 * whole / 4, rel=0.1)
    assert small.state["optimizer"] == pytest.approx(2 * small.state["parameters"], rel=0.05)
    assert large.state["parameters"] > 2 * small.state["parameters"]
    assert small.sent["all_gather"] > 0
    images = of_function("on_images", "world_size=2", "data.image_size=16", "train.batch_size=6")
    assert images.timeline.most("activations") >= 3 * 5 * 14 * 14 * 4
    with pytest.raises(UserError, match=r"returned \(int, int\), expected a module, or a module and tensors"):
        of_function("not_a_module")
    plan(read(["test_plan.with_inputs", "world_size=64"], speak=False), ALONE, CPU)
    assert "64 ranks × 1 micro-batch × inputs of 3×7, 3×7\n" in capsys.readouterr().out
    told = r"^the model does not take images of shape 6×3×16×16: .*, unless the function returns the inputs"
    with pytest.raises(UserError, match=told):
        of_function("Words", "model.width=8", "world_size=2", "data.image_size=16", "train.batch_size=12")


def test_the_batch_is_a_whole_one() -> None:
    """96 images leave 1.5 for each of 64 ranks: planned with 2."""
    for argument, images in {"96": 2, "36": 2, "64": 1}.items():
        assert settings(f"train.batch_size={argument}", "world_size=64").question.micro_batch == images
    assert settings("micro_batch=5", "world_size=64").question.micro_batch == 5


MISTAKES = """
device=tpu | device=tpu; did you mean cpu? (valid: auto, cpu, cuda)
flops=3 | unknown key flops; shardtrain.plan prints the TFLOP and the MiB sent of a step
world_size=0 | world_size=0: expected at least 1
world_size=10000000000 | world_size=10000000000: expected at most 1000000
data=imagefolder data.root=/nowhere | or plan without the data set: model.num_classes=N
"""


def test_mistakes() -> None:
    fixed = [text for text in FAKE if not text.startswith("data")]
    for line in MISTAKES.strip().splitlines():
        words, _, told = line.partition(" | ")
        with pytest.raises(UserError, match=re.escape(told)):
            read([*fixed, *words.split()], speak=False)


def test_mistakes_that_show_later_and_a_plan_without_the_data_set() -> None:
    message = r"does not take images of shape 1×3×8×8: Expected more than 1 value per channel .*; micro_batch"
    with pytest.raises(UserError, match=message):
        planned("model=resnet18", "data.image_size=8", "micro_batch=1")
    found = read(["data=imagefolder", "data.root=/nowhere", "model.num_classes=7"], speak=False)
    assert (found.config.model["num_classes"], found.question.channels) == (7, 3)


def test_words_name_the_peak() -> None:
    points = [
        MemoryPoint("forward", "a", (8 * MIB, 16 * MIB, 0, 0, MIB, 0)),
        MemoryPoint("backward", "b.1", (8 * MIB, 16 * MIB, 4 * MIB, 0, 2 * MIB, 100)),
        MemoryPoint("update", "the root", (8 * MIB, 16 * MIB, 4 * MIB, 0, 0, 0)),
    ]
    assert MemoryTimeline(tuple(points)).words() == (
        "The peak of 30.0 MiB, in backward of b.1, consists of 16.0 MiB optimizer, 8.0 MiB parameters, "
        "4.0 MiB gradients and 2.0 MiB activations."
    )
    assert MemoryTimeline(tuple(points[2:])).words().startswith("The peak of 28.0 MiB, in update, consists")


@pytest.mark.long
def test_with_whole_parameters_the_rank_that_holds_most_is_planned() -> None:
    muon = settings(*VIT, "world_size=4", "optim=muon")
    by_rank = [simulate(muon.config, replace(muon.question, rank=rank)) for rank in range(4)]
    found = simulate(muon.config, muon.question)
    even = planned(*VIT, "world_size=4")
    assert (found.uneven, even.uneven) == (True, False)
    held = [plan.state["parameters"] for plan in by_rank]
    assert found.state["parameters"] == max(held) > even.state["parameters"]
    assert sum(held) == 4 * sum(unit.parameters for unit in found.units)
    assert re.match(rf"rank {found.question.rank}, which has most, holds +MiB\n", rank_table(found))
    assert headline(muon.config, found).count("\n") == 1


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_parameter_that_gets_no_gradient_can_be_planned() -> None:
    """Nobody can be asked whether another rank has one, and what is lacking here has no values to look at."""
    with FakeTensorMode():
        first_alone = Parts(lambda self, x: self.first(x), first=nn.Linear(9, 9), second=nn.Linear(9, 9))
        model = shardtrain.shard(first_alone, units=(), transport=Simulated(2, 3))
        model(torch.randn(2, 9)).sum().backward()
        got = {name for name, param in model.named_parameters() if param.grad is not None}
    assert got == {"first.weight", "first.bias"}  # an empty piece has an empty gradient


@pytest.mark.parametrize(("rank", "world"), [(0, 3), (2, 3)])
def test_a_rank_holds_its_shards_and_about_one_unit(rank: int, world: int, monkeypatch: Any) -> None:
    """Rank 0 also holds what has not been cut yet. Nothing is sent, which would be held a while longer."""
    monkeypatch.setattr(comm, "rank", lambda: rank)
    unit = 101 * 101 * 4
    whole = 12 if rank == 0 else 0

    def stack() -> nn.Module:
        return nn.Sequential(*(nn.Linear(101, 101, bias=False) for _ in range(12)))

    def start() -> None:
        model = shardtrain.deferred(stack)
        shardtrain.shard(model, units=[nn.Linear], transport=Simulated(rank, world))

    most = allocated(start) / unit
    assert whole <= most <= max(12 / world, whole) + 2.1
