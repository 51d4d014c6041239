"""``python -m shardtrain.plan +recipe=resnet world_size=64``: a rank's memory, traffic and time, foretold."""

from __future__ import annotations

import dataclasses
import datetime
import json
from pathlib import Path

import torch

from shardtrain import launch, pictures
from shardtrain.checked import plain
from shardtrain.errors import UserError, writing
from shardtrain.place import Place
from shardtrain.plan import report
from shardtrain.plan.fit import largest_batch
from shardtrain.plan.report import GIB, Largest, Rates
from shardtrain.plan.settings import Settings, read
from shardtrain.plan.simulate import Plan, simulate

WORLDS = (1, 2, 4, 8, 16, 64, 256, 1024)


def plan(settings: Settings, place: Place, device: torch.device) -> None:
    """Simulate, and tell."""
    if place.world_size > 1:
        raise UserError(
            "the planner is one process for any world size: start it with python -m shardtrain.plan"
        )
    keys = settings.keys
    folder = _folder(settings)
    rates = Rates(keys.bandwidth, keys.flops) if keys.bandwidth and keys.flops else None
    found = simulate(settings.config, settings.question)
    texts = [f"{report.headline(settings.config, found)}\n\n{report.rank_table(found)}"]
    if rates is not None:
        texts[0] += f"\n{report.bound_in_words(found, rates)}"
    largest = _largest(settings, found) if keys.memory else None
    if largest is not None:
        texts[0] += f"\n{report.fit_in_words(found, largest)}"
    plans = _curve(settings, found) if keys.curve else [found]
    if keys.curve:
        texts += [report.curve_table(plans, rates), report.shards_table(plans)]
    text = "\n\n".join(texts)
    facts = {
        "plan": report.as_json(found, rates),
        "largest_batch": largest and largest._asdict(),
        "curve": [report.as_json(other, rates) for other in plans],
        "config": plain(settings.config),
    }
    (folder / "plan.json").write_text(json.dumps(facts, indent=2) + "\n")
    (folder / "plan.txt").write_text(text + "\n")
    print(f"{text}\n")
    missing = _draw(folder, report.headline(settings.config, found), found, plans)
    print("\n".join([*([missing] if missing else []), f"written to {folder}"]), flush=True)


def _curve(settings: Settings, found: Plan) -> list[Plan]:
    """Plans at other world sizes, ``found`` among them, with as many images of a rank and replicas."""
    plans = [found]
    for world in WORLDS:
        if world != found.question.world_size and world % found.question.replicate == 0:
            question = dataclasses.replace(settings.question, world_size=world)
            plans.append(simulate(settings.config, question))
    return sorted(plans, key=lambda plan: plan.question.world_size)


def _largest(settings: Settings, found: Plan) -> Largest:
    memory = settings.keys.memory
    assert memory is not None

    def peak_of(images: int) -> int:
        return simulate(settings.config, dataclasses.replace(found.question, micro_batch=images)).peak

    return Largest(memory, largest_batch(peak_of, int(memory * GIB), settings.question.micro_batch))


def _folder(settings: Settings) -> Path:
    started = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    name = f"{settings.config.model.get('name', 'model')}-{settings.question.world_size}ranks-{started}"
    folder = Path(settings.keys.out or Path("outputs") / "plan" / name).expanduser()
    with writing("out", folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _draw(folder: Path, title: str, found: Plan, plans: list[Plan]) -> str:
    """Returns why there is no picture, if there is none."""
    drawn = {"memory.png": found.timeline.picture()}
    if len(plans) > 1:
        drawn["plan.png"] = report.curve(title, plans)
    for name, picture in drawn.items():
        if isinstance(picture, str):
            return picture
        pictures.save(folder / name, picture)
    return ""


def main() -> None:
    launch.start(read, plan)


if __name__ == "__main__":
    main()
