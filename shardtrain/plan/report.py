"""A plan in words and as a table."""

from __future__ import annotations

from shardtrain.config.config import Config
from shardtrain.config.format import MIB, aligned, counted
from shardtrain.plan.simulate import Plan


def headline(config: Config, plan: Plan) -> str:
    """Return what is planned for, in two lines, and in a third if the batch is not the configuration's."""
    question = plan.question
    side = config.data.image_size
    batch_size = config.train.batch_size
    parts = question.world_size * plan.accumulate
    images = question.micro_batch * parts
    link = "shared memory" if question.in_place else "messages"
    parameters = sum(unit.parameters for unit in plan.units)
    units = counted(len(plan.units), "unit")
    joined = max(len(unit.modules) for unit in plan.units)
    if joined > 1:
        units += f" of up to {joined} blocks"
    replicas = f" in {counted(question.replicate, 'replica')}" if question.replicate > 1 else ""
    why = f", of which {parts:,} cannot have equal parts" if batch_size % parts else ""
    other = f"\ninstead of train.batch_size={batch_size:,}{why}" if images != batch_size else ""
    batch = f"{counted(question.micro_batch, 'image')} of {question.channels}×{side}×{side}"
    batch += f" = {images:,} images per step{other}"
    if plan.inputs:
        batch = f"inputs of {', '.join('×'.join(map(str, shape)) for shape in plan.inputs)}"
    return (
        f"{config.model_name}, {parameters:,} parameters in {units}; "
        f"{config.optim.name}, {config.parallel.precision}, device={config.device}, {link}\n"
        f"{counted(question.world_size, 'rank')}{replicas} × {counted(plan.accumulate, 'micro-batch')} × "
        f"{batch}"
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
        **plan.state,
        "gradients on their way, at most": most("gradients"),
        "gathered, at most": most("gathered"),
        "activations, at most": most("activations"),
        "all at once, at most": plan.peak,
    }


def _mib(size: int) -> str:
    return f"{size / MIB:,.2f}"
