"""Measure what a training step costs the host: the time of Python, by phase and by contender.

    python tests/bench/host.py

It is processor time of one thread beyond that of the model that is not sharded, for rank 2 of 8
of torch's fake process group, whose collectives move nothing. (DDP needs a real group: one rank of gloo.)
Models of 4 and 24 units with 1 and 8 parameters each tell microseconds per unit, per parameter and per
step. What a step costs the host beside a GPU says `steps.py`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchvision.models.vision_transformer import EncoderBlock, VisionTransformer

import shardtrain
from shardtrain import comm

PHASES = ("forward", "backward", "optimizer")
TITLES = {
    "plain": "not sharded",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "shardtrain": "shardtrain",
    "alone": "shardtrain, alone",
}
GRID = [(4, 1), (4, 8), (24, 1), (24, 8)]  # units, and parameters of each
SETTLED = 5  # steps before the first timed one


class Layers(nn.Module):
    """A product by each of ``count`` weights: a unit in which the model itself costs little."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.eye(8) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


@dataclass(frozen=True)
class Case:
    """A model, its unit, and its images [batch, ...]; of ``classes`` it computes a loss."""

    build: Callable[[], nn.Module]
    unit: type[nn.Module]
    images: tuple[int, ...]
    classes: int


def _vit(blocks: int, width: int, heads: int, size: int, patch: int, batch: int) -> Case:
    def build() -> nn.Module:
        model: nn.Module = VisionTransformer(size, patch, blocks, heads, width, 4 * width, num_classes=10)
        return model

    return Case(build, EncoderBlock, (batch, 3, size, size), 10)


def _stack(units: int, params: int) -> Case:
    return Case(lambda: nn.Sequential(*[Layers(params) for _ in range(units)]), Layers, (2, 8), 8)


CASES = {
    **{f"grid {units}x{params}": _stack(units, params) for units, params in GRID},
    "vit": _vit(12, 32, 2, 8, 4, 2),
    "vit48": _vit(48, 64, 2, 8, 4, 2),
    "small": _stack(48, 1),
}
KINDS = ("grid", "vit", "vit48", "small")


def read(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the settings of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--cases", nargs="+", choices=KINDS, default=KINDS, help="by default all")
    add("--contenders", nargs="+", choices=[*TITLES][1:], default=[*TITLES][1:], help="besides plain")
    add("--optimizer", choices=["fused", "foreach", "loop"], default="fused", help="AdamW's ways")
    add("--precision", choices=["fp32", "bf16"], default="fp32", help="norms stay fp32 in ours")
    add("--unit-bytes", type=int, default=0, help="`shard` joins neighbours up to it; 0: none")
    add("--rounds", type=int, default=60, help="timed; each steps every contender once")
    add("--out", type=Path, help="a JSON file")
    settings = parser.parse_args(arguments)
    settings.low = torch.bfloat16 if settings.precision == "bf16" else None  # the dtype to compute in
    return settings


class Contender:
    """One model, ready to step, and what its steps have taken. ``seconds``: of each phase, per step."""

    def __init__(self, name: str, case: Case, settings: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.model = _wrapped(name, case, case.build(), settings)
        self.autocasts = settings.low if name in ("plain", "ddp") else None
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=1e-4,
            fused=settings.optimizer == "fused",
            foreach=settings.optimizer == "foreach",
        )
        self.images = torch.randn(case.images)
        self.labels = torch.randint(case.classes, case.images[:1])
        self.seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}

    def step(self, timed: bool) -> None:
        clock = time.thread_time
        moments = [clock()]
        with torch.autocast("cpu", self.autocasts, enabled=self.autocasts is not None):
            loss = F.cross_entropy(self.model(self.images).float(), self.labels)
        moments.append(clock())
        loss.backward()
        moments.append(clock())
        self.optimizer.step()
        self.optimizer.zero_grad()
        moments.append(clock())
        if timed:
            for index, phase in enumerate(PHASES):
                self.seconds[phase].append(moments[index + 1] - moments[index])


def _wrapped(name: str, case: Case, model: nn.Module, settings: argparse.Namespace) -> nn.Module:
    if name == "ddp":
        group = dist.new_group([dist.get_rank()], backend="gloo")
        return DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    if name == "fsdp2":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = fsdp.MixedPrecisionPolicy(param_dtype=settings.low)
        for module in model.modules():
            if isinstance(module, case.unit):
                fsdp.fully_shard(module, mesh=mesh, mp_policy=policy)
        fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
        return model
    if name != "plain":
        world: Any = dist.group.WORLD
        transport = comm.Alone() if name == "alone" else comm.ProcessGroupTransport(world)
        options: dict[str, Any] = {"precision": shardtrain.Precision(settings.low), "transport": transport}
        if settings.unit_bytes:
            options["unit_bytes"] = settings.unit_bytes
        return shardtrain.shard(model, units=[case.unit], **options)
    return model


def measure(case: Case, settings: argparse.Namespace) -> dict[str, Contender]:
    """Step all contenders in turns."""
    contenders = {name: Contender(name, case, settings) for name in ("plain", *settings.contenders)}
    gc.collect()
    for number in range(SETTLED + settings.rounds):
        order = deque(contenders.values())
        order.rotate(-number)
        for contender in order:
            contender.step(number >= SETTLED)
    return contenders


def lower_quartile(values: Sequence[float]) -> float:
    """Return the lower quartile: others' work only lengthens a step."""
    return statistics.quantiles(values, n=4, method="inclusive")[0] if len(values) > 1 else values[0]


def beyond_plain(contenders: Mapping[str, Contender]) -> dict[str, dict[str, float]]:
    """Return the microseconds per phase of each contender beyond those of the model that is not sharded."""
    costs: dict[str, dict[str, float]] = {}
    plain = contenders["plain"]
    for name, contender in contenders.items():
        if contender is plain:
            continue
        costs[name] = {}
        for phase in PHASES:
            difference = lower_quartile(contender.seconds[phase]) - lower_quartile(plain.seconds[phase])
            costs[name][phase] = 1e6 * difference
        costs[name]["step"] = sum(costs[name].values())
    return costs


def slopes(costs: Sequence[float]) -> tuple[float, float, float]:
    """Return microseconds per unit, per parameter and per step, from the ``costs`` of the `GRID`."""
    points = torch.tensor([[units, units * params, 1.0] for units, params in GRID], dtype=torch.float64)
    solved = torch.linalg.lstsq(points, torch.tensor(costs, dtype=torch.float64)[:, None]).solution
    per_unit, per_param, fixed = solved.flatten().tolist()
    return per_unit, per_param, fixed


@dataclass
class Report:
    """The lines to print, and what a file of results has."""

    lines: list[str] = field(default_factory=list)
    results: dict[str, Any] = field(default_factory=dict)


def report_costs(settings: argparse.Namespace, report: Report) -> None:
    """Measure processor time beyond that of the model that is not sharded."""
    names = [case for case in CASES if case.split()[0] in settings.cases]
    costs = {}
    for name in names:
        costs[name] = beyond_plain(measure(CASES[name], settings))
    report.results = costs
    if "grid" in settings.cases:
        report.lines.append(f"{'µs':<20}{'phase':<12}{'per unit':>10}{'per param':>11}{'per step':>10}")
        for contender in settings.contenders:
            for phase in (*PHASES, "step"):
                grid = [costs[f"grid {units}x{params}"][contender][phase] for units, params in GRID]
                unit, param, fixed = slopes(grid)
                line = f"{TITLES[contender]:<20}{phase:<12}{unit:>10.0f}{param:>11.1f}{fixed:>10.0f}"
                report.lines.append(line)
    for name in names:
        if not name.startswith("grid"):
            report.lines.append(f"{name}, µs per step beyond the model that is not sharded")
            for contender, phases in costs[name].items():
                words = [f"{phase} {cost:,.0f}" for phase, cost in phases.items()]
                report.lines.append(f"  {TITLES[contender]:<20}{'   '.join(words)}")


def main(arguments: Sequence[str] | None = None) -> Report:
    settings = read(arguments)
    report = Report()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=8)
    report_costs(settings, report)
    dist.destroy_process_group()
    if settings.out:
        settings.out.write_text(json.dumps(report.results, indent=1))
    return report


if __name__ == "__main__":
    print("\n".join(main().lines))
