"""Write the texts at the start and the end of a run: tables, scores, where the time went."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardtrain import introspect
from shardtrain.job import tags
from shardtrain.job.build import Job
from shardtrain.job.config import Config, Reference
from shardtrain.job.evaluate import Evaluation
from shardtrain.job.format import MIB, counted
from shardtrain.job.launch import Context
from shardtrain.monitor.metrics import Spent


def start_table(config: Config, context: Context, job: Job) -> str:
    """Return a table of what will be trained, on what, and what this rank will hold."""
    share, optim, side = job.share, config.optim, config.data.image_size
    units, held = introspect(job.model).units, introspect(job.model).bytes_by_rank
    own, most = max(held) / MIB, "at most " if min(held) < max(held) else ""
    size = f"{sum(unit.parameters for unit in units):,} parameters in {counted(len(units), 'unit')}"
    flops, rate = f"{job.forward_flops[side] / 1e9:.3g}", f"lr {optim.lr:g}, {config.sched.name}"
    micro_batches = counted(share.accumulate, "micro-batch")
    ranks = counted(share.world_size, "rank")
    replicas = f" in {config.parallel.replicate} replicas" if config.parallel.replicate > 1 else ""
    threads = f", {counted(torch.get_num_threads(), 'thread')} each" if context.device.type == "cpu" else ""
    switch = "dry_run" if config.dry_run else "eval_only" if config.eval_only else ""
    rows = [
        ("model", f"{_model_name(config.model)}, {size}, {flops} GFLOP per image forward"),
        ("per rank", f"{most}{own:.1f} MiB parameters, {own:.1f} gradients"),
        ("data", f"{job.data_name}, {side}×{side} pixels"),
        ("batch", f"{share.batch_size} = {ranks} × {micro_batches} × {share.micro_batch}"),
        ("length", f"{job.steps} steps, {job.steps_per_epoch} per epoch"),
        ("update", f"{optim.name}, {rate}, weight decay {optim.weight_decay:g}"),
        ("world", f"{ranks}{replicas}, {context.device.type}{threads}, torch {torch.__version__}"),
        ("run", f"none: {switch}" if switch else str(context.run_dir)),
    ]
    return _labelled(rows)


def _model_name(model: Mapping[str, Any]) -> str:
    """Return the model's name, with keys that are not at their defaults."""
    usual = ("_target_", "name", "num_classes", "in_channels", "image_size")
    keys = [f"{k} {v}" for k, v in model.items() if k not in usual and v not in (None, False, "auto", [])]
    return ", ".join([str(model.get("name", model["_target_"])), *keys])


def end_table(result: Mapping[str, Any]) -> str:
    """Return a table of how a run ended, from the content of result.json."""
    rows = [(result["status"], f"step {result['step']}, {result['seconds']:.1f} s")]
    if tags.TRAIN_LOSS in result:
        loss, acc1, speed = (result[tag] for tag in (tags.TRAIN_LOSS, tags.TRAIN_ACC1, tags.IMG_PER_S))
        rows.append(("train", f"loss {loss:.4f}, acc1 {acc1:.2f} %, {speed:.0f} img/s at the end"))
    if tags.VAL_LOSS in result:
        at = f" at step {result[tags.BEST_STEP]}" if tags.BEST_STEP in result else ""  # older ones lack it
        rows += _score_rows(result, f", best acc1 {result[tags.BEST_ACC1]:.2f} %{at}")
    if "verdict" in result:
        rows.append(("speed", f"{result['run_img_per_s']:.0f} img/s over all"))
        rows += [("time", result["time"]), ("verdict", result["verdict"])]
    return _labelled([*rows, ("run", result["run_dir"])])


def score_table(scored: Sequence[Evaluation], reference: Reference | None, classes: int) -> str:
    """Return a table of evaluations without a run: of the validation images, then of test images if any."""
    facts = {"reference": None if reference is None else dataclasses.asdict(reference), "classes": classes}
    val, *tests = scored
    test = dict(zip(tags.TEST, tests[0].judged, strict=True)) if tests else {}
    return _labelled(_score_rows(val.scalars() | test | facts, ""))


def in_words(scalars: Mapping[str, Any], names: Sequence[str], classes: int) -> str:
    """Describe the scores with the tags ``names``; acc5 where there are more than ten classes."""
    loss, acc1, acc5 = (scalars[tag] for tag in names)
    return f"loss {loss:.4f}, acc1 {acc1:.2f} %" + (f", acc5 {acc5:.2f} %" if classes > 10 else "")


def _score_rows(result: Mapping[str, Any], more: str) -> list[tuple[str, str]]:
    """Return rows for the latest evaluation in ``result``, and its comparison with the reference."""
    rows, ranked = [], "average" if tags.VAL_EMA_LOSS in result else "val"
    for name, names in (("val", tags.VAL), ("average", tags.VAL_EMA), ("test", tags.TEST)):
        if names[0] in result:
            scores = in_words(result, names, result["classes"])
            rows.append((name, scores + (more if name == ranked else "")))
    if result.get("reference"):
        judged = (tags.TEST_ACC1, tags.VAL_EMA_ACC1, tags.VAL_ACC1)
        yours, theirs = next(result[tag] for tag in judged if tag in result), result["reference"]
        source = f"{theirs['kind']} ({theirs['source']}: {theirs['conditions']})"
        rows.append(("acc1", f"yours {yours:.2f} %, reference {theirs['accuracy']:.2f} %, {source}"))
    return rows


def _labelled(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


# Where a run's time went, and what helps most: the hint is for the part that exceeds its usual share most.

FEW_STEPS = 20  # with fewer, the first step dominates
ORDER = ("data", "forward", "backward", "optimizer", "waiting", "evaluation", "checkpoint", "pictures")

# Part of the time → its usual percentage, what it is, and what reduces it.
HINTS = {
    "data": (10, "waiting for images: raise data.workers"),
    "waiting": (
        15,
        "waiting for other ranks and their shards: a larger train.batch_size gives each rank more to do, "
        "parallel.precision=bf16 moves half the bytes",
    ),
    "checkpoint": (5, "saving checkpoints: raise checkpoint.every_steps"),
    "evaluation": (20, "evaluation: raise train.eval_every"),
    "optimizer": (15, "optimizer: a larger train.batch_size takes fewer updates"),
    "the rest": (15, "neither steps nor evaluation: raise train.log_every"),
}


def judge(spent: Spent) -> dict[str, Any]:
    """Return entries of result.json: seconds by part, and the verdict in one sentence."""
    seconds = time.perf_counter() - spent.since
    parts = {what: spent.seconds[what] for what in ORDER if spent.seconds[what]}
    parts["the rest"] = max(0.0, seconds - sum(parts.values()))
    shares = {what: 100 * value / seconds for what, value in parts.items()}
    text = ", ".join(f"{what} {share:.0f} %" for what, share in shares.items())
    return {
        "spent_s": {what: round(value, 3) for what, value in parts.items()},
        "run_img_per_s": spent.images / seconds,
        "time": text.replace("waiting", "exposed communication"),
        "verdict": verdict(shares) if spent.steps >= FEW_STEPS else f"none of fewer than {FEW_STEPS} steps",
    }


def verdict(shares: Mapping[str, float]) -> str:
    """Return a sentence: what takes more time than usual, and what to change. ``shares``: in percent."""
    over = {what: shares.get(what, 0.0) - usual for what, (usual, _) in HINTS.items()}
    worst = max(over, key=over.__getitem__)
    if over[worst] > 0:
        return f"{shares[worst]:.0f} % of the time is {HINTS[worst][1]}"
    computing = shares.get("forward", 0.0) + shares.get("backward", 0.0)
    return f"{computing:.0f} % of the time is computing: nothing stands out"
