"""The bench: its arithmetic, its measurement, and real tiny runs. Nothing here asserts on a time."""

import functools
import json
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import start_processes

from shardtrain import device as devices
from shardtrain.config.errors import UserError
from shardtrain.launch.ranks import RankInfo, choose_device

import host
import memory
import steps
from compared import compared, losses_agree, ratios, table
from contenders import TITLES, LeastWork
from pool import ended, forkserver
from rounds import Samples, interleave
from settings import read
from simulated_device import SimulatedDevice
from tiny import ALONE, CPU

BENCH = Path(__file__).with_name("bench")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def result(file: Path) -> dict[str, Any]:
    """Return the only case of a file of results."""
    (case,) = json.loads(file.read_text())["cases"].values()
    return dict(case)


def test_ratios_are_taken_within_rounds() -> None:
    def spread(*values: float) -> dict[str, float]:
        return dict(zip(("median", "low", "high", "n"), values, strict=True))

    assert ratios([2.0, 3.0, 8.0], [1.0, 2.0, 4.0]) == spread(2.0, 1.75, 2.0, 3)
    assert ratios([2.0, 3.0, 8.0], [1.0, 2.0]) == spread(1.75, 1.625, 1.875, 2)  # a round cut short
    assert ratios([5.0], [1.0]) == spread(5.0, 5.0, 5.0, 1)
    assert ratios([2.0], []) is None


def test_losses_agree_strictly_first_and_loosely_later() -> None:
    right = [2.0] * 8
    assert losses_agree(right, right)
    assert not losses_agree([*right[:7], math.nan], right)
    assert losses_agree([*right[:7], 2.01], right)
    assert not losses_agree([2.0, 2.01, *right[2:]], right)
    assert not losses_agree([*right[:7], 2.2], right)
    assert losses_agree([2.0, 2.01, *right[2:]], right, "bf16")


def test_only_right_answers_are_ranked_and_a_failed_reference_leaves_the_times() -> None:
    samples = {
        "shardtrain": Samples([1.0, 1.0], [2.0, 1.5]),
        "fsdp2": Samples([2.0, 4.0], [2.0, 1.5]),
        "fsdp1": Samples(failure="RuntimeError: not on this device"),
        "ddp": Samples([1.0, 2.0], [2.0, 1.5]),
        "shardtrain_process_group": Samples([0.1, 0.1], [2.0, 1.6]),
        "no_communication": Samples([0.5, 1.0], [2.0, 1.7]),
        "bound": Samples(),
    }
    facts = compared(samples, ("fsdp2", "ddp", "shardtrain_process_group"), "fp32")
    assert [name for name, own in facts.items() if own["problem"] is None] == [
        *("shardtrain", "fsdp2", "ddp", "no_communication")
    ]
    assert facts["shardtrain"]["ratios"]["fsdp2"] == {"median": 0.375, "low": 0.3125, "high": 0.4375, "n": 2}
    assert facts["no_communication"]["loss_difference"] == pytest.approx(0.2 / 1.5)
    assert {*facts["shardtrain"]["ratios"]} == {"fsdp2", "ddp"}
    _, title, head, *rows = table("tiny@8×2", facts, "ms per step", 1e3).splitlines()
    assert title == "tiny@8×2"
    assert head.split()[-1] == "losses"
    assert [row.split("  ")[0] for row in rows[:4]] == ["no communication", "shardtrain", "DDP", "FSDP2"]
    assert rows[1].split() == ["shardtrain", "1000.0", "0.38", "(0.31–0.44)", "0.75", "equal", "to", "0e+00"]
    assert rows[4:] == [
        "FSDP1: RuntimeError: not on this device",
        "shardtrain, process group: losses differ from ddp's by up to 6.7e-02 of their value",
        "no waiting: interrupted before its first timed round",
    ]
    alone = {"fsdp2": Samples(failure="refused"), "shardtrain": Samples([1.0], [2.0])}
    text = table("", compared(alone, ["fsdp2"], "fp32"), "ms per step", 1e3)
    for words in ("FSDP2: refused", "Losses were not compared", "1000.0"):
        assert words in text


def test_the_order_rotates() -> None:
    order: list[str] = []
    runners = {name: lambda _, name=name: torch.tensor(order.append(name) or 0.0) for name in "abc"}
    interleave(runners, {name: Samples() for name in "abc"}, CPU, warmup=1, rounds=3, title="")
    assert "".join(order) == "abcbcacababc"


LINES = BENCH.with_name("bench_mistakes.txt").read_text().splitlines()


@pytest.mark.parametrize("line", LINES)
def test_mistakes_are_named(line: str) -> None:
    words, message = line.split(" | ")
    with pytest.raises(UserError) as error:
        read("", (), words.split(), speak=False)
    assert str(error.value).startswith(message)


def test_what_a_program_does_not_take_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = "rounds", "warmup", "device"
    with pytest.raises(UserError, match=r"unknown key device \(valid: model, precision"):
        read("", without, ["device=cuda"], speak=False)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"out=.*file/x.json: .*; cannot write there"):
        read("", (), [f"out={tmp_path}/file/x.json"], speak=True)
    assert read("every key", (), ["--help"], speak=True) is None
    assert capsys.readouterr().out == "every key\n"
    found = read("", without, [], speak=False)
    assert found is not None
    with pytest.raises(UserError, match="start all ranks on it"):
        memory.run(found, RankInfo(0, 2, 0, 1), CPU)


def least_work() -> tuple[list[float], int]:
    model = nn.Linear(3, 4)  # 16 elements, of which a rank of three owns the first 6
    torch.nn.init.ones_(model.weight)
    work = LeastWork(model)
    model(torch.ones(1, 3)).sum().backward()
    sent = work._sent
    work.step()
    assert sent.equal(torch.ones(10))  # the gradients that others own
    assert work._cuts[0][1].grad.equal(torch.full((6,), 3.0))  # the sum over three ranks
    return model.weight.flatten().tolist(), sum(map(len, work._received))


def test_the_bound_moves_what_ranks_cannot_avoid(on_ranks: Any) -> None:
    weight, received = on_ranks(3, least_work)[0]
    assert [value < 1 for value in weight] == [True] * 6 + [False] * 6
    assert received == 4  # of two other ranks, for two parameters


@pytest.mark.long
def test_steps_of_every_contender(tmp_path: Path) -> None:
    short = "model=tiny", "rounds=2", "warmup=1", "accumulate=2", "device=cpu"
    program = str(BENCH / "steps.py"), *short, "out=some/bench.json"
    bench = ended(2, *program, folder=tmp_path, **ONE_THREAD)
    assert (bench.codes, bench.errors) == ([0, 0], ""), bench.output
    assert "tiny@8×2 in fp32, accumulate 2\n" in bench.output
    contenders = result(tmp_path / "some/bench.json")
    assert {*contenders} == {*TITLES}
    right = contenders["ddp"]["losses"]
    for name, contender in contenders.items():
        assert contender["problem"] is None, name
        assert len(contender["values"]) == contender["ratios"]["fsdp2"]["n"] == 2
        assert len(contender["losses"]) == 3
        if name not in ("no_communication", "bound"):
            assert contender["losses"] == pytest.approx(right, rel=1e-5), name
        assert TITLES[name] in bench.output
    assert contenders["no_communication"]["losses"] != pytest.approx(right, rel=1e-5)
    assert contenders["fsdp2"]["ratios"]["fsdp2"]["median"] == 1.0
    conditions = json.loads((tmp_path / "some/bench.json").read_text())["conditions"]
    assert (conditions["ranks"], conditions["threads_per_rank"]) == (2, 1)
    assert conditions["torch"] == torch.__version__


@pytest.mark.long
def test_one_command_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dry. DDP is not among them: its reducer does not run over torch's fake process group."""
    names = "shardtrain", "shardtrain_process_group", "no_communication", "fsdp2"
    words = "device=cuda", "model=tiny", "rounds=1", "warmup=0", f"contenders=[{','.join(names)}]"
    found = read("", (), [*words, f"out={tmp_path}/gpu.json"], speak=True)
    assert found is not None
    assert found.channels_last
    monkeypatch.setitem(devices.BACKENDS, "cuda", "fake")
    with SimulatedDevice()(monkeypatch):
        steps.run(found, ALONE, choose_device(found.device, ALONE))
    contenders = result(tmp_path / "gpu.json")
    said = capsys.readouterr().out
    for contender in contenders.values():
        assert contender["problem"] is None, said
        took = contender["footprint"]
        assert (took["peak bytes"], took["reserved bytes"], len(contender["host"])) == (3, 6, 1)
    launches = [contenders[name]["footprint"]["launches"] for name in names]
    assert launches[1] > launches[0] > launches[2] > 100  # one rank communicates nothing, unless over a group
    for words in ("in bf16", "of no communication", "host ms", "peak bytes", "reserved bytes", "launches"):
        assert words in said


def test_costs_of_the_host_per_unit_per_parameter_and_per_step() -> None:
    costs = [7 + 100 * units + 3 * units * params for units, params in host.GRID]
    assert host.slopes(costs) == pytest.approx((100, 3, 7))
    contenders = {}
    for name, forward in (("plain", 1.0), ("fsdp2", 1.5)):
        seconds = {"forward": [forward, 9.0], "backward": [2.0, 2.0], "optimizer": [0.5, 0.5]}
        contenders[name] = SimpleNamespace(seconds=seconds)
    costs_of = host.beyond_plain(contenders)
    assert costs_of == {"fsdp2": {"forward": 0.375e6, "backward": 0.0, "optimizer": 0.0, "step": 0.375e6}}


@pytest.mark.long
def test_the_host_of_every_contender(tmp_path: Path) -> None:
    cases = ("--cases", "grid", "small", "--contenders", "ddp", "fsdp2", "shardtrain", "alone")
    words = ("--rounds", "2", "--precision", "bf16", "--optimizer", "foreach", "--out", "host.json", *cases)
    bench = ended(1, str(BENCH / "host.py"), *words, folder=tmp_path, **ONE_THREAD)
    assert (bench.codes, bench.errors) == ([0], ""), bench.output
    costs = json.loads((tmp_path / "host.json").read_text())
    assert [*costs] == ["grid 4x1", "grid 4x8", "grid 24x1", "grid 24x8", "small"]
    for contenders in costs.values():
        assert [*contenders] == ["ddp", "fsdp2", "shardtrain", "alone"]
        assert [*contenders["fsdp2"]] == ["forward", "backward", "optimizer", "step"]
    assert len(re.findall("^shardtrain, alone +(forward|backward|optimizer|step) ", bench.output, re.M)) == 4


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux counts PSS, others do not")
def test_memory_of_fresh_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forked here, which is quicker than spawned."""
    words = "model=tiny", "contenders=[ddp]", "reference=ddp", f"out={tmp_path}/memory.json"
    found = read("", ("device",), words, speak=True)
    assert found is not None
    forkserver()
    fork = functools.partial(start_processes, start_method="forkserver")
    with patch.object(memory, "spawn", fork):
        memory.run(found, ALONE, CPU)
        (case,) = found.cases
        assert memory.watch_ranks(case, found, "ddp", 2)[0] > 0
    contender = result(tmp_path / "memory.json")["ddp"]
    assert contender["problem"] is None
    assert contender["values"][0] > 0
    assert len(contender["losses"]) == 5
    assert contender["ratios"]["ddp"]["median"] == 1.0
    assert TITLES["ddp"] in capsys.readouterr().out
