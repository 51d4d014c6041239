"""The tables at the start and at the end of a run, and the plan beside what was measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardtrain import introspect
from shardtrain.device import is_accelerator
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.config import Config, Optim, Reference
from shardtrain.job.evaluate import Evaluation
from shardtrain.job.format import MIB, aligned, counted
from shardtrain.job.launch import Context
from shardtrain.plan.simulate import Plan, plan_of

MOST_UNITS = 24  # lines; of a deeper model the rest is summed up


def start_table(config: Config, context: Context, job: Job) -> str:
    """Describe what will be trained, on what, and what this rank will hold."""
    place, share, optim = context.rank_info, job.share, config.optim
    units, held = introspect(job.model).units, introspect(job.model).bytes_by_rank
    own, most = max(held) / MIB, "at most " if min(held) < max(held) else ""
    kept = max(_optimizer_bytes_by_rank(optim, job)) / MIB
    micro_batches = counted(share.accumulate, "micro-batch")
    ranks = counted(place.world_size, "rank")
    replicas = f" in {config.parallel.replicate} replicas" if config.parallel.replicate > 1 else ""
    threads = f", {counted(torch.get_num_threads(), 'thread')} each" if context.device.type == "cpu" else ""
    switch = "dry_run" if config.dry_run else "eval_only" if config.eval_only else ""
    side = config.data.image_size
    rows = [
        ("model", f"{_model_name(config.model)}, {sum(unit.parameters for unit in units):,} parameters"),
        ("cost", f"{job.forward_flops[side] / 1e9:.3g} GFLOP per image, forward"),
        ("units", f"{len(units)}, {sum(unit.bytes for unit in units) / MIB:.1f} MiB in all"),
        ("per rank", f"{most}{own:.1f} MiB parameters, {own:.1f} gradients, {kept:.1f} optimizer"),
        ("data", f"{job.data_name}, {side}×{side} pixels"),
        ("batch", f"{share.batch_size} = {ranks} × {micro_batches} × {share.micro_batch}"),
        ("length", f"{job.steps} steps, {job.steps_per_epoch} per epoch"),
        (
            "update",
            f"{optim.name}, lr {optim.lr:g}, {config.sched.name}, weight decay {optim.weight_decay:g}",
        ),
        ("world", f"{ranks}{replicas}, {context.device.type}{threads}, torch {torch.__version__}"),
        ("run", f"none: {switch}" if switch else str(context.run_dir)),
    ]
    shown = [(unit.name, unit.parameters, unit.most_bytes) for unit in units[:MOST_UNITS]]
    if rest := units[MOST_UNITS:]:
        sums = sum(unit.parameters for unit in rest), sum(unit.most_bytes for unit in rest)
        shown.append((f"{len(rest)} more", *sums))
    table = [("unit", "parameters", "MiB per rank")]
    table += [(name, f"{count:,}", f"{size / MIB:.2f}") for name, count, size in shown]
    return "\n".join([_labelled(rows), *(f"  {line}" for line in aligned(table))])


def _optimizer_bytes_by_rank(optim: Optim, job: Job) -> list[int]:
    """Return the bytes of moments that the optimizer of each rank of a shard group will have."""
    inside, kept = introspect(job.model), [0] * introspect(job.model).transport.world
    elements = inside.elements_by_rank
    for group in job.optimizer.param_groups:
        moments = optim.moments(group.get("use_muon", False))
        for param in group["params"]:
            for rank, count in enumerate(elements[param]):
                kept[rank] += count * param.element_size() * moments
    return kept


def _model_name(model: Mapping[str, Any]) -> str:
    shown = {k: v for k, v in model.items() if k not in ("_target_", "name") and v is not None}
    keys = [f"{key} {value}" for key, value in shown.items()]
    return ", ".join([str(model.get("name", model["_target_"])), *keys])


def end_table(result: Mapping[str, Any]) -> str:
    """Describe how a run ended, from what result.json holds."""
    rows = [(result["status"], f"step {result['step']}, {result['seconds']:.1f} s")]
    if tags.TRAIN_LOSS in result:
        loss, acc1, speed = (result[tag] for tag in (tags.TRAIN_LOSS, tags.TRAIN_ACC1, tags.IMG_PER_S))
        rows.append(("train", f"loss {loss:.4f}, acc1 {acc1:.2f} %, {speed:.0f} img/s at the end"))
    if tags.VAL_LOSS in result:
        rows += _score_rows(result, f", best acc1 {result[tags.BEST_ACC1]:.2f} %")
    if "verdict" in result:
        rows.append(("speed", f"{result['run_img_per_s']:.0f} img/s over all"))
        rows += [("time", result["time"]), ("verdict", result["verdict"])]
    return _labelled([*rows, ("run", result["run_dir"])])


def score_table(evaluation: Evaluation, reference: Reference | None) -> str:
    """Describe an evaluation without a run."""
    facts = {"reference": None if reference is None else dataclasses.asdict(reference)}
    return _labelled(_score_rows(evaluation.scalars() | facts, ""))


def _score_rows(result: Mapping[str, Any], more: str) -> list[tuple[str, str]]:
    """Describe the latest evaluation in ``result``, and how it compares with what has been published."""
    rows = []
    for name, (loss, acc1, acc5) in (("val", tags.VAL), ("average", tags.VAL_EMA)):
        if loss in result:
            scores = f"loss {result[loss]:.4f}, acc1 {result[acc1]:.2f} %, acc5 {result[acc5]:.2f} %"
            rows.append((name, scores + (more if name == "val" else "")))
    if result.get("reference"):
        yours, theirs = result.get(tags.VAL_EMA_ACC1, result[tags.VAL_ACC1]), result["reference"]
        source = f"{theirs['source']}: {theirs['conditions']}"
        rows.append(("acc1", f"yours {yours:.2f} %, reference {theirs['accuracy']:.2f} % ({source})"))
    return rows


def _labelled(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


# The plan of a run beside what the run measured.

STATE = {"parameters": tags.PARAMS_MIB, "gradients": tags.GRADS_MIB, "optimizer": tags.OPTIMIZER_MIB}
TRAFFIC = {
    "gathers send": "all_gather",
    "reductions send": "reduce_scatter",
    "averages send": "all_reduce",  # between replicas
}


class Row(NamedTuple):
    """One line of the comparison, in bytes. ``exact``: the plan promises every byte."""

    name: str
    planned: int
    measured: float
    exact: bool = True

    @property
    def verdict(self) -> str:
        if self.measured == self.planned:
            return "exact"
        difference = f"{100 * (self.measured - self.planned) / max(self.planned, 1):+.1f} %"
        return f"{difference}, which should be exact" if self.exact else difference


def compare(plan: Plan, scalars: Mapping[str, float], *, on_accelerator: bool, scaled: bool) -> list[Row]:
    """Compare plan and measurement of rank 0. An accelerator's allocator knows the peak; the CPU has none.

    ``scaled``: the loss was, so ranks exchanged overflow flags: a few more bytes in each all-reduce.
    """
    rows = [Row(name, getattr(plan, name), scalars[tag] * MIB) for name, tag in STATE.items()]
    rows.append(Row("gathered at once", plan.gathered, scalars[tags.GATHERED_PEAK_MIB] * MIB))
    for name, kind in TRAFFIC.items():
        if kind != "all_reduce" or plan.question.replicate > 1:
            exact = not (scaled and kind == "all_reduce")
            rows.append(Row(name, plan.sent.get(kind, 0), scalars[tags.sent_mib(kind)] * MIB, exact))
    if on_accelerator:
        rows.append(Row("peak", plan.peak, scalars[tags.PEAK_MIB] * MIB, exact=False))
    return rows


def compare_with_plan(config: Config, job: Job, scalars: Mapping[str, Any]) -> str:
    """Describe how far plan and measurement are apart, or why there is no plan. It takes a second or two."""
    on_accelerator, scaled = is_accelerator(job.device), job.scaler.is_enabled()
    try:
        plan = plan_of(config, job, rank=0)
    except Exception as error:  # the model needs values, say; the run has done well all the same
        return f"no plan to compare with: {type(error).__name__}: {error}".split("\n", 1)[0]
    cells = [["MiB, rank 0", "planned", "measured", ""]]
    for row in compare(plan, scalars, on_accelerator=on_accelerator, scaled=scaled):
        cells.append([row.name, f"{row.planned / MIB:,.2f}", f"{row.measured / MIB:,.2f}", row.verdict])
    return "\n".join(aligned(cells))
