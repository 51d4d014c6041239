"""What TensorBoard is given, read back from the event files; and whether it is true."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

from shardtrain import clip_grad_norm_, comm
from shardtrain.checkpoint.store import Store
from shardtrain.job import pictures
from shardtrain.job.build import build
from shardtrain.job.config import Config, from_hydra
from shardtrain.job.data import Batch, Prepare
from shardtrain.job.data.batches import Arrays, DataSet
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.evaluate import Evaluation, Mistake, Scores
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.monitor import glance
from shardtrain.monitor.board import METRICS, TensorBoard, hyperparameters
from shardtrain.monitor.glance import Glance
from shardtrain.monitor.reporter import Sink
from shardtrain.monitor.window import StepMetrics
from shardtrain.train.loop import train

CPU = torch.device("cpu")
TINY = (
    "data=fake",
    "data.train_images=60",
    "data.val_images=11",
    "data.channels=1",
    "data.image_size=8",
    "train.batch_size=12",
    "train.epochs=2",
    "train.log_every=5",
    "monitor.plan=false",
    "monitor.progress=none",
)
TAGS = {  # of the public interface; perf/mfu is known on some GPUs alone
    *("train/loss", "train/acc1", "val/loss", "val/acc1", "val/acc5", "lr/group0", "grad_norm"),
    *("perf/img_per_s", "perf/img_per_s_per_rank", "time/step_s", "time/data_pct", "time/exposed_comm_pct"),
    *("comm/all_gather_mib_per_step", "comm/reduce_scatter_mib_per_step", "memory/params_mib"),
    *("memory/grads_mib", "memory/optimizer_mib", "memory/gathered_peak_mib", "memory/peak_mib"),
}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own


def configure(*arguments: str) -> Config:
    raw = compose(["+recipe=resnet", *TINY, *arguments])
    assert raw is not None
    return from_hydra(raw)


def run(folder: str, *arguments: str) -> None:
    place = RankInfo(comm.rank(), comm.world_size(), comm.rank(), comm.world_size())
    train(configure(*arguments), Context(place, CPU, Path(folder)))
    comm.barrier()


def events_of(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return events


def plugin_data(events: Any, plugin: str) -> dict[str, bytes]:
    return dict(events.PluginTagToContent(plugin))


@pytest.fixture(scope="module")
def finished(_pool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    _pool.run("auto", 2, run, str(folder))
    return folder


def test_every_tag_is_there_with_the_values_of_the_result(finished: Path) -> None:
    events, result = events_of(finished), json.loads((finished / "result.json").read_text())
    assert set(events.Tags()["scalars"]) >= TAGS
    for tag in TAGS:
        assert events.Scalars(tag)[-1].value == pytest.approx(result[tag], rel=1e-6), tag
    steps = [event.step for event in events.Scalars("train/loss")]
    assert steps == [5, 10]
    assert "perf/mfu" not in events.Tags()["scalars"]


def test_a_run_is_one_file_with_hyperparameters_layout_configuration_and_samples(finished: Path) -> None:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert len(list(finished.rglob("events.out.tfevents.*"))) == 1
    events, config = events_of(finished), configure()
    found = [HParamsPluginData.FromString(data) for data in plugin_data(events, "hparams").values()]
    experiment = next(data.experiment for data in found if data.HasField("experiment"))
    session = next(data.session_start_info for data in found if data.HasField("session_start_info"))
    assert [info.name.tag for info in experiment.metric_infos] == list(METRICS)
    assert session.hparams["optim.lr"].number_value == config.optim.lr
    assert session.hparams["world_size"].number_value == 2
    assert any(data.HasField("session_end_info") for data in found)

    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [page.title for page in layout.category] == ["Is it learning?", "Is it fast?", "Does it fit?"]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "batch_size: 12" in text
    verdict = events.Tensors("verdict/text_summary")[0].tensor_proto.string_val[0].decode()
    assert verdict.startswith("10 steps are too few to judge by; from 20 on there is advice")
    shown = {"samples/augmented", "at_a_glance/1_is_it_learning", "val/confusion", "val/worst_mistakes"}
    assert shown <= set(events.Tags()["images"])
    with Image.open(finished / "at_a_glance.png") as glance_of_it:
        assert glance_of_it.height > 100


def test_hyperparameters_have_the_same_keys_for_every_run() -> None:
    facts = {"model": "m", "parameters": 1, "world_size": 1, "device": "cpu", "steps": 1}
    plain, other = (
        hyperparameters(configure(*arguments), facts)
        for arguments in ((), ("optim=adamw", "sched=constant", "train.clip_grad_norm=1", "augment=digits"))
    )
    assert plain.keys() == other.keys()
    assert (plain["train.clip_grad_norm"], other["train.clip_grad_norm"]) == ("none", 1.0)
    assert (plain["augment"], other["augment"]) == ("none", "Affine")


def test_events_are_on_disk_when_a_checkpoint_is_saved(tmp_path: Path) -> None:
    seen, save = [], Store.save

    def look(store: Store, step: int, *arguments: Any, **options: Any) -> None:
        seen.append((step, [event.step for event in events_of(tmp_path).Scalars("train/loss")]))
        save(store, step, *arguments, **options)

    with patch.object(Store, "save", look):
        run(str(tmp_path), "train.epochs=1", "train.log_every=2", "checkpoint.every_steps=2")
    assert seen[:2] == [(2, [2]), (4, [2, 4])]


class Page(Sink):
    """Keeps what it is told, and the tags of pictures."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def say(self, text: str) -> None:
        self.seen.append(text)

    def picture(self, tag: str, image: np.ndarray[Any, Any]) -> None:
        assert image.dtype == np.uint8
        assert image.shape[2] == 3
        self.seen.append(tag)


def job_of(first_step: int = 0) -> Any:
    """What a glance needs of a job."""
    data = DataSet(Arrays(torch.full((5, 1, 8, 8), 9), torch.arange(5)), None, "", 5, 1, (8.0,), (4.0,))  # type: ignore[arg-type]
    feed = SimpleNamespace(prepare=Prepare(data, 8, CPU), images=data.train)
    return SimpleNamespace(val=feed, first_step=first_step)


FOUND = Evaluation(Scores(1.0, 80.0, 100.0), torch.eye(5, dtype=torch.int64), (Mistake(3, 1, 2, 4.0),))


def test_mixed_images_are_captioned_with_both_classes(tmp_path: Path) -> None:
    page, captions = Page(), []
    look = Glance(tmp_path, page, job_of(), 1.0)
    soft = torch.tensor([[0.0, 0.3, 0.7], [0.02, 0.98, 0.0]])

    def grid(images: torch.Tensor, texts: list[str], *_: torch.Tensor) -> np.ndarray[Any, Any]:
        captions.extend(texts)
        return np.zeros((1, 1, 3), np.uint8)

    with patch.object(pictures, "grid", grid):
        for labels in (soft, torch.tensor([4, 2])):
            look.samples(Batch(torch.zeros(2, 1, 8, 8), labels, 2))
    assert captions == ["2+1", "1", "4", "2"]
    assert page.seen == ["samples/augmented"] * 2


def test_points_of_a_resumed_run_are_not_doubled(tmp_path: Path) -> None:
    config = configure("data.grow={from:4,epochs:3}")
    facts = {"model": "m", "parameters": 1, "world_size": 1, "device": "cpu", "steps": 9}
    first = TensorBoard(tmp_path, config, facts)
    for step in (1, 2, 3):
        first.log(step, {"train/loss": float(step)})
    first.flush()  # as with a checkpoint; what ends the process comes later
    time.sleep(1.1)  # TensorBoard names files by the second
    second = TensorBoard(tmp_path, config, facts, first_step=2)
    second.log(3, {"train/loss": 30.0})
    second.close("finished")
    first.close("failed")
    points = [(event.step, event.value) for event in events_of(tmp_path).Scalars("train/loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 30.0)]
    text = events_of(tmp_path).Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    from: 4" in text  # the key, not the field's name
    resumed = Glance(tmp_path, Page(), job_of(2), 1.0)
    assert resumed.curves["train/loss"] == [(1, 1.0), (2, 2.0)]


def test_the_glance_draws_seldom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Page()
    look = Glance(tmp_path, page, job_of(), memory_mib=1000.0)
    look.log(5, {"val/loss": 1.0})
    look.evaluated(FOUND)
    assert page.seen == []
    monkeypatch.setattr(glance, "SHARE", 1e9)
    look.log(6, {"val/loss": 0.5, "memory/peak_mib": 3.0, "time/forward_pct": 60.0})
    look.evaluated(FOUND)
    assert page.seen == [
        "at_a_glance/1_is_it_learning",
        "at_a_glance/2_is_it_fast",
        "at_a_glance/3_does_it_fit",
        "val/confusion",
        "val/worst_mistakes",
    ]


def test_without_matplotlib_there_are_no_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "matplotlib is not installed" in str(pictures.confusion(torch.eye(2)))
    page = Page()
    look = Glance(tmp_path, page, job_of(), 1.0)
    look.log(1, {"val/loss": 1.0})
    look.close("finished")
    assert page.seen == ['no picture: matplotlib is not installed (pip install "shardtrain[bench]")']
    assert not look.path.exists()


def test_grids_show_pixels_as_they_were() -> None:
    mean, std = torch.tensor([[[8.0]]]), torch.tensor([[[4.0]]])
    pixels = torch.tensor([0.0, 16.0, 8.0])[:, None, None, None].expand(3, 1, 8, 8)
    page = pictures.grid((pixels - mean) / std, ["a", "b", "c"], mean, std)
    tile, start = pictures.TILE, pictures.GAP
    centres = [page[start + tile // 2, start + index * (tile + start) + tile // 2] for index in range(3)]
    assert [tuple(centre) for centre in centres] == [(0, 0, 0), (255, 255, 255), (128, 128, 128)]
    two_rows = pictures.grid(torch.zeros(9, 3, 8, 8), ["a"] * 9, mean, std)
    assert two_rows.shape == (2 * (tile + pictures.LINE + start) + start, 8 * (tile + start) + start, 3)


def test_confusion_matrices_have_a_row_for_each_class() -> None:
    few, many = (pictures.confusion(torch.eye(classes)) for classes in (3, 100))
    assert isinstance(few, np.ndarray)
    assert isinstance(many, np.ndarray)
    assert few.shape[0] < many.shape[0]


MOVED = ("all_gather", "reduce_scatter")


def _measured() -> dict[str, Any]:
    """A window's report beside an outside clock, an outer meter and the tensors themselves."""
    job, _ = build(
        configure("train.accumulate=2", "train.batch_size=12"), comm.rank(), comm.world_size(), CPU
    )
    window, batches = StepMetrics(job), iter(job.train)
    loss = torch.zeros(())

    def step() -> None:
        nonlocal loss
        job.optimizer.zero_grad()
        with window.step():
            for _ in range(2):
                with window.phase("data"):
                    batch = next(batches)
                with window.phase("forward"):
                    logits = job.model(batch.images)
                    loss = job.loss(logits, batch.labels)
                with window.phase("backward"):
                    loss.backward()
                window.add(batch.images, loss, logits, batch.labels)
            job.optimizer.step()

    step()
    window.close(1, torch.ones(()))
    comm.barrier()
    start = time.perf_counter()
    with comm.meter() as meter:
        for _ in range(4):
            step()
    scalars = window.close(5, clip_grad_norm_(job.model, 1e9))
    elapsed = time.perf_counter() - start
    params = list(job.model.parameters())
    state = [v for s in job.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    sizes = {
        "params": sum(p.nbytes for p in params),
        "grads": sum(p.grad.nbytes for p in params if p.grad is not None),
        "optimizer": sum(v.nbytes for v in state),
    }
    shares = [value for tag, value in scalars.items() if tag.startswith("time/") and tag.endswith("_pct")]
    return {
        "speed": scalars["perf/img_per_s"] / (4 * 12 / elapsed),
        "bytes": {kind: scalars[f"comm/{kind}_mib_per_step"] * 4 * 2**20 for kind in MOVED},
        "meter": dict(meter.bytes),
        "memory": {kind: scalars[f"memory/{kind}_mib"] * 2**20 for kind in sizes},
        "sizes": sizes,
        "share": sum(shares),
        "seconds": dict(window.spent.seconds),
        "steps": (window.spent.steps, window.spent.images),
    }


def test_what_is_reported_is_what_an_outsider_measures(ranks: Any) -> None:
    for found in ranks(2, _measured):
        assert found["speed"] == pytest.approx(1, abs=0.05)
        assert {kind: found["meter"][kind] for kind in found["bytes"]} == pytest.approx(found["bytes"])
        assert found["memory"] == pytest.approx(found["sizes"])
        assert 80 < found["share"] < 101
        assert found["steps"] == (5, 60)
        assert found["seconds"]["backward"] > found["seconds"]["data"]
