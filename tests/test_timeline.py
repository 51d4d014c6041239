"""Traces and pictures of steps, by a clock that the ranks share."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shardtrain
from shardtrain import comm
from shardtrain.comm import trace
from shardtrain.comm.meter import waiting
from shardtrain.comm.trace import GATHER, Span
from shardtrain.monitor import timeline
from shardtrain.monitor.timeline import Lanes

from pool import each_rank
from small import Block, OddNet, images, sgd, shard
from small import train as steps_of
from tiny import CPU, run


@each_rank(3, transport="auto")
def test_ranks_share_a_clock() -> None:
    """Each knows of all when they met the others."""
    comm.barrier()
    now = time.perf_counter()
    starts = [spans[0].start for spans in timeline.collect([Span("step", "step", now, now + 1)], 7).spans]
    assert max(starts) - min(starts) < 0.5
    found = comm.gather_texts(str(starts), comm.plain_transport(), CPU)
    assert found == [str(starts)] * 3


@each_rank(2)
def test_gathers_computation_reductions_and_waits_carry_unit_names() -> None:
    model = shard(OddNet(), units=[Block])
    optimizer = sgd(model)
    steps_of(model, optimizer, steps=2)
    with trace.record(CPU) as taken:
        steps_of(model, optimizer, steps=1, start=2)
    steps_of(model, optimizer, steps=1, start=3)
    spans = taken.spans()
    assert all(span.start <= span.end for span in spans)
    units = ["blocks.0", "blocks.1", "the root"]
    found = {kind: sorted(span.name for span in spans if span.kind == kind) for kind in trace.KINDS}
    assert found["forward"] == found["backward"] == found["reduce"] == units
    assert found["gather"] == ["blocks.0", "blocks.0", "blocks.1", "blocks.1", "the root"]
    assert {"all_gather of blocks.0", "reduce_scatter of blocks.1", "fence of the model"} <= set(
        found["wait"]
    )
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
    one = [  # milliseconds
        *(("step", "step", 0, 10), ("phase", "forward", 0, 6), ("gather", "a", 0, 2), ("gather", "b", 1, 3)),
        *(("forward", "the root", 0, 6), ("forward", "a", 2, 4), ("reduce", "a", 6, 8)),
    ]
    both = [(kind, name, start + at, end + at) for at in (0, 12) for kind, name, start, end in one]
    waits = ("wait", "reduce_scatter of a", 18, 22)
    spans = [[Span(k, n, s / 1e3, e / 1e3) for k, n, s, e in rows] for rows in (both, [*both, waits])]
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


def test_a_step_in_words_and_as_a_picture() -> None:
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


def test_profiles_are_made_when_planned_and_when_asked_for(on_ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "profile").touch()  # seen with the first report, so steps 2 to 4
    steps = ("data.train_images=96", "train.max_steps=8", "train.log_every=1", "monitor.tensorboard=false")
    on_ranks(2, run, str(tmp_path), *steps, "debug=profile", "monitor.profile_at=5")
    assert not (tmp_path / "profile").exists()
    assert sorted(path.name for path in (tmp_path / "timeline").iterdir()) == [
        *("step-4.png", "step-7.png", "steps-2-4.json", "steps-5-7.json"),
    ]
    events = json.loads((tmp_path / "timeline/steps-5-7.json").read_text())["traceEvents"]
    found = {(event["pid"], event["name"]) for event in events}
    mlp = "encoder.layers.encoder_layer_0.mlp.0"
    for name in ("gather conv_proj", f"forward {mlp}", f"backward {mlp}", "reduce the root", "phase data"):
        assert {(0, name), (1, name)} <= found, name
    log = (tmp_path / "log.txt").read_text()
    assert f"steps 5 to 7 are in {tmp_path}/timeline/steps-5-7.json (for ui.perfetto.dev), step-7.png" in log
    assert "step 7: " in log
    with Image.open(tmp_path / "timeline/step-7.png") as drawn:
        assert drawn.width > 1000


def test_a_meter_that_is_open_for_long_stays_small() -> None:
    with comm.meter() as meter:
        for _ in range(500):
            with waiting(GATHER, "the unit", CPU):
                pass
    assert list(meter.exposed()) == [comm.Wait("all_gather", "the unit")]
    assert len(meter._seconds) + len(meter._moments) == 1
