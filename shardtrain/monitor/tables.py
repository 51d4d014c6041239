"""Texts at the start and at the end of a run: tables, plan beside measurement, where the time went."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from shardtrain import introspect
from shardtrain.device import ACCELERATOR, is_accelerator
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.config import Config, Reference
from shardtrain.job.dist_env import cores
from shardtrain.job.evaluate import Evaluation
from shardtrain.job.format import MIB, aligned, counted
from shardtrain.job.launch import Context
from shardtrain.monitor.metrics import Spent
from shardtrain.plan.simulate import Plan, plan_of

MOST_UNITS = 24  # lines; of a deeper model the rest is summed up


def start_table(config: Config, context: Context, job: Job) -> str:
    """Describe what will be trained, on what, and what this rank will hold."""
    share, optim, side = job.share, config.optim, config.data.image_size
    units, held = introspect(job.model).units, introspect(job.model).bytes_by_rank
    own, most = max(held) / MIB, "at most " if min(held) < max(held) else ""
    micro_batches = counted(share.accumulate, "micro-batch")
    ranks = counted(share.world_size, "rank")
    replicas = f" in {config.parallel.replicate} replicas" if config.parallel.replicate > 1 else ""
    threads = f", {counted(torch.get_num_threads(), 'thread')} each" if context.device.type == "cpu" else ""
    switch = "dry_run" if config.dry_run else "eval_only" if config.eval_only else ""
    rows = [
        ("model", f"{_model_name(config.model)}, {sum(unit.parameters for unit in units):,} parameters"),
        ("cost", f"{job.forward_flops[side] / 1e9:.3g} GFLOP per image, forward"),
        ("units", f"{len(units)}, {sum(unit.bytes for unit in units) / MIB:.1f} MiB in all"),
        ("per rank", f"{most}{own:.1f} MiB parameters, {own:.1f} gradients"),
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


def _model_name(model: Mapping[str, Any]) -> str:
    keys = [f"{k} {v}" for k, v in model.items() if k not in ("_target_", "name") and v is not None]
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


# The plan of a run beside what the run measured, in bytes of rank 0.

STATE = {"parameters": tags.PARAMS_MIB, "gradients": tags.GRADS_MIB, "optimizer": tags.OPTIMIZER_MIB}
TRAFFIC = {"gathers send": "all_gather", "reductions send": "reduce_scatter", "averages send": "all_reduce"}


def compare(plan: Plan, scalars: Mapping[str, float], on_accelerator: bool) -> list[list[str]]:
    """Return a row of texts for each figure: its name, planned and measured MiB, and how far they are apart.

    Of the CPU's memory nothing knows the peak.
    """
    peak = {"peak": tags.PEAK_MIB} if on_accelerator else {}
    held = STATE | {"gathered": tags.GATHERED_PEAK_MIB} | peak
    figures = [(name, getattr(plan, name), scalars[tag]) for name, tag in held.items()]
    for name, kind in TRAFFIC.items():
        if kind != "all_reduce" or plan.question.replicate > 1:
            figures.append((name, plan.sent.get(kind, 0), scalars[tags.sent_mib(kind)]))
    rows = []
    for name, planned, measured in figures:
        difference = f"{100 * (measured * MIB - planned) / max(planned, 1):+.1f} %"
        apart = "exact" if measured * MIB == planned else difference
        rows.append([name, f"{planned / MIB:,.2f}", f"{measured:,.2f}", apart])
    return rows


def compare_with_plan(config: Config, job: Job, scalars: Mapping[str, Any]) -> str:
    """Describe how far plan and measurement are apart, or why there is no plan. It takes a second or two."""
    try:
        plan = plan_of(config, job, rank=0)
    except Exception as error:  # the model needs values, say; the run has done well all the same
        return f"no plan to compare with: {type(error).__name__}: {error}".split("\n", 1)[0]
    rows = compare(plan, scalars, is_accelerator(job.device))
    return "\n".join(aligned([["MiB, rank 0", "planned", "measured", ""], *rows]))


# Where a run's time went, in words, and the one change most likely to help.
#
# The advice is for what takes most more of the time than its percentage in `USUAL`: with 68 % for data, it is
# "68 % of the time is waiting for images: raise data.workers (now 2)". If nothing does, the run computes, and
# the advice is about computing faster.

FEW_STEPS = 20  # of fewer, the first is most of what there is to see
OFTEN = 0.5  # of the reports, that name one rank slow
USUAL = {"data": 10, "waiting": 15, "checkpoint": 5, "evaluation": 20, "optimizer": 15, "the rest": 15}
ORDER = ("data", "forward", "backward", "optimizer", "waiting", "evaluation", "checkpoint", "pictures")


TAKES = {
    "data": "waiting for images",
    "waiting": "waiting for other ranks and their shards",
    "checkpoint": "saving checkpoints",
    "the rest": "neither steps nor evaluation",
}


def judge(spent: Spent, config: Config, ranks: int, device: str) -> dict[str, Any]:
    """Return entries of result.json: seconds by what they went to, and the verdict."""
    seconds = time.perf_counter() - spent.since
    parts = {what: spent.seconds[what] for what in ORDER if spent.seconds[what]}
    parts["the rest"] = max(0.0, seconds - sum(parts.values()))
    shares = {what: 100 * value / seconds for what, value in parts.items()}
    text = ", ".join(f"{what} {share:.0f} %" for what, share in shares.items())
    return {
        "spent_s": {what: round(value, 3) for what, value in parts.items()},
        "run_img_per_s": spent.images / seconds,
        "time": text.replace("waiting", "exposed communication"),
        "verdict": verdict(shares, spent, config, ranks, device, cores()),
    }


def verdict(
    shares: Mapping[str, float], spent: Spent, config: Config, ranks: int, device: str, cores: int
) -> str:
    """Return one sentence: what takes more time than it should, and what to change.

    ``shares``: where the time went, in percent. ``cores``: of this host.
    """
    if spent.steps < FEW_STEPS:
        return f"{spent.steps} steps are too few to judge by; from {FEW_STEPS} on there is advice"
    over = {what: shares.get(what, 0.0) - usual for what, usual in USUAL.items()}
    worst = max(over, key=over.__getitem__)
    shares = {**shares, "computing": shares.get("forward", 0.0) + shares.get("backward", 0.0)}
    worst = worst if over[worst] > 0 else "computing"
    rules = _rules(spent, config, ranks, device, device == "cpu" and ranks >= cores)
    advice = next(text for what, applies, text in rules if what == worst and applies)
    return f"{shares[worst]:.0f} % of the time is {TAKES.get(worst, worst)}: {advice}"


def _rules(
    spent: Spent, config: Config, ranks: int, device: str, full: bool
) -> Iterator[tuple[str, bool, str]]:
    """Yield what takes the time, whether the advice applies, and the advice, the most specific first.

    ``full``: every core has a rank already.
    """
    train, saves, parallel, workers = config.train, config.checkpoint, config.parallel, config.data.workers
    on_cpu, fp32 = device == "cpu", device == ACCELERATOR and parallel.precision == "fp32"
    yield "data", workers > 0, f"raise data.workers (now {workers})"
    yield "data", True, "let processes of their own load them, data.workers=2 (now 0)"
    for (rank, phase), times in spent.slow.most_common(1):
        slow = f"rank {rank} is slower than the others in {phase}, look there first"
        yield "waiting", times >= OFTEN * spent.reports, slow
    shared = "parallel.transport=auto lets the ranks of one host share memory"
    yield "waiting", on_cpu and parallel.traffic is not None, f"parallel.traffic=null {shared}"
    yield "waiting", on_cpu and parallel.transport == "process_group", shared
    yield "waiting", fp32, "parallel.precision=bf16 moves half the bytes"
    reshard = "parallel.reshard_after_forward=false spares backward's gathers, if the memory is there"
    yield "waiting", parallel.reshard_after_forward, reshard
    images = f"train.batch_size (now {train.batch_size // ranks} images per rank)"
    yield "waiting", True, f"give each rank more to compute, {images}"
    beside = "checkpoint.asynchronous=true writes them while training goes on"
    yield "checkpoint", not saves.asynchronous, beside
    yield "checkpoint", True, f"raise checkpoint.every_steps (now {saves.every_steps or 'once per epoch'})"
    yield "evaluation", True, f"raise train.eval_every (now {train.eval_every} epochs)"
    update = f"one update could serve more images, train.batch_size (now {train.batch_size})"
    yield "optimizer", True, update
    yield "the rest", True, f"reports, train.log_every (now {train.log_every})"
    yield "computing", fp32, "parallel.precision=bf16 computes faster"
    yield "computing", full, "every core has a rank already; nothing else stands out"
    yield "computing", True, "more ranks would share it; nothing else stands out"
