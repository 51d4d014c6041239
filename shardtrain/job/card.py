"""What a run takes over from the card beside plain weights: the `Inference` in an export's `FILE.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shardtrain.config.config import Config
from shardtrain.config.errors import UserError, path_of, plain_file, reading
from shardtrain.config.format import first_of
from shardtrain.config.schema import typed
from shardtrain.data.preprocessing import Preprocessing, numbered
from shardtrain.job.inference import Inference
from shardtrain.launch.ranks import on_rank_0


def as_on_card(config: Config, own: Preprocessing, data_set: str) -> tuple[Preprocessing, list[str]]:
    """Return ``own`` with the classes, mean and std of the card of `model.weights`; and lines that say so.

    Keys of the command, and names that the ``data_set`` has, come first; other classes are refused. Without a
    card ``own`` is returned as it is. Collective. Raises UserError for a card that cannot be read.
    """
    weights = config.model.get("weights")
    card = _card(str(weights)) if weights is not None else None
    if card is None:
        return own, []
    changes: dict[str, Any] = {}
    if not config.model.get("reset_head", False):
        changes["classes"] = _classes(card, own.classes, data_set, f"{weights}.json")
    notes = []
    for name in ("mean", "std"):
        on_card = getattr(card, name)
        if getattr(config.data, name) is None and card.channels == own.channels:
            changes[name] = on_card
            values = ",".join(f"{value:.4g}" for value in on_card)
            notes.append(f"data.{name}=[{values}] is taken from {weights}.json")
    return replace(own, **changes), notes


def _card(weights: str) -> Inference | None:
    """Return rank 0's card of the file ``weights``; None if it has none. Collective."""
    file = Path(f"{path_of('model.weights', weights)}.json")

    def read() -> Any:
        if file.is_file():
            with reading(str(file), "expected what shardtrain.export writes beside weights"):
                values = json.loads(plain_file(file).read_text(encoding="utf-8"))
                # Other programs' files have such names, too.
                if isinstance(values, Mapping) and "classes" in values:
                    typed(Inference, values, "")
                    return values
        return None

    card: Inference | None = typed(Inference | None, on_rank_0(read), "")
    return card


def _classes(card: Inference, own: tuple[str, ...], data_set: str, source: str) -> tuple[str, ...]:
    """Return the classes of the card for a data set without names of its own. Raises UserError for others."""
    count = len(own)
    on_card = card.classes[:count]
    if own in (on_card, numbered(count)) and len(on_card) == count:
        return on_card
    if on_card == numbered(len(on_card)) or len(on_card) < count:
        return own  # names that say nothing; a head of another size is refused by the weights
    own_names = first_of([f"{number}: {name}" for number, name in enumerate(own)])
    raise UserError(
        f"{source}: its classes are {first_of([*on_card])}, and those of {data_set} are {own_names}; "
        "model.reset_head=true makes the last layer anew"
    )
