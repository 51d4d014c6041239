"""Every key of the training program acts: another value changes a run, or a test of its own shows what."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from torchvision.models import VisionTransformer

from shardtrain import comm, introspect
from shardtrain.config.config import Config
from shardtrain.job import build
from shardtrain.launch.ranks import AFTERWARDS, START_UP
from shardtrain.monitor import Monitor
from shardtrain.train import loop

from key_table import FOUR_STEPS, ROWS, UNITS, keys_of, photos
from pool import each_rank
from tiny import CPU, VIT, composed, context, over_transport

ROOT = Path(__file__).parents[2]


def test_every_key_is_in_a_test() -> None:
    """In a row of the table, or as a word of a test of its own, which says what it does."""
    keys = keys_of(Config)
    for file in (ROOT / "configs/common/models.yaml", *(ROOT / "configs/augment").glob("*.yaml")):
        section = "model" if file.stem == "models" else "augment"
        names = yaml.safe_load(file.read_text()).keys() - {"defaults", "_target_"}
        keys |= {f"{section}.{name}" for name in names}
    changed = {row[1].split()[-1].partition("=")[0] for row in ROWS}
    words = " ".join(file.read_text() for file in (ROOT / "tests").rglob("test_*.py"))
    assert changed <= keys
    assert [key for key in keys - changed if f"{key}=" not in words] == []
    assert len(keys) <= 82


def evidence(folder: Path, *words: str) -> dict[str, Any]:
    """Train on the ranks of this group; return what an outsider sees of it."""
    logged: list[dict[str, float]] = []
    log = Monitor.log

    def logging(self: Monitor, step: int, scalars: Any) -> None:
        logged.append({"step": step, **scalars})
        log(self, step, scalars)

    with patch.object(Monitor, "log", logging), redirect_stdout(io.StringIO()) as said:
        usual = [word for word in FOUR_STEPS if words[:1] != ("data=imagefolder",) or word[:4] != "data"]
        with over_transport(words) as words:
            command = (*VIT, *usual, *words)
            loop.train(composed(*command), context(folder, *command))
    comm.barrier()

    def of(*tags: str) -> list[Any]:
        return [[value for tag, value in row.items() if tag.startswith(tags)] for row in logged]

    return {
        "losses": of("loss/train"),
        "scores": of("loss/val", "acc1/val", "balanced/val", "loss/test"),
        "average": of("loss/val_ema", "acc1/val_ema"),
        "steps": of("step"),
        "lr": of("lr/"),
        "traffic": of("system/all_", "system/reduce_"),
        "held": of("system/gathered"),
        "said": said.getvalue().replace(str(folder), ""),
        "files": sorted(path.name.partition("events.")[0] for path in folder.rglob("*")),
    }


def require_acting(tmp_path: Path, rows: list[list[str]]) -> None:
    files = f"data=imagefolder data.root={photos(tmp_path / 'photos')} data.image_size=8"
    plain: dict[str, dict[str, Any]] = {}
    equal = []
    for number, (what, words) in enumerate(rows):
        photographs = f"{files} data.workers=0 augment=none"
        both, _, change = words.format(photos=photographs, units=" ".join(UNITS)).rpartition(" & ")
        if both not in plain:
            plain[both] = evidence(tmp_path / f"plain{number}", *both.split())
        found = evidence(tmp_path / f"changed{number}", *both.split(), change)
        equal += [f"{words}: equal {what}"] if found[what] == plain[both][what] else []
    assert equal == [], equal


# Those that no other test of the default tier would miss.
FIRST = ("clip_grad", "smoothing", "mixup", "cutmix", "crop_area", "resize")
FIRST += ("every_steps=2", "activation_checkpoint", "parallel.reduce")


def chosen(first: bool, ranks: int) -> list[list[str]]:
    """Return the rows of the default tier or the others, for one rank or for two, which `parallel` needs."""
    listed = [row for row in ROWS if any(word in row[1] for word in FIRST) == first]
    return [row for row in listed if ("parallel." in row[1]) == (ranks > 1)]


def test_keys_act(tmp_path: Path) -> None:
    require_acting(tmp_path, chosen(first=True, ranks=1))


@each_rank(2, transport="auto")
def test_keys_of_several_ranks_act(tmp_path: Path) -> None:
    require_acting(tmp_path, chosen(first=True, ranks=2))


@pytest.mark.release
def test_all_other_keys_act(tmp_path: Path) -> None:
    require_acting(tmp_path, chosen(first=False, ranks=1))


@pytest.mark.release
@each_rank(2, transport="auto")
def test_all_other_keys_of_several_ranks_act(tmp_path: Path) -> None:
    require_acting(tmp_path, chosen(first=False, ranks=2))


@each_rank(2, transport="auto")
def test_the_transport_is_the_one_that_is_asked_for() -> None:
    kinds = {"process_group": comm.MessagesTransport, "shared_memory": comm.SharedMemoryTransport}
    for name, kind in kinds.items():
        with over_transport([f"SHARDTRAIN_TRANSPORT={name}"]):
            job, _ = build.build(composed(*VIT, *FOUR_STEPS), comm.rank(), comm.world_size(), CPU)
        assert type(introspect(job.model).transport.transport) is kind


def test_a_model_sees_images_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[torch.Tensor] = []
    monkeypatch.setattr(
        VisionTransformer, "init_from_images", lambda self, images: shown.append(images), raising=False
    )
    config = composed(*VIT, *FOUR_STEPS)
    build.build(config, 0, 1, CPU)
    build.build(config, 0, 1, CPU, first_step=1)
    (images,) = shown
    assert images.shape == (24, 1, 8, 8)
    assert images.dtype == torch.float32
    assert -2 < images.min() < 0 < images.max() < 2


def test_an_average_begins_at_the_end_of_the_warm_up() -> None:
    for words, steps in (((), 2), (("sched.warmup_epochs=0",), 0), (("train.epochs=8",), 4)):
        job, _ = build.build(composed(*VIT, *FOUR_STEPS, "ema.decay=0.9", *words), 0, 1, CPU)
        assert job.ema is not None
        assert job.ema.after == steps


def test_the_time_out_is_shorter_after_the_first_step(tmp_path: Path) -> None:
    with patch.object(comm, "set_time_out") as set_to:
        evidence(tmp_path)
    assert [call.args for call in set_to.call_args_list] == [(AFTERWARDS,)]
    assert AFTERWARDS < START_UP  # with which the process group opens
