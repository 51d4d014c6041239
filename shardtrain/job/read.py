"""Read the training program's configuration from a command line, alone or beside a program's own keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Generic

from omegaconf import DictConfig, OmegaConf

from shardtrain.job.config import Config
from shardtrain.job.errors import UserError
from shardtrain.job.hydra_app import DESCRIBING, compose, hints, require_current
from shardtrain.job.schema import Frozen, checked


def read_config(arguments: Sequence[str], speak: bool) -> Config | None:
    """Return the training program's configuration for ``arguments``; None if a flag asks for output."""
    raw = compose(arguments, speak=speak)
    return None if raw is None else from_hydra(raw)


def from_hydra(raw: DictConfig) -> Config:
    """Return the frozen configuration. Raises UserError for wrong names, types, ranges and combinations."""
    for name in hints("gone"):
        gone_key, _, value = name.partition("=")
        if value and OmegaConf.select(raw, gone_key) == value:
            require_current(name)
    try:
        config = checked(raw, Config)
    except UserError as error:
        if not isinstance(error.__cause__, KeyError):
            raise
        key: str = error.__cause__.args[0]
        require_current(key)
        advice = hint(key, raw)
        raise UserError(f"unknown key {key}; {advice}" if advice else str(error)) from None
    reference = config.reference and (config.reference.model, config.reference.data)
    is_of_this_run = reference == (config.model_name, config.data.name)
    return config if is_of_this_run else dataclasses.replace(config, reference=None)


def hint(key: str, config: DictConfig) -> str:
    """Return advice for an unknown ``key``: a key of the same name elsewhere, or of the same meaning."""
    last = key.rpartition(".")[2]
    sections = {str(name): section for name, section in config.items() if isinstance(section, DictConfig)}
    elsewhere = [f"{name}.{last}" for name, section in sections.items() if last in section]
    meanings = [meaning for meaning, words in hints("keys").items() if last in words.split()] + elsewhere
    return next((text if " " in text else f"did you mean {text}?" for text in meanings if text != key), "")


@dataclasses.dataclass(frozen=True)
class Beside(Generic[Frozen]):
    """Hold a program's own ``keys`` beside the training program's configuration."""

    keys: Frozen
    config: Config
    device: str
    threads: int | None


def read_beside(
    cls: type[Frozen], folder: Path, arguments: Sequence[str], speak: bool
) -> Beside[Frozen] | None:
    """Return a program's own keys, a ``cls`` from ``folder``, and the training program's; or None."""
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
    own_words = [text for text in arguments if text.split("=")[0] in names or text in DESCRIBING]
    keys = compose(own_words, speak=speak, folder=folder)
    config = read_config([text for text in arguments if text not in own_words], speak) if keys else None
    if keys is None or config is None:
        return None
    return Beside(checked(keys, cls), config, config.device, config.threads)
