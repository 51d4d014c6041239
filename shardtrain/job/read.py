"""Read the training program's configuration from a command line, alone or beside a program's own keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig

from shardtrain.job.config import Config
from shardtrain.job.errors import UnknownKey, UserError
from shardtrain.job.hydra_app import OF_THE_COMMAND, TRAIN, Composed, Program, advice, compose
from shardtrain.job.saved import MARKS
from shardtrain.job.schema import Frozen, checked


class Command(NamedTuple):
    """The configuration of a command line, its words by what they name, and a program's own keys."""

    config: Config
    words: Mapping[str, str]
    keys: Any = None

    @property
    def device(self) -> str:
        return self.config.device

    @property
    def threads(self) -> int | None:
        return self.config.threads


def read_command(arguments: Sequence[str], speak: bool = True, program: Program = TRAIN) -> Command | None:
    """Return the configuration for ``arguments``; None if a flag asks for output.

    Raises UserError for wrong names, types, ranges and combinations.
    """
    try:
        composed = compose(arguments, program, speak=speak)
        return None if composed is None else _checked(composed, program)
    except UnknownKey as error:
        last = error.key.rpartition(".")[2]
        elsewhere = [name for name in MARKS if "." in name and name.rpartition(".")[2] == last]
        text = advice(error.key, elsewhere)
        raise UserError(f"unknown key {error.key}; {text}" if text else str(error)) from None


def read_keys(cls: type[Frozen], arguments: Sequence[str], speak: bool) -> Frozen | None:
    """Return the keys of a program that has only those of ``cls``; None if a flag asks for output."""
    composed = compose(arguments, Program(cls, with_training_keys=False), speak=speak)
    return None if composed is None else checked(composed.values, cls)


def _checked(composed: Composed, program: Program) -> Command:
    values = composed.values
    values.pop("config", None)
    keys: Any = None
    if program.keys is not None:
        names = [field.name for field in dataclasses.fields(program.keys)]
        keys = checked(DictConfig({name: values.pop(name) for name in names}), program.keys)
        values.update({name: OF_THE_COMMAND[name] for name in {*names} & {*OF_THE_COMMAND}})
    config = checked(values, Config)
    warmup = config.sched.warmup_epochs
    if "sched.warmup_epochs" in composed.words and warmup > config.train.epochs:
        raise UserError(
            f"sched.warmup_epochs={warmup:g}: longer than the run, train.epochs={config.train.epochs}"
        )
    return Command(config, composed.words, keys)
