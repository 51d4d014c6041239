"""What a run reports on the console, in files and in tables, how it is measured; slow ranks; profiles."""

import contextlib
import errno
import io
import itertools
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from shardtrain import clip_grad_norm_, comm, torch_private
from shardtrain.comm.trace import GATHER, count
from shardtrain.config.config import Config
from shardtrain.config.format import MIB
from shardtrain.data import Batch
from shardtrain.job import pictures, tags
from shardtrain.job.build import Job, build
from shardtrain.job.evaluation import Evaluation, Scores
from shardtrain.launch.launcher import Context
from shardtrain.launch.ranks import RankInfo
from shardtrain.monitor import Monitor, StepMetrics, open_monitor, start_table, writers
from shardtrain.monitor.metrics import PHASES, Report, SlowRank, slow_rank
from shardtrain.monitor.monitor import end_table
from shardtrain.monitor.watch import Watch
from shardtrain.train.steps import BaseTrainer

from pool import each_rank, once
from tiny import CPU, SHORT, TINY, VIT, configure, context, events_of, run

SCALARS = {"loss/train": 0.5, "acc1/train": 80.0, "system/img_per_s": 123.0, "lr/group0": 0.1}
SCALARS |= {"system/exposed_comm_pct": 60.0, **{f"system/{phase}_pct": 10.0 for phase in PHASES}}
TWO = torch.zeros(2, 1, 8, 8)  # images
ONE = torch.ones(())
FOUR: Any = SimpleNamespace(steps=4, steps_per_epoch=2, first_step=0)  # of a job


@contextlib.contextmanager
def clock() -> Iterator[Callable[[float], None]]:
    """Yield what lets seconds pass on ``time.perf_counter``, which goes on as usual otherwise."""
    passed: list[float] = []
    usual = time.perf_counter
    with patch("time.perf_counter", lambda: usual() + sum(passed)):
        yield passed.append


def built(*arguments: str, model: Sequence[str] = VIT) -> tuple[Job, Config]:
    return build(configure(*model, "monitor.writers=[]", *arguments), 0, 1, CPU)


def test_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, config = built()
    with open_monitor(config, context(tmp_path / "a/run"), job) as monitor:
        monitor.step(1)
        monitor.log(1, SCALARS)
        assert json.loads((tmp_path / "a/run/result.json").read_text())["status"] == "running"
        monitor.evaluated(1, Evaluation(Scores(0.25, 98.5)), (1, 98.5, tags.VAL_ACC1))
    result = json.loads((tmp_path / "a/run/result.json").read_text())
    assert (result["status"], result["step"], result["steps"]) == ("finished", 1, job.steps)
    assert (result["acc1/val"], result["best/acc1"], result["loss/train"]) == (98.5, 98.5, 0.5)
    assert (result["parameters"], result["best/step"]) == (4_154, 1)
    assert {"torch", "torchvision", "python"} <= set(result["versions"])
    assert "loss/train 0.5" in (tmp_path / "a/run/log.txt").read_text()
    output = capsys.readouterr().out
    assert f"step   1/{job.steps}  epoch 0.0  loss 0.5000  acc1 80.00 %  lr 0.1  123 img/s" in output
    assert "val loss 0.2500, acc1 98.50 %\n" in output


def test_a_run_goes_on_while_its_disk_is_full(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, config = built("monitor.writers=[tensorboard]")
    full = OSError(errno.ENOSPC, "No space left on device")
    with open_monitor(config, context(tmp_path), job) as monitor:
        with patch.object(Path, "open", side_effect=full):
            monitor.log(1, SCALARS)
            monitor.log(2, SCALARS)
        monitor.log(3, SCALARS)
    (warning,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch("warning: .*No space left on device.*; training continues", warning)
    assert [point.step for point in events_of(tmp_path).Scalars("loss/train")] == [1, 2, 3]


def test_results_are_written_while_a_run_goes_on_with_null_for_what_json_has_not(tmp_path: Path) -> None:
    result = writers.ResultFile(tmp_path, FOUR)
    result.log(3, {"loss/train": float("nan"), "grad_norm": float("inf"), "system/img_per_s": 2.0})
    read = json.loads(result.path.read_text())
    assert (read["status"], read["step"], read["system/img_per_s"]) == ("running", 3, 2.0)
    assert (read["loss/train"], read["grad_norm"]) == (None, None)


def test_start_table_shows_what_a_rank_holds(tmp_path: Path) -> None:
    job, config = built("optim=adamw", "train.accumulate=2", model=())
    table = start_table(config, context(tmp_path), job)
    assert "42.6 MiB parameters, 42.6 gradients" in table
    assert "digits, 1,437 + 360 held out, 8×8 pixels" in table
    assert "48 = 1 rank × 2 micro-batches × 24" in table
    assert not job.notes


def test_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    console = writers.Console(FOUR)
    monkeypatch.setattr("time.perf_counter", lambda: console.started + 3000)
    assert (console.left(1), console.left(3)) == ("2:30:00", "0:16:40")


def test_the_end_has_the_average_beside_the_best_and_where_the_time_went(capsys: Any) -> None:
    evaluation = Evaluation(Scores(2.0, 30.0, 80.0), Scores(1.0, 20.0))
    writers.Console(FOUR).log(4, evaluation.scalars())
    assert re.findall("val|average", capsys.readouterr().out) == ["val", "average"]
    best = {tags.best(tags.VAL_ACC1): 20.0, tags.BEST_STEP: 4, "run_dir": "here"}
    facts = {"status": "finished", "step": 4, "seconds": 1.0}
    told = end_table({**facts, **evaluation.scalars(), **best, **SCALARS})
    assert "average   loss 1.0000, acc1 20.00 %, best acc1 20.00 % at step 4" in told
    assert "train     loss 0.5000, acc1 80.00 %, 123 img/s at the end" in told
    time = "data 10 %, forward 10 %, backward 10 %, optimizer 10 %, exposed communication 60 % at the end"
    assert f"time      {time}" in told


def step_of(metrics: StepMetrics, *images: torch.Tensor, loss: float = 1.0) -> None:
    """A step over micro-batches of ``images``, half of them right, which moves a MiB."""
    with metrics.step():
        count(GATHER, [MIB])
        for batch in images:
            logits = torch.eye(2)[torch.arange(len(batch)) % 2]
            labels = torch.zeros(len(batch), dtype=torch.int64)
            metrics.add(Batch(batch, labels, len(batch)), torch.tensor(loss), logits)


def test_metrics_are_of_the_steps_between_reports() -> None:
    job, _ = built()
    with clock() as let_pass:
        metrics = StepMetrics(job)
        let_pass(1e6)  # start-up, which is no part of them
        metrics.start()
        with metrics.step(), metrics.phase("data"):
            let_pass(1000)
        with metrics.paused():  # no part of them, either
            let_pass(1e6)
        step_of(metrics, TWO, TWO, loss=1.5)
        scalars = metrics.report(2, 3 * ONE).scalars
    assert (scalars["loss/train"], scalars["acc1/train"], scalars["grad_norm"]) == (1.5, 50.0, 3.0)
    assert scalars["system/img_per_s"] == pytest.approx(2 / scalars["system/step_s"])
    assert 500 < scalars["system/step_s"] < 1000
    assert 50 < scalars["system/data_pct"] < 100
    assert scalars["system/exposed_comm_pct"] == 0
    assert not [tag for tag in scalars if tag.endswith("per_step")]  # on one rank
    step_of(metrics, TWO, loss=float("nan"))
    with pytest.raises(RuntimeError, match=r"loss/train is nan at step 7; a lower optim.lr may help"):
        metrics.report(7, ONE)


def printed(terminal: bool, width: int = 200) -> list[str]:
    """Return the lines that stand on the screen after reports, a text, and a failure with its traceback."""
    output = io.StringIO()
    output.isatty = lambda: terminal  # type: ignore[method-assign]
    with (
        patch.object(sys, "stdout", output),
        patch.object(shutil, "get_terminal_size", lambda: os.terminal_size((width, 9))),
    ):
        console = writers.Console(SimpleNamespace(**vars(FOUR), inference=None))  # type: ignore[arg-type]
        console.log(1, SCALARS)
        console.log(2, SCALARS)
        console.say("said")
        console.log(3, SCALARS)
        console.facts({"status": "failed"})
        print("Traceback")
        console.log(4, SCALARS)
    return [line.rpartition(writers.ERASE)[2] for line in output.getvalue().split("\n")[:-1]]


def test_a_report_overwrites_the_one_before_on_a_terminal_alone() -> None:
    steps = [
        f"step {step}/4  epoch {step / 2}  loss 0.5000  acc1 80.00 %  lr 0.1  123 it" for step in range(5)
    ]
    lines = [line.partition("ems/s")[0] for line in printed(terminal=True)]
    assert lines == ["said", steps[3], "Traceback", steps[4]]
    lines = [line.partition("ems/s")[0] for line in printed(terminal=False)]
    assert lines == [steps[1], steps[2], "said", steps[3], "Traceback", steps[4]]
    narrow = printed(terminal=True, width=20)
    assert narrow[:3] == ["said", steps[3][:19], "Traceback"]


def rows(*busy_ms: dict[str, float]) -> torch.Tensor:
    return torch.tensor([[row.get(phase, 0.0) for phase in PHASES] for row in busy_ms]).double() / 1e3


def test_a_rank_is_slow_by_the_median_of_the_others() -> None:
    base = {"data": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 3.0}
    found = slow_rank(rows(base, base | {"data": 41.0, "backward": 61.0}, base | {"forward": 31.0}))
    text = "rank 1 is slow: busy 135.0 ms per step, the others 94.5 ms, most of it in data (+40.0 ms)"
    assert found == (1, "data", text)
    assert slow_rank(rows({"forward": 10.0}, {"forward": 14.9})) is None
    assert slow_rank(rows({"forward": 100.0}, {"forward": 119.0})) is None


def test_a_rank_that_is_slow_twice_is_named_once(tmp_path: Path) -> None:
    said: list[str] = []
    monitor: Any = SimpleNamespace(say=said.append)
    metrics: Any = SimpleNamespace(job=SimpleNamespace(steps=99))
    place = Context(RankInfo(0, 2, 0, 2), CPU, tmp_path)
    course = "none slow none slow slower slow elsewhere slow none slow none none"
    with Watch(configure(), place, metrics, monitor) as watch:
        for step, what in enumerate(course.split(), 1):
            slow = SlowRank(1, "backward" if what == "elsewhere" else "data", what)
            watch.step_done(step, Report({}, None if what == "none" else slow))
    assert said == ["step 5: slower"]


@each_rank(2, transport="auto")
def test_a_planted_slow_rank_is_found_with_its_phase() -> None:
    job, _ = build(configure(*SHORT), comm.rank(), comm.world_size(), CPU)
    metrics = StepMetrics(job)
    with clock() as let_pass, metrics.step(), metrics.phase("data"):
        let_pass(1000.0 * comm.rank())
    step_of(metrics, TWO)
    slow = metrics.report(2, ONE).slow
    assert slow[:2] == (1, "data")


def ranges_of(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Return when each named range of a trace begins and ends, in order."""
    ranges: dict[str, list[tuple[float, float]]] = {}
    for event in sorted(json.loads(path.read_text())["traceEvents"], key=lambda event: event.get("ts", 0)):
        if event.get("cat") == "user_annotation":
            ranges.setdefault(event["name"], []).append((event["ts"], event["ts"] + event["dur"]))
    return ranges


def test_profiles_are_made_when_planned(on_ranks: Any, tmp_path: Path) -> None:
    steps = ("data.limit=96", "train.max_steps=8", "train.log_every=1", "monitor.writers=[]")
    on_ranks(2, run, str(tmp_path), *steps, "debug=profile", "monitor.profile_at=5")
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == [f"steps-5-7-rank{rank}.json" for rank in range(2)]
    for rank in range(2):
        ranges = ranges_of(tmp_path / f"traces/steps-5-7-rank{rank}.json")
        assert len(ranges["train step"]) == 3
        for kind in ("gather", "forward", "backward", "reduce", "phase", "wait"):
            own = {"phase": "data", "wait": "fence of the model"}.get(kind, "the root")
            found = ranges[f"{kind} {own}"]
            assert len(found) >= 3, kind
            assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(found)), kind
    log = (tmp_path / "log.txt").read_text()
    assert f"steps 5 to 7 are in {tmp_path}/traces/steps-5-7-rank*.json (for ui.perfetto.dev)" in log


def test_a_profile_is_written_when_training_ends_first_and_dropped_when_it_fails(tmp_path: Path) -> None:
    metrics: Any = Mock(job=SimpleNamespace(steps=4))
    metrics.paused.return_value = contextlib.nullcontext()
    place = Context(RankInfo(0, 1, 0, 1), CPU, tmp_path)
    config = configure("monitor.profile_at=3")
    with Watch(config, place, metrics, Monitor()) as watch:
        for step in range(1, 5):
            watch.step_done(step, None)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["steps-3-4-rank0.json"]
    with Watch(config, place, metrics, Monitor()) as watch:
        watch.step_done(2, None)
        assert torch_private.profiler_enabled()
    assert not torch_private.profiler_enabled()


TAGS = {  # of the public interface
    *("loss/train", "acc1/train", "loss/val", "acc1/val", "lr/group0", "grad_norm", "best/acc1"),
    *("system/img_per_s", "system/img_per_s_per_rank", "system/step_s", "system/data_pct"),
    *("system/exposed_comm_pct", "system/all_gather_mib_per_step", "system/reduce_scatter_mib_per_step"),
    *("system/params_mib", "system/grads_mib", "system/optimizer_mib", "system/gathered_peak_mib"),
    "system/peak_mib",
}
FACTS = {"command": "train", "model": "m", "parameters": 1, "world_size": 1, "device": "cpu", "steps": 9}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own


finished = once(run)


def test_a_run_is_one_file_with_all_tags_hyperparameters_texts_and_pictures(finished: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    assert len(list(finished.rglob("events.out.tfevents.*"))) == 1
    events = events_of(finished)
    result = json.loads((finished / "result.json").read_text())
    for tag in TAGS:
        assert events.Scalars(tag)[-1].value == pytest.approx(result[tag], rel=1e-6), tag
    groups = sorted({tag.partition("/")[0] for tag in events.Tags()["scalars"]})
    assert " ".join(groups) == "acc1 balanced best grad_norm loss lr recall system"
    assert "acc5/val" not in events.Tags()["scalars"]  # of ten classes
    config = configure(*TINY)
    data = [HParamsPluginData.FromString(each) for each in events.PluginTagToContent("hparams").values()]
    experiment = next(each.experiment for each in data if each.HasField("experiment"))
    session = next(each.session_start_info for each in data if each.HasField("session_start_info"))
    assert [info.name.tag for info in experiment.metric_infos] == [tags.best(tags.VAL_ACC1), *writers.METRICS]
    assert session.hparams["optim.lr"].number_value == config.optim.lr
    assert session.hparams["world_size"].number_value == 2
    assert any(each.HasField("session_end_info") for each in data)

    texts = {
        tag.partition("/")[0]: events.Tensors(tag)[0].tensor_proto.string_val[0].decode()
        for tag in sorted(events.Tags()["tensors"])
        if tag.endswith("/text_summary")
    }
    assert [*texts] == ["changed", "config"]  # as TensorBoard shows them
    assert shlex.join(sys.argv) in texts["changed"]
    assert "| `train.batch_size` | 12 |" in texts["changed"]
    assert "batch_size: 12" in texts["config"]
    assert {*events.Tags()["images"]} == {"samples/as_trained", "confusion/val", "mistakes/val"}
    first = {info.name for info in experiment.hparam_infos if info.differs}
    # As many as TensorBoard shows, and the scores follow: another one by name would be `augment`.
    assert first == {"model", "optim.lr", "seed", "train.batch_size", "train.epochs"}


def test_points_of_a_resumed_run_are_not_doubled(tmp_path: Path) -> None:
    config = configure(*TINY)
    first = writers.TensorBoard(tmp_path, config, FACTS)
    for step in (1, 2, 3):
        first.log(step, {"loss/train": float(step)})
    assert len(events_of(tmp_path).Scalars("loss/train")) == 3  # on disk before a checkpoint is saved
    second = writers.TensorBoard(tmp_path, config, FACTS, first_step=2)
    second.log(3, {"loss/train": 30.0})
    second.facts({"status": "finished", "step": 3})
    first.facts({"status": "failed"})
    events = events_of(tmp_path)
    points = [(event.step, event.value) for event in events.Scalars("loss/train")]
    assert points == [(1, 1.0), (2, 2.0), (3, 30.0)]


def test_a_file_that_cannot_be_written_is_warned_of(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "traces").write_text("")  # a file where the folder should be
    assert not Monitor().write(tmp_path / "traces/steps-2-4-rank0.json", Mock())
    said = capsys.readouterr().err
    assert re.search("^warning: steps-2-4-rank0.json: .*File exists.*; training continues$", said)


def test_grids_show_pixels_as_they_were() -> None:
    pixels = torch.tensor([0.0, 16.0, 8.0])[:, None, None, None].expand(3, 1, 8, 8)
    page = pictures.grid(pixels, ["cat", "", "a dog of a very long name"])
    tile = pictures.TILE
    start = pictures.GAP
    centres = [page[start + tile // 2, start + index * (tile + start) + tile // 2] for index in range(3)]
    assert [tuple(centre) for centre in centres] == [(0, 0, 0), (255, 255, 255), (128, 128, 128)]
    ink = [page[start + tile :, start + 84 * index :][:, :84].min() < 100 for index in range(3)]
    assert ink == [True, False, True]


def test_captions_name_classes_and_what_is_mixed() -> None:
    classes = ("cat", "dog", "cow")
    assert pictures.caption(torch.tensor(1), classes) == "dog"
    assert pictures.caption(torch.tensor([0.3, 0.0, 0.7]), classes) == "70% cow\n30% cat"


@each_rank(2, transport="auto")
def test_what_is_reported_is_what_an_outsider_measures() -> None:
    config = configure(*SHORT, "train.accumulate=2")
    job, _ = build(config, comm.rank(), comm.world_size(), CPU)
    metrics = StepMetrics(job)
    trainer = BaseTrainer(config, job, metrics, Monitor())

    def steps(count: int) -> None:
        for _ in range(count):
            job.optimizer.zero_grad()
            with metrics.step():
                trainer.compute(1)

    steps(1)
    before = time.perf_counter()
    metrics.report(1, torch.ones(()))
    start = time.perf_counter()
    with comm.meter() as meter:
        steps(4)
    end = time.perf_counter()
    scalars = metrics.report(5, clip_grad_norm_(job.model, 1e9)).scalars
    after = time.perf_counter()
    params = list(job.model.parameters())
    sizes = {"params": sum(p.nbytes for p in params), "grads": sum(p.grad.nbytes for p in params)}
    elapsed = 4 * 12 / scalars["system/img_per_s"]
    assert end - start < elapsed < after - before
    for kind in ("all_gather", "reduce_scatter"):
        assert scalars[f"system/{kind}_mib_per_step"] * 4 * 2**20 == pytest.approx(meter.bytes[kind])
    for kind, size in sizes.items():
        assert scalars[f"system/{kind}_mib"] * 2**20 == pytest.approx(size), kind
    assert scalars["system/img_per_s_per_rank"] == pytest.approx(scalars["system/img_per_s"] / 2)


def test_event_files_sort_as_they_were_written_whatever_the_clock(tmp_path: Path) -> None:
    """TensorBoard reads them in the order of their names; a later one drops an earlier one's last steps."""
    ahead = time.time() + 3600
    for name in (f"{ahead:.0f}.host.1.0", f"{ahead:017.6f}.host.2"):  # torch's, and our own
        (tmp_path / f"events.out.tfevents.{name}").touch()
        for _ in range(2):
            (tmp_path / f"{writers._after_others(tmp_path)}.host.3").touch()
            assert max(tmp_path.iterdir()).name.endswith("host.3")
