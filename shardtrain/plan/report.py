"""Describe a plan in words, in tables and as JSON."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardtrain.job.config import Config
from shardtrain.job.dist_env import on_rank_0
from shardtrain.job.errors import path_of, writing
from shardtrain.job.format import MIB, aligned, counted
from shardtrain.plan.memory import MEMORY_KINDS
from shardtrain.plan.simulate import Plan

Rates = tuple[float, float]  # peaks of the hardware per rank: GB/s sent, and TFLOP/s


class Output:
    """Write a program's results to the directory ``out``; or one named after ``title`` and the time.

    Collective: a UserError is raised on all ranks, at the start rather than after the measurement.
    """

    def __init__(self, program: str, out: str | None, title: str) -> None:
        started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        self.folder = path_of("out", out or f"outputs/{program}/{title}-{started}")
        self._json, self._text = (self.folder / f"{program}.{suffix}" for suffix in ("json", "txt"))
        on_rank_0(self._prepare)

    def _prepare(self) -> None:
        with writing("out", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._json.touch()

    def write(self, text: str, facts: dict[str, Any]) -> None:
        """Print ``text``, and write it beside ``facts`` (JSON values and dataclasses). Called on rank 0."""
        self._json.write_text(json.dumps(facts, indent=2, default=asdict) + "\n")
        self._text.write_text(text + "\n")
        print(f"\n{text}\n\nwritten to {self.folder}", flush=True)


def headline(config: Config, plan: Plan) -> str:
    """Return what is planned for, in two lines, and in a third if the batch is not the configuration's."""
    question, parallel = plan.question, config.parallel
    side, asked = config.data.image_size, config.train.batch_size
    parts = question.world_size * plan.accumulate
    images = question.micro_batch * parts
    options = {
        f" (gradients in {parallel.reduce})": parallel.reduce,
        ", kept whole after forward": not parallel.reshard_after_forward,
        ", whole parameters": config.optim.layout == "whole",
        ", activations computed again in backward": parallel.activation_checkpoint,
        "; planned as if it were not compiled": parallel.compile,
    }
    link = "shared memory" if question.in_place else "messages"
    link += "".join(text for text, chosen in options.items() if chosen)
    parameters = sum(unit.parameters for unit in plan.units)
    replicas = f" in {counted(question.replicate, 'replica')}" if question.replicate > 1 else ""
    why = f", of which {parts:,} cannot have equal parts" if asked % parts else ""
    other = f"\ninstead of train.batch_size={asked:,}{why}" if images != asked else ""
    return (
        f"{config.model_name}, {parameters:,} parameters in {counted(len(plan.units), 'unit')}; "
        f"{config.optim.name}, {parallel.precision}, device={config.device}, {link}\n"
        f"{counted(question.world_size, 'rank')}{replicas} × {counted(plan.accumulate, 'micro-batch')} × "
        f"{counted(question.micro_batch, 'image')} of {question.channels}×{side}×{side} = "
        f"{images:,} images per step{other}"
    )


def rank_table(plan: Plan) -> str:
    """Return a table of what one rank holds, sends and computes per step."""
    rank = f"rank {plan.question.rank}" if plan.uneven else "a rank"
    rows = [[f"{rank}, which has most, holds" if plan.uneven else "a rank holds", "MiB"]]
    rows += [[name, _mib(size)] for name, size in bytes_by_kind(plan).items()]
    collectives = {"all_gather": "gather", "reduce_scatter": "reduction"}
    if plan.question.replicate > 1:  # without replicas all-reduces are a few bytes
        collectives["all_reduce"] = "all-reduce"
    traffic = " and ".join(
        f"{counted(plan.calls.get(kind, 0), noun)} sending {_mib(plan.sent.get(kind, 0))} MiB"
        for kind, noun in collectives.items()
    )
    sentence = f"A step has {traffic}, and {plan.flops / 1e12:,.3g} TFLOP, {rank}."
    return "\n".join([*aligned(rows), plan.timeline.words(), sentence])


def bytes_by_kind(plan: Plan) -> dict[str, int]:
    """Return bytes per rank by kind: what a rank always holds, then the peaks of a step."""
    most = plan.timeline.most
    return {
        "parameters": plan.parameters,
        "optimizer": plan.optimizer,
        "buffers": plan.buffers,
        "moving average": plan.averages,
        "gradients": plan.gradients,
        "gradients on their way, at most": most("gradients"),
        "gathered, at most": most("gathered"),
        "activations, at most": most("activations"),
        "all at once, at most": plan.peak,
    }


def bound_in_words(plan: Plan, rates: Rates) -> str:
    """Return a sentence with the lower bound of a step's time."""
    (bandwidth, flops), (compute, send) = rates, plan.seconds(*rates)
    return (
        f"At {flops:g} TFLOP/s and {bandwidth:g} GB/s a step takes at least "
        f"{max(compute, send) * 1e3:.3g} ms with all communication hidden, {(compute + send) * 1e3:.3g} ms "
        f"with none ({compute * 1e3:.3g} to compute, {send * 1e3:.3g} to send)."
    )


def fit_in_words(plan: Plan, memory: float, images: int) -> str:
    """Return a sentence that at most ``images`` per rank in one forward fit in ``memory`` GiB."""
    if not images:
        return f"Not even one image of a rank fits {memory:g} GiB: more ranks, or a smaller model."
    return (
        f"{memory:g} GiB of tensors hold at most {counted(images, 'image')} per rank at a time, so "
        f"train.batch_size={images * plan.accumulate * plan.question.world_size}."
    )


def curve_table(plans: Sequence[Plan], rates: Rates | None) -> str:
    """Return a table over world sizes, in MiB, with equally many images per rank."""
    head = ["ranks", "parameters", "optimizer", "gradients", "gathered", "activations", "peak"]
    rows = [[*head, "gathers send", "reductions send", *(["ms at least"] if rates else [])]]
    for plan in plans:
        most = [plan.timeline.most(kind) for kind in ("gathered", "activations")]
        held = (plan.parameters, plan.optimizer, plan.gradients, *most, plan.peak)
        sent = [plan.sent.get(kind, 0) for kind in ("all_gather", "reduce_scatter")]
        bound = [f"{max(plan.seconds(*rates)) * 1e3:.3g}"] if rates else []
        rows.append([f"{plan.question.world_size:,}", *(_mib(size) for size in (*held, *sent)), *bound])
    images = counted(plans[0].question.micro_batch, "image")
    title = f"MiB per rank with {images} at a time, and MiB that it sends per step"
    return "\n".join([title, *aligned(rows)])


def shards_table(plans: Sequence[Plan]) -> str:
    """Return a table over world sizes of how even the shards are, and how small the messages."""
    rows = [["ranks", "even share", "a rank holds", "FSDP2", "smallest of a unit", "largest"]]
    for plan in plans:
        world, whole = plan.question.world_size, sum(unit.bytes for unit in plan.units)
        shards = [unit.local_bytes for unit in plan.units if unit.bytes]
        over = [f"×{held * world / whole:.3f}" for held in (sum(shards), plan.by_rows)]
        share, *ends = (f"{size / 1024:,.2f}" for size in (whole / world, min(shards), max(shards)))
        rows.append([f"{world:,}", share, *over, *ends])
    title = "KiB of parameters: a rank's even share, what it holds of that, and the shards of its units"
    return "\n".join([title, *aligned(rows)])


def as_json(plan: Plan, rates: Rates | None) -> dict[str, Any]:
    """Return the plan's bytes, collectives, operations and seconds."""
    peak = plan.timeline.peak
    return {
        **asdict(plan.question),
        "accumulate": plan.accumulate,
        "bytes": bytes_by_kind(plan),
        "parameters_cut_by_rows": plan.by_rows,
        "peak": peak._asdict() | {"bytes": dict(zip(MEMORY_KINDS, peak.bytes, strict=True))},
        "sent_bytes": plan.sent,
        "movements": plan.calls,
        "flops": plan.flops,
        "units": [unit._asdict() for unit in plan.units],
        "seconds": rates and dict(zip(("compute", "send"), plan.seconds(*rates), strict=True)),
    }


def _mib(size: int) -> str:
    return f"{size / MIB:,.2f}"
