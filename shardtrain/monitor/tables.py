"""The tables at the start and at the end of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardtrain import introspect
from shardtrain.job.build import Job
from shardtrain.job.config import Config, Optim, Reference
from shardtrain.job.evaluate import Evaluation
from shardtrain.job.format import MIB, counted
from shardtrain.job.launch import Context

MOST_UNITS = 24  # lines; of a deeper model the rest is summed up


def start_table(config: Config, context: Context, job: Job) -> str:
    """What is about to be trained, on what, and what this rank will hold."""
    rank_info, share, optim = context.rank_info, job.share, config.optim
    units = introspect(job.model).units
    parameters = sum(unit.parameters for unit in units)
    held = introspect(job.model).bytes_by_rank
    own = max(held) / MIB
    most = "at most " if min(held) < max(held) else ""
    kept = max(_kept_by_rank(optim, job)) / MIB
    micro_batches = counted(share.accumulate, "micro-batch")
    ranks = counted(rank_info.world_size, "rank")
    replicas = f" in {config.parallel.replicate} replicas" if config.parallel.replicate > 1 else ""
    threads = f", {counted(torch.get_num_threads(), 'thread')} each" if context.device.type == "cpu" else ""
    rows = [
        ("model", f"{_model_name(config.model)}, {parameters:,} parameters"),
        ("cost", f"{job.forward_flops[config.data.image_size] / 1e9:.3g} GFLOP an image forward"),
        ("units", f"{len(units)}, {sum(unit.bytes for unit in units) / MIB:.1f} MiB in all"),
        ("a rank", f"{most}{own:.1f} MiB parameters, {own:.1f} gradients, {kept:.1f} optimizer"),
        ("data", f"{job.data_name}, {config.data.image_size}×{config.data.image_size} pixels"),
        ("batch", f"{share.batch_size} = {ranks} × {micro_batches} × {share.micro_batch}"),
        ("length", f"{job.steps} steps, {job.steps_per_epoch} an epoch"),
        (
            "update",
            f"{optim.name}, lr {optim.lr:g}, {config.sched.name}, weight decay {optim.weight_decay:g}",
        ),
        ("world", f"{ranks}{replicas}, {context.device.type}{threads}, torch {torch.__version__}"),
        ("run", _run_dir(config, context)),
    ]
    return f"{_aligned(rows)}\n{_unit_table(job)}"


def _kept_by_rank(optim: Optim, job: Job) -> list[int]:
    """Bytes of moments that each rank's optimizer will have."""
    hidden = {
        param: group.get("use_muon", False)
        for group in job.optimizer.param_groups
        for param in group["params"]
    }
    model = introspect(job.model)
    kept = [0] * len(model.bytes_by_rank)
    for param, elements in model.elements_by_rank.items():
        size = param.element_size() * optim.moments(hidden[param])
        kept = [size * count + others for count, others in zip(elements, kept, strict=True)]
    return kept


def end_table(result: Mapping[str, Any]) -> str:
    """How it ended, from what result.json holds."""
    rows = [(result["status"], f"step {result['step']}, {result['seconds']:.1f} s")]
    if "train/loss" in result:
        speed = f"{result['perf/img_per_s']:.0f} img/s at the end"
        rows.append(("train", f"loss {result['train/loss']:.4f}, acc1 {result['train/acc1']:.2f} %, {speed}"))
    if "val/loss" in result:
        best = f", best acc1 {result['best_val/acc1']:.2f} %"
        rows += _score_rows(result, best)
    if "verdict" in result:
        rows.append(("speed", f"{result['run_img_per_s']:.0f} img/s over all"))
        rows += [("time", result["time"]), ("verdict", result["verdict"])]
    rows.append(("run", result["run_dir"]))
    return _aligned(rows)


def score_table(found: Evaluation, reference: Reference | None) -> str:
    """An evaluation that stands for itself."""
    facts = {"reference": None if reference is None else dataclasses.asdict(reference)}
    return _aligned(_score_rows(found.scalars() | facts, ""))


def _score_rows(result: Mapping[str, Any], more: str) -> list[tuple[str, str]]:
    """The latest evaluation in `result`, and how it compares with what has been published."""
    rows = []
    for name, tag in (("val", "val/"), ("average", "val/ema_")):
        if f"{tag}loss" in result:
            loss, acc1, acc5 = (result[tag + score] for score in ("loss", "acc1", "acc5"))
            rows.append((name, f"loss {loss:.4f}, acc1 {acc1:.2f} %, acc5 {acc5:.2f} %"))
    rows[0] = (rows[0][0], rows[0][1] + more)
    if result.get("reference"):
        yours = result.get("val/ema_acc1", result["val/acc1"])
        theirs = result["reference"]
        source = f"{theirs['source']}: {theirs['conditions']}"
        rows.append(("acc1", f"yours {yours:.2f} %, reference {theirs['accuracy']:.2f} % ({source})"))
    return rows


def _run_dir(config: Config, context: Context) -> str:
    switch = "dry_run" if config.dry_run else "eval_only" if config.eval_only else ""
    return f"none: {switch}" if switch else str(context.run_dir)


def _unit_table(job: Job) -> str:
    units = introspect(job.model).units
    rows = [(unit.name, unit.parameters, unit.most_bytes / MIB) for unit in units[:MOST_UNITS]]
    rest = units[MOST_UNITS:]
    if rest:
        rows.append(
            (f"{len(rest)} more", sum(u.parameters for u in rest), sum(u.most_bytes for u in rest) / MIB)
        )
    width = max(len(name) for name, _, _ in rows)
    lines = [f"  {'unit':<{width}}  {'parameters':>13}  {'MiB a rank':>10}"]
    lines += [f"  {name:<{width}}  {count:>13,}  {mib:>10.2f}" for name, count, mib in rows]
    return "\n".join(lines)


def _model_name(model: Mapping[str, Any]) -> str:
    shown = {k: v for k, v in model.items() if k not in ("_target_", "name") and v is not None}
    keys = [f"{key} {value}" for key, value in shown.items()]
    return ", ".join([str(model.get("name", model["_target_"])), *keys])


def _aligned(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)
