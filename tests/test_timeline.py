"""Steps as a trace and as a picture, on clocks that agree."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import shardtrain
from shardtrain import comm
from shardtrain.comm import trace
from shardtrain.comm.meter import waiting
from shardtrain.comm.movement import GATHER
from shardtrain.comm.trace import Span
from shardtrain.job.config import from_hydra
from shardtrain.job.dist_env import RankInfo
from shardtrain.job.hydra_app import compose
from shardtrain.job.launch import Context
from shardtrain.monitor import timeline
from shardtrain.monitor.timeline import Lanes
from shardtrain.train.loop import train

from small import Block, OddNet, images, sgd, shard
from small import train as steps_of

CPU = torch.device("cpu")


def _offsets(apart: float) -> list[float]:
    rank = comm.rank()
    return timeline.offsets(lambda: time.perf_counter() + rank * apart)


def test_clocks_are_aligned(on_ranks: Any) -> None:
    assert on_ranks(3, _offsets, 0.0) == [[0.0, 0.0, 0.0]] * 3  # of one host: exactly
    for found in on_ranks(3, _offsets, 100.0):
        assert found == pytest.approx([0.0, -100.0, -200.0], abs=0.02)
    assert timeline.offsets() == [0.0]


def _spans() -> list[Span]:
    model = shard(OddNet(), units=[Block])
    optimizer = sgd(model)
    steps_of(model, optimizer, steps=2)
    with trace.record(CPU) as taken:
        steps_of(model, optimizer, steps=1, start=2)
    steps_of(model, optimizer, steps=1, start=3)
    spans = taken.spans()
    assert all(span.start <= span.end for span in spans)
    return spans


def test_gathers_computation_reductions_and_waits_carry_unit_names(ranks: Any) -> None:
    units = ["blocks.0", "blocks.1", "the root"]
    for spans in ranks(2, _spans):
        found = {kind: sorted(span.name for span in spans if span.kind == kind) for kind in trace.KINDS}
        assert found["forward"] == found["backward"] == found["reduce"] == units
        assert found["gather"] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1", "the root"]
        waits = {"all_gather of blocks.0", "reduce_scatter of blocks.1", "fence of the model"}
        assert waits <= set(found["wait"])
        starts = {(span.kind, span.name): span.start for span in spans}
        assert starts["forward", "blocks.0"] < starts["forward", "blocks.1"]
        assert starts["backward", "blocks.1"] < starts["backward", "blocks.0"]
        assert starts["backward", "blocks.1"] < starts["reduce", "blocks.1"]


def test_without_a_trace_nothing_is_kept() -> None:
    model = shardtrain.shard(OddNet(), units=[Block])
    steps_of(model, sgd(model), steps=1, batch=lambda step: images(step, rank=0))
    assert not trace.is_open()
    with trace.record(CPU) as taken:
        trace.begin("gather", "a")
        trace.end("gather", "b")
    trace.end("gather", "a")
    assert taken.spans() == []


def lanes() -> Lanes:
    """Two ranks, two steps of 10 ms; rank 1 waits 4 ms in the second."""
    spans = []
    for rank in range(2):
        row = []
        for start in (0.0, 0.012):
            row += [
                Span("step", "step", start, start + 0.010),
                Span("phase", "forward", start, start + 0.006),
            ]
            row += [
                Span("gather", "a", start, start + 0.002),
                Span("gather", "b", start + 0.001, start + 0.003),
            ]
            row += [Span("forward", "the root", start, start + 0.006)]
            row += [Span("forward", "a", start + 0.002, start + 0.004)]
            row += [Span("reduce", "a", start + 0.006, start + 0.008)]
        row += [Span("wait", "reduce_scatter of a", 0.018, 0.022)] if rank else []
        spans.append(row)
    return Lanes(spans, first_step=7)


def test_a_trace_has_rows_without_overlap() -> None:
    events = timeline.chrome(lanes())["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert [names[0, row] for row in range(7)] == [
        *("steps", "phases", "units", "units", "gathers", "gathers", "reductions"),
    ]
    assert "waiting" in [name for (rank, _), name in names.items() if rank == 1]
    rows: dict[Any, list[Any]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    for row in rows.values():
        for one, other in pairwise(row):
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3
    assert [event["name"] for event in rows[0, 0]] == ["step 7", "step 8"]
    gather = next(event for event in events if event["name"] == "gather b")
    assert (gather["ts"], gather["dur"], gather["cat"]) == pytest.approx((1000, 2000, "gather"))


def test_a_step_in_words_and_as_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    found = lanes()
    assert found.steps == range(7, 9)
    assert timeline.in_words(found, 7) == "step 7: 10.0 ms, no waiting"
    assert timeline.in_words(found, 8) == (
        "step 8: 10.0 ms, waiting 0 / 40 % by rank, longest 4.0 ms for reduce_scatter of a (rank 1)"
    )
    drawn = timeline.picture(found, 8, "a model")
    assert isinstance(drawn, np.ndarray)
    red = (drawn[:, :, 0] > 200) & (drawn[:, :, 1] < 60) & (drawn[:, :, 2] < 60)  # tab:red
    middle = drawn.shape[0] // 2
    assert red[middle:].sum() > 10 * max(1, red[: middle // 2].sum())  # in rank 1's lane
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "matplotlib is not installed" in str(timeline.picture(found, 8, "a model"))


def profiled(folder: str, *arguments: str) -> None:
    tiny = ("data=fake", "data.train_images=96", "data.val_images=11", "data.channels=1", "data.image_size=8")
    steps = ("train.batch_size=12", "train.max_steps=8", "train.log_every=1")
    quiet = ("monitor.tensorboard=false", "monitor.plan=false", "monitor.progress=none")
    raw = compose(["+recipe=resnet", *tiny, *steps, *quiet, *arguments])
    assert raw is not None
    place = RankInfo(comm.rank(), comm.world_size(), comm.rank(), comm.world_size())
    train(from_hydra(raw), Context(place, CPU, Path(folder)))
    assert not trace.is_open()
    comm.barrier()


def test_a_timeline_that_cannot_be_written_does_not_end_the_run(tmp_path: Path) -> None:
    (tmp_path / "timeline").write_text("")  # a file where the folder should be
    profiled(str(tmp_path), "debug=profile", "train.max_steps=4")
    log = (tmp_path / "log.txt").read_text()
    assert f"warning: no timeline: cannot write to {tmp_path}/timeline (File exists)" in log
    assert "step 4: " in log  # what it would show is told all the same, of the two steps that there were
    assert "no waiting" not in log
    assert json.loads((tmp_path / "result.json").read_text())["status"] == "finished"


def test_profiles_are_made_when_planned_and_when_asked_for(on_ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "profile").touch()  # heeded with the first report, so steps 2 to 4
    on_ranks(2, profiled, str(tmp_path), "debug=profile", "monitor.profile_at=5")
    assert not (tmp_path / "profile").exists()
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == [
        *("memory-8.png", "step-4.png", "step-7.png", "steps-2-4.json", "steps-5-7.json"),
    ]
    events = json.loads((tmp_path / "timeline/steps-5-7.json").read_text())["traceEvents"]
    found = {(event["pid"], event["name"]) for event in events}
    for rank in range(2):
        for name in ("gather layer1.0", "forward layer4.1", "backward layer4.1", "reduce the root", "data"):
            assert (rank, name) in found
    log = (tmp_path / "log.txt").read_text()
    assert f"steps 5 to 7 are in {tmp_path}/timeline/steps-5-7.json (for ui.perfetto.dev), step-7.png" in log
    assert "step 7: " in log
    words = (
        r"step 8: The peak of ([\d.]+) MiB, in \w+.*? activations.* The ranks' peaks: ([\d.]+), [\d.]+ MiB\."
    )
    (peaks,) = re.findall(words, log)
    assert peaks[0] == peaks[1]
    with Image.open(tmp_path / "timeline/step-7.png") as drawn:
        assert drawn.width > 1000


def test_a_meter_that_is_open_for_long_stays_small() -> None:
    with comm.meter() as meter:
        for _ in range(500):
            with waiting(GATHER, "the unit", CPU):
                pass
    assert list(meter.exposed()) == [comm.Wait("all_gather", "the unit")]
    assert len(meter._seconds) + len(meter._on_device) == 1
