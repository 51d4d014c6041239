"""A training job put together: start, run directory, monitor, hooks. The loop over steps is in `steps.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from shardtrain import device as devices
from shardtrain.config.config import Config
from shardtrain.config.errors import Unreadable, UserError
from shardtrain.config.target import instantiate
from shardtrain.job.build import Job, build
from shardtrain.launch.launcher import Context
from shardtrain.launch.ranks import cpu_threads
from shardtrain.launch.signals import StopSignals
from shardtrain.monitor import Monitor, StepMetrics, Watch, open_monitor, start_table
from shardtrain.train import resume
from shardtrain.train.hooks import Reports, Samples
from shardtrain.train.saving import Saver
from shardtrain.train.steps import BaseTrainer, Hook


class Parts(NamedTuple):
    """What a program may put in place of the command's: its job, what trains it, and further hooks."""

    build: Callable[[Config, int, int, torch.device, int], tuple[Job, Config]] = build
    begin: Callable[[Config, Job, StepMetrics, Monitor], BaseTrainer] = BaseTrainer
    hooks: Sequence[Hook] = ()


USUAL = Parts()


def train(config: Config, context: Context, parts: Parts = USUAL) -> float | None:
    """Run one job; return its best score, of `train.best`, or None without an evaluation."""
    identity = resume.identify(config, context)
    with resume.memory_of(config, context, identity) as memory:
        try:
            return _train(config, context, identity, memory, parts)
        except Unreadable as error:
            raise UserError(
                f"{error}; python -m shardtrain.plan … check=true lists all images that cannot be read"
            ) from None


def _train(
    config: Config, context: Context, identity: resume.Identity, memory: Path | None, parts: Parts
) -> float | None:
    rank_info = context.rank_info
    virtual = config.virtual_ranks(rank_info.world_size)
    if virtual and config.threads is None:  # as many as V ranks of this host would have: they change bits
        torch.set_num_threads(cpu_threads(rank_info, os.environ, virtual))
    if virtual and devices.is_accelerator(context.device):
        devices.choose_deterministic_kernels()
    own = [instantiate({"_target_": path}, "train.hooks", Hook, config.allow) for path in config.train.hooks]
    store, start = resume.find_start(config, context, identity, memory)
    job, config = parts.build(config, rank_info.rank, rank_info.world_size, context.device, start.step)
    metrics = StepMetrics(job)
    state, changes = resume.restore(store, start, config, context, job, metrics)
    with (
        resume.run_directory(store, start, config, context, identity) as messages,
        open_monitor(config, context, job, state.best) as monitor,
        StopSignals() as signals,
    ):
        notes = [*messages, *job.notes, *changes, *resume.start_messages(store, start, job, config)]
        monitor.say("\n".join([start_table(config, context, job), *notes]))
        trainer = parts.begin(config, job, metrics, monitor)
        saver = Saver(trainer, store, state, signals)
        with Watch(config, context, metrics, monitor) as watch:
            trainer.hooks = (Samples(), Reports(watch), *own, *parts.hooks, saver)
            trainer.run()
        return saver.best.score if saver.best else None
