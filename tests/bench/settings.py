"""Read a command line of ``key=value`` words; `steps.py` explains the keys."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from shardtrain.config.errors import UserError, not_valid, writing
from shardtrain.device import ACCELERATOR, count

from contenders import CASES, PATCH, PRECISIONS, SUITE, TITLES, VITS, Case

CHOICES = {
    "model": [*CASES, "suite"],
    "contenders": [*TITLES],
    "reference": [*TITLES],
    "precision": [*PRECISIONS],
    "channels_last": ["false", "true"],
    "device": ["auto", "cpu", ACCELERATOR],
}
LEAST = {"rounds": 1, "warmup": 0, "accumulate": 1, "image_size": 1, "batch_size": 1}
ON_CPUS: dict[str, Any] = {"model": "resnet18", "precision": "fp32", "channels_last": False}
ON_GPUS: dict[str, Any] = {"model": "resnet50_224", "precision": "bf16", "channels_last": True}


@dataclass(frozen=True)
class Settings:
    """The command line's settings."""

    model: str
    precision: str
    channels_last: bool
    device: str
    out: str
    contenders: tuple[str, ...] = ()  # (): all that differ
    reference: str = "fsdp2"
    rounds: int = 30
    warmup: int = 3
    accumulate: int = 1
    image_size: int = 0  # 0: the case's own, as below
    batch_size: int = 0

    def __post_init__(self) -> None:
        for case in self.cases:
            if case.architecture in VITS and case.image_size % PATCH:
                size = f"image_size={case.image_size}"
                raise UserError(f"{size}: the ViT's patches of {PATCH} pixels do not divide it")

    @property
    def threads(self) -> int | None:
        """Threads per rank: one if there are several ranks, so that they compete equally for cores."""
        return 1 if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None

    @property
    def cases(self) -> list[Case]:
        names = SUITE if self.model == "suite" else (self.model,)
        return [self._case(CASES[name]) for name in names]

    def _case(self, usual: Case) -> Case:
        return replace(
            usual,
            image_size=self.image_size or usual.image_size,
            batch_size=self.batch_size or usual.batch_size,
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format,
        )


def read(text: str, without: Collection[str], arguments: Sequence[str], speak: bool) -> Settings | None:
    """Return the settings; for ``--help`` None, after printing ``text`` if ``speak``.

    ``without``: keys that the program does not have. A program without ``device`` is for CPUs.
    """
    if "--help" in arguments:
        if speak:
            print(text)
        return None
    known = [field.name for field in fields(Settings) if field.name not in without]
    values = {"device": "auto" if "device" in known else "cpu"}
    values["out"] = f"outputs/bench/{time.strftime('%Y%m%d-%H%M%S')}.json"
    for word in arguments:
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(f"cannot read {word!r}: expected key=value")
        if key not in known:
            raise not_valid(f"unknown key {key}", key, known)
        values[key] = _parsed(key, value)
    on_gpu = values["device"] == ACCELERATOR or (values["device"] == "auto" and count() > 0)
    settings = Settings(**{**(ON_GPUS if on_gpu else ON_CPUS), **values})
    if speak:
        with writing("out", Path(settings.out)):  # before the measurement
            Path(settings.out).parent.mkdir(parents=True, exist_ok=True)
            Path(settings.out).touch()
    return settings


def _parsed(key: str, text: str) -> Any:
    """Return the value of a key. Raises UserError for one that the key cannot have."""
    if key in LEAST:
        if not text.isdecimal() or int(text) < LEAST[key]:
            raise UserError(f"{key}={text}: expected a whole number, at least {LEAST[key]}")
        return int(text)
    words = text.strip("[]").split(",") if key == "contenders" else [text]
    for word in words:
        if word not in CHOICES.get(key, words):
            raise not_valid(f"{key}={word}", word, CHOICES[key])
    if key == "channels_last":
        return text == "true"
    return tuple(words) if key == "contenders" else text
