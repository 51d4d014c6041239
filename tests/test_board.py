"""What TensorBoard is given, read back from the event files; and whether it is true."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from shardtrain import clip_grad_norm_, comm
from shardtrain.job import pictures
from shardtrain.job.build import build
from shardtrain.job.evaluate import Evaluation, Scores
from shardtrain.job.step import Step
from shardtrain.monitor import Monitor, StepMetrics
from shardtrain.monitor.summary_figure import SummaryFigure
from shardtrain.monitor.writers import METRICS, TensorBoard, Writer, hyperparameters

from pool import each_rank
from tiny import CPU, SHORT, TINY, configure, events_of, run

TAGS = {  # of the public interface; perf/mfu is known on some GPUs alone
    *("train/loss", "train/acc1", "val/loss", "val/acc1", "val/acc5", "lr/group0", "grad_norm"),
    *("perf/img_per_s", "perf/img_per_s_per_rank", "time/step_s", "time/data_pct", "time/exposed_comm_pct"),
    *("comm/all_gather_mib_per_step", "comm/reduce_scatter_mib_per_step", "memory/params_mib"),
    *("memory/grads_mib", "memory/optimizer_mib", "memory/gathered_peak_mib", "memory/peak_mib"),
}
SUMMARY = ["at_a_glance/1_is_it_learning", "at_a_glance/2_is_it_fast", "at_a_glance/3_does_it_fit"]
FACTS = {"model": "m", "parameters": 1, "world_size": 1, "device": "cpu", "steps": 9}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own


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
    assert [event.step for event in events.Scalars("train/loss")] == [5, 10]
    assert "perf/mfu" not in events.Tags()["scalars"]


def test_a_run_is_one_file_with_hyperparameters_layout_configuration_and_samples(finished: Path) -> None:
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert len(list(finished.rglob("events.out.tfevents.*"))) == 1
    events, config = events_of(finished), configure(*TINY)
    data = [HParamsPluginData.FromString(each) for each in events.PluginTagToContent("hparams").values()]
    experiment = next(each.experiment for each in data if each.HasField("experiment"))
    session = next(each.session_start_info for each in data if each.HasField("session_start_info"))
    assert [info.name.tag for info in experiment.metric_infos] == list(METRICS)
    assert session.hparams["optim.lr"].number_value == config.optim.lr
    assert session.hparams["world_size"].number_value == 2
    assert any(each.HasField("session_end_info") for each in data)

    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [page.title for page in layout.category] == ["Is it learning?", "Is it fast?", "Does it fit?"]
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "batch_size: 12" in text
    assert {"samples/augmented", *SUMMARY} <= set(events.Tags()["images"])
    with Image.open(finished / "at_a_glance.png") as summary:
        assert summary.height > 100


def test_hyperparameters_have_the_same_keys_for_every_run() -> None:
    plain, other = (
        hyperparameters(configure(*TINY, *arguments), FACTS)
        for arguments in ((), ("optim=adamw", "sched=constant", "train.clip_grad_norm=1", "augment=digits"))
    )
    assert plain.keys() == other.keys()
    assert (plain["train.clip_grad_norm"], other["train.clip_grad_norm"]) == ("none", 1.0)
    assert (plain["augment"], other["augment"]) == ("none", "Affine")
    assert (plain["parallel.offload"], plain["parallel.reshard_after_forward"]) == (False, True)


class Page(Writer):
    """Keeps texts, and the tags of pictures."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def say(self, text: str) -> None:
        self.seen.append(text)

    def picture(self, tag: str, picture: pictures.Picture) -> None:
        assert picture.dtype == np.uint8
        assert picture.shape[2] == 3
        self.seen.append(tag)


def summary_of(folder: Path, first_step: int = 0) -> tuple[SummaryFigure, Monitor, list[str]]:
    """A summary, the monitor that it is drawn for, and what that shows."""
    summary, page = SummaryFigure(folder, None, first_step, 1000.0), Page()  # type: ignore[arg-type]
    return summary, Monitor([page], summary), page.seen


def test_points_of_a_resumed_run_are_not_doubled(tmp_path: Path) -> None:
    config = configure(*TINY)
    first = TensorBoard(tmp_path, config, FACTS)
    for step in (1, 2, 3):
        first.log(step, {"train/loss": float(step)})
    assert len(events_of(tmp_path).Scalars("train/loss")) == 3  # on disk before a checkpoint is saved
    time.sleep(1.1)  # TensorBoard names files by the second
    second = TensorBoard(tmp_path, config, FACTS, first_step=2)
    second.log(3, {"train/loss": 30.0})
    second.close("finished")
    first.close("failed")
    events = events_of(tmp_path)
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert points == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert summary_of(tmp_path, first_step=2)[0].curves["train/loss"] == {1: 1.0, 2: 2.0}
    assert "  image_size: 8" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()


def test_the_summary_is_drawn_seldom(tmp_path: Path) -> None:
    evaluation = Evaluation(Scores(1.0, 80.0, 100.0))
    summary, monitor, seen = summary_of(tmp_path)
    monitor.evaluated(5, evaluation)
    assert seen == []
    summary.due_at = 0.0
    monitor.log(6, {"memory/peak_mib": 3.0, "time/forward_pct": 60.0})
    monitor.evaluated(6, evaluation)
    assert seen == SUMMARY
    assert summary.path.exists()


def test_without_matplotlib_there_are_no_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    summary, monitor, seen = summary_of(tmp_path)
    monitor.log(1, {"val/loss": 1.0})
    for _ in range(2):
        monitor.draw_summary()
    assert seen == ['no picture: matplotlib is not installed (pip install "shardtrain[bench]")']
    assert not summary.path.exists()


def test_a_file_that_cannot_be_written_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("")  # a file where the folder should be
    _, monitor, seen = summary_of(tmp_path)
    path = tmp_path / "timeline/step-4.png"
    assert not monitor.save(path, "")
    assert seen == [f"warning: cannot write {path} (File exists); training goes on"]


def test_grids_show_pixels_as_they_were() -> None:
    mean, std = torch.tensor([[[8.0]]]), torch.tensor([[[4.0]]])
    pixels = torch.tensor([0.0, 16.0, 8.0])[:, None, None, None].expand(3, 1, 8, 8)
    page = pictures.grid((pixels - mean) / std, mean, std)
    tile, start = pictures.TILE, pictures.GAP
    centres = [page[start + tile // 2, start + index * (tile + start) + tile // 2] for index in range(3)]
    assert [tuple(centre) for centre in centres] == [(0, 0, 0), (255, 255, 255), (128, 128, 128)]
    two_rows = pictures.grid(torch.zeros(9, 3, 8, 8), mean, std)
    assert two_rows.shape == (2 * (tile + start) + start, 8 * (tile + start) + start, 3)


@each_rank(2, transport="auto")
def test_what_is_reported_is_what_an_outsider_measures() -> None:
    """A report beside an outside clock, an outer meter and the tensors themselves."""
    config = configure(*SHORT, "train.accumulate=2")
    job, _ = build(config, comm.rank(), comm.world_size(), CPU)
    metrics, batches, step = StepMetrics(job), iter(job.train), Step.of(job, None)

    def steps(count: int) -> None:
        for _ in range(count):
            job.optimizer.zero_grad()
            with metrics.step():
                step.gradients(batches, 2, metrics.phase, metrics.add)
                step.update()

    steps(1)
    metrics.report(1, torch.ones(()))
    comm.barrier()
    start = time.perf_counter()
    with comm.meter() as meter:
        steps(4)
    scalars = metrics.report(5, clip_grad_norm_(job.model, 1e9)).scalars
    elapsed = time.perf_counter() - start
    params = list(job.model.parameters())
    state = [v for s in job.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    sizes = {
        "params": sum(p.nbytes for p in params),
        "grads": sum(p.grad.nbytes for p in params if p.grad is not None),
        "optimizer": sum(v.nbytes for v in state),
    }
    shares = [value for tag, value in scalars.items() if tag.startswith("time/") and tag.endswith("_pct")]
    assert scalars["perf/img_per_s"] == pytest.approx(4 * 12 / elapsed, rel=0.05)
    for kind in ("all_gather", "reduce_scatter"):
        assert scalars[f"comm/{kind}_mib_per_step"] * 4 * 2**20 == pytest.approx(meter.bytes[kind])
    for kind, size in sizes.items():
        assert scalars[f"memory/{kind}_mib"] * 2**20 == pytest.approx(size), kind
    assert 80 < sum(shares) < 101
    assert (metrics.spent.steps, metrics.spent.images) == (5, 60)
    assert metrics.spent.seconds["backward"] > metrics.spent.seconds["data"]
