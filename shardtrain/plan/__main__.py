"""``python -m shardtrain.plan +recipe=resnet world_size=64``: a rank's memory, traffic and time, foretold."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shardtrain.job import data, launch, pictures
from shardtrain.job.build import completed
from shardtrain.job.config import Config, Data, require_equal_groups
from shardtrain.job.data.batches import Arrays
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import read_beside
from shardtrain.job.schema import UserError, above, at_least, plain, writing
from shardtrain.plan import report
from shardtrain.plan.report import GIB, Largest, Rates
from shardtrain.plan.simulate import Plan, Question, simulate

WORLDS = (1, 2, 4, 8, 16, 64, 256, 1024)


def plan(settings: Settings, place: RankInfo, device: torch.device) -> None:
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


# The largest batch that fits a memory.

MOST = 1 << 16  # images of a rank in one forward
PATIENCE = 10  # questions, after which what is left is halved and halved again


def largest_batch(peak_of: Callable[[int], int], memory: int, start: int) -> int:
    """The largest number of images whose peak fits ``memory`` bytes; 0 if one image does not, at most MOST.

    ``peak_of(images)``, bytes, grows with the images and nearly in proportion, so a straight line through two
    known points, at first ``start`` and one more, leads to the answer in a few questions.
    """
    fits, too_many = 0, MOST + 1
    known = {images: peak_of(images) for images in (start, start + 1)}
    for images, peak in known.items():
        fits, too_many = (images, too_many) if peak <= memory else (fits, min(too_many, images))
    while too_many - fits > 1:
        guess = _on_a_line(known, memory) if len(known) < PATIENCE else (fits + too_many) // 2
        images = min(max(guess, fits + 1), too_many - 1)
        known[images] = peak_of(images)
        if known[images] <= memory:
            fits = images
        else:
            too_many = images
    return fits


def _on_a_line(known: dict[int, int], memory: int) -> int:
    """Where the line through the two known points nearest to ``memory`` reaches it."""
    (a, low), (b, high) = sorted(known.items(), key=lambda item: abs(item[1] - memory))[:2]
    if low == high:
        return 2 * max(a, b)
    return round(a + (memory - low) * (b - a) / (high - low))


# The planner's command line: its own keys, and the training program's.

CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Keys:
    """`config.yaml` explains every key."""

    curve: bool
    out: str | None
    world_size: int = at_least(1)
    micro_batch: int | None = at_least(1)
    bandwidth: float | None = above(0)
    flops: float | None = above(0)
    memory: float | None = above(0)


@dataclass(frozen=True)
class Settings:
    """``config``: the training program's, the model's keys completed; ``question``: what to plan for."""

    keys: Keys
    config: Config
    question: Question

    @property
    def device(self) -> str:
        return "cpu"  # where the planner itself runs

    @property
    def threads(self) -> int | None:
        return self.config.threads


def read(arguments: Sequence[str], speak: bool) -> Settings | None:
    """The settings that ``arguments`` ask for; None when they asked for something to be printed."""
    found = read_beside(Keys, arguments, speak=speak, folder=CONFIGS)
    if found is None:
        return None
    keys, config = found
    if (keys.bandwidth is None) != (keys.flops is None):
        raise UserError("bandwidth (GB/s) and flops (TFLOP/s) make a lower bound together: give both")
    outline = _outline(config.data, config.model.get("num_classes"))
    config = dataclasses.replace(config, model=completed(config, outline), device=_planned_device(config))
    return Settings(keys, config, _question(keys, config, outline.channels))


def _question(keys: Keys, config: Config, channels: int) -> Question:
    require_equal_groups(config.parallel, keys.world_size)
    replicate = config.parallel.replicate
    parts = keys.world_size * config.train.accumulate
    whole, left = divmod(config.train.batch_size, parts)
    share = max(2, whole + 1) if left else whole  # BatchNorm does not train on a single pixel of one image
    in_place = config.parallel.transport == "shared_memory" and keys.world_size > replicate
    return Question(
        world_size=keys.world_size,
        replicate=replicate,
        micro_batch=keys.micro_batch or share,
        channels=channels,
        in_place=in_place,
        inbox=config.device == "cpu" and not in_place,
    )


def _planned_device(config: Config) -> str:
    """What the ranks compute on; a device that this machine has not can be planned for all the same."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def _outline(config: Data, classes: int | None) -> data.DataSet:
    """The data set's shape; where it is not at hand, colour images of as many classes as the model has."""
    try:
        return data.load(config)
    except UserError as error:
        if classes is None:
            raise UserError(f"{error}; or plan without the data set: model.num_classes=N") from None
    nothing = Arrays(torch.empty(0, 3, 1, 1, dtype=torch.uint8), torch.empty(0, dtype=torch.int64))
    return data.DataSet(nothing, nothing, config.name, classes, 3, (0.0,) * 3, (1.0,) * 3)


if __name__ == "__main__":
    main()
