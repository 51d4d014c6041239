"""Train one recipe several ways, over the same batches, and draw what differs: nothing should.

    torchrun --nproc-per-node 2 -m shardtrain.recipes.bench.compare +recipe=resnet20_cifar10_1ep
    torchrun --nproc-per-node 2 -m shardtrain.recipes.bench.compare --ways ddp,shardtrain +recipe=resnet

Every way starts from the same weights: one process without any wrapper, DDP, FSDP2, and shardtrain over each
transport. One process takes the ranks' parts of a batch as micro-batches, because BatchNorm's statistics are
those of a rank's part. `outputs/compare/` gets the losses of every step and the accuracies as `curves.json`,
and the picture `curves.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from shardtrain import comm
from shardtrain.job import data, launch
from shardtrain.job.build import completed, feeds, loss_of, lr_factor
from shardtrain.job.config import Config
from shardtrain.job.dist_env import AFTERWARDS
from shardtrain.job.errors import not_valid
from shardtrain.job.launch import Context
from shardtrain.job.model import converted, initial_model, parameter_groups
from shardtrain.job.pictures import plot
from shardtrain.job.step import accumulate

from . import contenders

WAYS = {
    "one_process": ("one process", "no_communication"),
    "ddp": ("DDP", "ddp"),
    "fsdp2": ("FSDP2", "fsdp2"),
    "shardtrain": ("shardtrain, shared memory", "shardtrain"),
    "shardtrain_process_group": ("shardtrain, messages", "shardtrain_process_group"),
}
REFERENCE = "ddp"  # which the differences are to


def train(way: str, config: Config, context: Context, images: data.DataSet, every: int) -> dict[str, Any]:
    """Train one way; return the mean loss of every step and the accuracy after ``every`` steps."""
    device, world = context.device, comm.world_size()
    size, parts = config.train.batch_size, config.train.accumulate
    alone = way == "one_process"
    share = data.Share(size, parts * world, 0, 1) if alone else data.Share(size, parts, comm.rank(), world)
    model = converted(initial_model(config), config, device).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of the peers' options
        contender = contenders.build(WAYS[way][1], model, config.parallel.precision, device)
    model = contender.model
    optimizer = config.optim.make(parameter_groups(model, config.optim, config.allow), config.allow)
    for group in optimizer.param_groups:
        group["fused"] = False  # DTensor, which FSDP2's parameters are, has no fused SGD
    per_epoch = len(images.train) // size
    steps = min(per_epoch * config.train.epochs, config.train.max_steps or sys.maxsize)
    schedule = LambdaLR(optimizer, lr_factor(config.sched, steps, per_epoch))
    loss = loss_of(config.train.loss, config.train.label_smoothing, config.allow)
    feed, val, test = feeds(config, images, share, device, range(steps))
    batches, started = iter(feed), time.perf_counter()
    found: dict[str, dict[int, float]] = {"loss": {}, "accuracy": {}}
    losses: list[Tensor] = []
    forward = Turns(model, share.accumulate) if alone else model
    for step in range(1, steps + 1):
        losses.clear()
        accumulate(
            forward,
            loss,
            batches,
            share.accumulate,
            contender.no_sync,
            observe=lambda images, value, logits, labels: losses.append(value.detach().double()),
        )
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).mean()
        found["loss"][step] = float(mean if alone else comm.all_reduce(mean) / world)
        if step % every == 0 or step == steps:
            average_buffers(forward)
            found["accuracy"][step] = accuracy(model, test or val)
            if comm.rank() == 0:
                rate = f"{step / (time.perf_counter() - started):.1f} steps/s"
                scores = f"loss {found['loss'][step]:.6f}, test accuracy {found['accuracy'][step]:.2f} %"
                print(f"{WAYS[way][0]:<25}  step {step}/{steps}  {scores}  {rate}", flush=True)
        if step == 1:
            comm.set_time_out(AFTERWARDS)
    return {**found, "seconds": time.perf_counter() - started}


class Turns:
    """A model that sees ``count`` ranks' images in turns, with running statistics of its own for each."""

    def __init__(self, model: nn.Module, count: int) -> None:
        self.model, self.next = model, 0
        self.statistics = [[buffer.clone() for buffer in floating_buffers(model)] for _ in range(count)]

    def __call__(self, images: Tensor) -> Tensor:
        own = self.statistics[self.next]
        self.next = (self.next + 1) % len(self.statistics)
        torch._foreach_copy_(floating_buffers(self.model), own)
        logits: Tensor = self.model(images)
        torch._foreach_copy_(own, floating_buffers(self.model))
        return logits


def floating_buffers(model: nn.Module) -> list[Tensor]:
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def average_buffers(model: nn.Module | Turns) -> None:
    """Replace running statistics by the mean of all ranks'."""
    if isinstance(model, Turns):
        means = [sum(each) / len(each) for each in zip(*model.statistics, strict=True)]
        for copies in (*model.statistics, floating_buffers(model.model)):
            torch._foreach_copy_(copies, means)
        return
    for buffer in floating_buffers(model):
        buffer.copy_(comm.all_reduce(buffer.clone()) / comm.world_size())


@torch.no_grad()
def accuracy(model: nn.Module, feed: data.EvalFeed) -> float:
    """Return the percentage of held-out images that are right."""
    model.eval()
    counts = torch.zeros(2)
    for images, labels, valid in feed:
        found = (model(images).argmax(1) == labels)[:valid].cpu()
        counts += torch.tensor([found.sum(), len(found)])
    model.train()
    right, seen = comm.all_reduce(counts).tolist()  # one process has seen all of them on each rank
    return float(100 * right / seen)


def draw(figure: Any, curves: Mapping[str, Mapping[str, Any]], title: str) -> None:
    """Draw losses and accuracies above, and their differences to `REFERENCE`'s below."""
    rows: Any = figure.subplots(2, 2, sharex=True, height_ratios=(2, 1))
    base = curves.get(REFERENCE) or next(iter(curves.values()))
    widths = dict(zip(WAYS, (7.0, 5.2, 3.6, 2.2, 0.9), strict=True))
    for column, (kind, label) in enumerate((("loss", "training loss"), ("accuracy", "test accuracy, %"))):
        upper, lower = rows[:, column]
        smallest, largest = (1e-9, 1.0) if kind == "loss" else (1e-3, 100.0)
        for way, curve in curves.items():
            steps, values = zip(*curve[kind].items(), strict=True)
            style = {"label": WAYS[way][0], "linewidth": widths[way], "color": f"C{[*WAYS].index(way)}"}
            upper.plot(steps, values, ".-" if kind == "accuracy" else "-", **style)
            gaps = [max(smallest, abs(value - base[kind][step])) for step, value in curve[kind].items()]
            if curve is not base:
                lower.plot(steps, gaps, ".-" if kind == "accuracy" else "-", **style)
        upper.set_title(label, fontsize=10)
        lower.set_yscale("log")
        lower.set_ylim(smallest / 3, largest)
        ticks = [smallest, *(largest / 10**power for power in (6, 4, 2, 0) if largest / 10**power > smallest)]
        lower.set_yticks(ticks, ["equal", *(f"{tick:g}" for tick in ticks[1:])])
        lower.set_xlabel("step")
    rows[1, 0].set_ylabel(f"difference to {WAYS[REFERENCE][0]}")
    rows[0, 0].legend(fontsize=8)
    figure.suptitle(title, fontsize=11)


def summary(curves: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a line per way: how it ended, and how far it was from the reference."""
    base = curves.get(REFERENCE) or next(iter(curves.values()))
    for way, curve in curves.items():
        gaps = [abs(value - base["loss"][step]) for step, value in curve["loss"].items()]
        equal = sum(gap == 0 for gap in gaps)
        last, seconds = [*curve["accuracy"].values()][-1], curve["seconds"]
        losses = f"losses equal in {equal} of {len(gaps)} steps, largest difference {max(gaps):.1e}"
        yield f"{WAYS[way][0]:<25}  test accuracy {last:.2f} %, {losses}, {seconds:.0f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    parser.add_argument("--every", type=int, default=50, help="steps from one evaluation to the next")
    parser.add_argument("--out", type=Path, default=Path("outputs/compare"))
    asked, overrides = parser.parse_known_args()
    ways = asked.ways.split(",")
    sys.argv[1:] = overrides

    def compare(config: Config, context: Context) -> None:
        for way in ways:
            if way not in WAYS:
                raise not_valid(f"--ways={way}", way, WAYS)
        images = data.load(config.data)
        config = completed(config, images)
        curves = {way: train(way, config, context, images, asked.every) for way in ways}
        if comm.rank() == 0:
            asked.out.mkdir(parents=True, exist_ok=True)
            facts = {"command": " ".join(sys.argv), "config": dataclasses.asdict(config), "ways": curves}
            (asked.out / "curves.json").write_text(json.dumps(facts, indent=1))
            world = f"{comm.world_size()} rank{'s' if comm.world_size() > 1 else ''}"
            name = Path(images.name.split()[-1]).stem
            title = f"{config.model_name.rpartition('.')[2]} on {name}, {world}, the same batches"
            picture = plot(partial(draw, curves=curves, title=title), (10, 6))
            if not isinstance(picture, str):  # else it says why there is none
                Image.fromarray(picture).save(asked.out / "curves.png")
                picture = f"curves     {asked.out}/curves.png"
            print("\n".join([*summary(curves), picture]))

    launch.run(compare)


if __name__ == "__main__":
    main()
