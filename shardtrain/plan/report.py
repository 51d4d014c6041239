"""A plan in words and columns, as JSON, and as pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from shardtrain import introspect
from shardtrain.job.build import Job
from shardtrain.job.config import Config, layout_of
from shardtrain.job.format import MIB, aligned, counted
from shardtrain.job.pictures import Picture, plot
from shardtrain.plan.live import KINDS
from shardtrain.plan.memory import COLORS
from shardtrain.plan.simulate import Plan, Question, simulate

GIB = 2**30


class Rates(NamedTuple):
    """What hardware can do at best, for each rank."""

    bandwidth: float  # GB/s sent
    flops: float  # TFLOP/s


class Largest(NamedTuple):
    """The most images of a rank in one forward that fit ``memory`` GiB."""

    memory: float
    images: int


def headline(config: Config, plan: Plan) -> str:
    """What is planned for, in two lines; a third if that is not the configuration's batch."""
    question = plan.question
    parameters = sum(unit.parameters for unit in plan.units)
    side, images = config.data.image_size, question.micro_batch * plan.accumulate * question.world_size
    replicas = f" in {counted(question.replicate, 'replica')}" if question.replicate > 1 else ""
    link = "shared memory" if question.in_place else "messages"
    parallel = config.parallel
    link += f" ({parallel.traffic})" if parallel.traffic else ""
    reshard = "" if parallel.reshard_after_forward else ", kept whole after forward"
    recompute = ", activations computed again in backward" if parallel.activation_checkpoint else ""
    compiled = "; planned as if it were not compiled" if parallel.compile else ""
    layout = ", whole parameters" if layout_of(config) == "whole" else ""
    name = config.model.get("name", config.model["_target_"])
    asked = config.train.batch_size
    parts = question.world_size * plan.accumulate
    why = f", of which {parts:,} cannot have equal parts" if asked % parts else ""
    other = f"\ninstead of train.batch_size={asked:,}{why}" if images != asked else ""
    return (
        f"{name}, {parameters:,} parameters in {counted(len(plan.units), 'unit')}; {config.optim.name}, "
        f"{parallel.precision}, device={config.device}, {link}{reshard}{layout}{recompute}{compiled}\n"
        f"{counted(question.world_size, 'rank')}{replicas} × {counted(plan.accumulate, 'micro-batch')} × "
        f"{counted(question.micro_batch, 'image')} of {question.channels}×{side}×{side} = "
        f"{images:,} images a step{other}"
    )


def rank_table(plan: Plan) -> str:
    """What one rank holds, sends and computes in a step."""
    rank = f"rank {plan.question.rank}" if plan.uneven else "a rank"
    rows = [[f"{rank}, which has most, holds" if plan.uneven else "a rank holds", "MiB"]]
    rows += [[name, _mib(size)] for name, size in sizes(plan).items()]
    traffic = [
        f"{counted(plan.calls.get(kind, 0), noun)} sending {plan.sent.get(kind, 0) / MIB:,.2f} MiB"
        for kind, noun in _movements(plan)
    ]
    return "\n".join(
        [
            *aligned(rows),
            plan.timeline.words(),
            f"A step has {' and '.join(traffic)}, and {plan.flops / 1e12:,.3g} TFLOP, {rank}.",
        ]
    )


def _movements(plan: Plan) -> list[tuple[str, str]]:
    """Kinds that a plan tells of; all-reduces are a few bytes where there are no replicas."""
    across = [("all_reduce", "all-reduce")] if plan.question.replicate > 1 else []
    return [("all_gather", "gather"), ("reduce_scatter", "reduction"), *across]


def sizes(plan: Plan) -> dict[str, int]:
    """Bytes of a rank by what they hold: all the time, then at most at any time of the step."""
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
    compute, send = plan.seconds(rates.bandwidth, rates.flops)
    return (
        f"At {rates.flops:g} TFLOP/s and {rates.bandwidth:g} GB/s a step takes at least "
        f"{max(compute, send) * 1e3:.3g} ms with all communication hidden, {(compute + send) * 1e3:.3g} ms "
        f"with none ({compute * 1e3:.3g} to compute, {send * 1e3:.3g} to send)."
    )


def fit_in_words(plan: Plan, largest: Largest) -> str:
    if not largest.images:
        return f"Not even one image of a rank fits {largest.memory:g} GiB: more ranks, or a smaller model."
    images = largest.images * plan.accumulate * plan.question.world_size
    return (
        f"{largest.memory:g} GiB of tensors hold at most {counted(largest.images, 'image')} of a rank at a "
        f"time, so train.batch_size={images}."
    )


def curve_table(plans: Sequence[Plan], rates: Rates | None) -> str:
    """The same images of a rank at other world sizes, MiB."""
    head = ["ranks", "parameters", "optimizer", "gradients", "gathered", "activations", "peak"]
    rows = [[*head, "gathers send", "reductions send", *(["ms at least"] if rates else [])]]
    for plan in plans:
        most = [plan.timeline.most(kind) for kind in ("gathered", "activations")]
        held = (plan.parameters, plan.optimizer, plan.gradients, *most, plan.peak)
        sent = [plan.sent.get(kind, 0) for kind in ("all_gather", "reduce_scatter")]
        bound = [f"{max(plan.seconds(*rates)) * 1e3:.3g}"] if rates else []
        rows.append([f"{plan.question.world_size:,}", *(_mib(size) for size in (*held, *sent)), *bound])
    images = counted(plans[0].question.micro_batch, "image")
    title = f"MiB of a rank with {images} at a time, and MiB that it sends in a step"
    return "\n".join([title, *aligned(rows)])


def shards_table(plans: Sequence[Plan]) -> str:
    """How even the shards are at other world sizes, and how small the messages become."""
    rows = [["ranks", "even share", "a rank holds", "FSDP2", "smallest of a unit", "largest"]]
    for plan in plans:
        world, whole = plan.question.world_size, sum(unit.bytes for unit in plan.units)
        shards = [unit.local_bytes for unit in plan.units if unit.bytes]
        over = [f"×{held * world / whole:.3f}" for held in (sum(shards), plan.by_rows)]
        sizes = [f"{size / 1024:,.2f}" for size in (whole / world, min(shards), max(shards))]
        rows.append([f"{world:,}", sizes[0], *over, *sizes[1:]])
    title = (
        "KiB of parameters that are a rank's even share, what it holds of that, and the shards of its units"
    )
    return "\n".join([title, *aligned(rows)])


def as_json(plan: Plan, rates: Rates | None) -> dict[str, Any]:
    """Bytes, movements, operations and seconds."""
    peak = plan.timeline.peak
    found: dict[str, Any] = {
        "world_size": plan.question.world_size,
        "replicate": plan.question.replicate,
        "rank": plan.question.rank,
        "micro_batch": plan.question.micro_batch,
        "accumulate": plan.accumulate,
        "bytes": sizes(plan),
        "parameters_cut_by_rows": plan.by_rows,
        "peak": {"phase": peak.phase, "unit": peak.unit, "bytes": dict(zip(KINDS, peak.bytes, strict=True))},
        "sent_bytes": plan.sent,
        "movements": plan.calls,
        "flops": plan.flops,
        "units": [unit._asdict() for unit in plan.units],
    }
    if rates is not None:
        compute, send = plan.seconds(*rates)
        found["seconds"] = {"compute": compute, "send": send, "hidden": max(compute, send)}
    return found


def curve(title: str, plans: Sequence[Plan]) -> Picture | str:
    """The peak over world sizes, by what it consists of, and what a step sends; or why there is none."""
    return plot(lambda figure: _draw_curve(figure, title, plans), inches=(9, 4.5))


def _draw_curve(figure: Any, title: str, plans: Sequence[Plan]) -> None:
    memory, traffic = figure.subplots(1, 2, width_ratios=(3, 2))
    names = [f"{plan.question.world_size:,}" for plan in plans]
    base = [0.0] * len(plans)
    for index, (kind, color) in enumerate(zip(KINDS, COLORS, strict=True)):
        heights = [plan.timeline.peak.bytes[index] / MIB for plan in plans]
        memory.bar(names, heights, bottom=base, label=kind, color=color)
        base = [low + height for low, height in zip(base, heights, strict=True)]
    memory.set_title("at the peak, MiB a rank", fontsize=9, loc="left")
    memory.legend(fontsize=8)
    for kind, label in (("all_gather", "gathers"), ("reduce_scatter", "reductions")):
        traffic.plot(names, [plan.sent.get(kind, 0) / MIB for plan in plans], marker="o", label=label)
    traffic.set_title("sent in a step, MiB a rank", fontsize=9, loc="left")
    traffic.set_ylim(bottom=0)
    traffic.legend(fontsize=8)
    for axes in (memory, traffic):
        axes.set_xlabel("ranks")
        axes.tick_params(labelsize=8)
    figure.suptitle(title, fontsize=9)


def _mib(size: int) -> str:
    return f"{size / MIB:,.2f}"


# The plan of a training run that has been built.


def plan_of(config: Config, job: Job, rank: int | None = None) -> Plan:
    """The plan of a job that has been built: its ranks, transport and batch. ``rank``: see `Question`."""
    transport = introspect(job.model).transport
    in_place = transport.in_place and transport.world > 1
    on_cpu = job.device.type == "cpu"
    question = Question(
        world_size=transport.all_ranks.world,
        replicate=transport.all_ranks.world // transport.world,
        micro_batch=job.share.micro_batch,
        channels=job.channels,
        in_place=in_place,
        inbox=on_cpu and not in_place,
        rank=rank,
    )
    return simulate(config, question)


def foretold(config: Config, job: Job) -> str:
    """What `dry_run` adds to the start table."""
    return "\n" + rank_table(plan_of(config, job))
