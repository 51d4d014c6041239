"""The benchmark: its arithmetic, its measurement, and real tiny runs. Nothing here asserts on a time."""

import csv
import functools
import json
import math
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import start_processes

from shardtrain import comm
from shardtrain import device as devices
from shardtrain.job.dist_env import RankInfo, choose_device
from shardtrain.job.errors import UserError
from shardtrain.job.hydra_app import compose
from shardtrain.recipes.bench import __main__ as program
from shardtrain.recipes.bench import host, memory, results, settings
from shardtrain.recipes.bench.compared import Bench, Comparison, Spread, geometric_means, losses_agree, ratios
from shardtrain.recipes.bench.contenders import FOR_SLOW_LINKS, TITLES, LeastWork
from shardtrain.recipes.bench.interleave import Samples, interleave

from pool import each_rank, ended, forkserver, signalled
from simulated_device import DEVICE, SimulatedDevice
from test_config import require_told
from tiny import ALONE, CPU

ROOT = Path(__file__).parents[1]
BENCH = "shardtrain.recipes.bench"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run(world: int, *arguments: str) -> str:
    """Return what the benchmark prints on ``world`` ranks."""
    bench = ended(world, "-m", BENCH, *arguments, "device=cpu", folder=Path.cwd(), **ONE_THREAD)
    assert (bench.codes, bench.errors) == ([0] * world, ""), bench.output
    return bench.output


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "bench.json").read_text()))


def test_ratios_are_taken_within_rounds() -> None:
    assert ratios([2.0, 3.0, 8.0], [1.0, 2.0, 4.0]) == Spread(2.0, 1.75, 2.0, 3)
    assert ratios([2.0, 3.0, 8.0], [1.0, 2.0]) == Spread(1.75, 1.625, 1.875, 2)  # a round cut short
    assert ratios([5.0], [1.0]) == Spread(5.0, 5.0, 5.0, 1)
    assert ratios([2.0], []) is None


def test_losses_agree_strictly_first_and_loosely_later() -> None:
    right = [2.0] * 8
    assert losses_agree(right, right)
    assert not losses_agree([*right[:7], math.nan], right)
    assert losses_agree([*right[:7], 2.01], right)
    assert not losses_agree([2.0, 2.01, *right[2:]], right)
    assert not losses_agree([*right[:7], 2.2], right)
    assert losses_agree([2.0, 2.01, *right[2:]], right, "bf16")


def measured(**samples: Samples) -> Comparison:
    return Comparison(samples, "tiny@8×2", "ms per step", 1e3, ("fsdp2", "ddp"))


def test_only_right_answers_are_ranked_and_a_failed_reference_leaves_the_times() -> None:
    comparison = measured(
        shardtrain=Samples([1.0, 1.0], [2.0, 1.5]),
        fsdp2=Samples([2.0, 4.0], [2.0, 1.5]),
        fsdp1=Samples(failure="RuntimeError: not on this device"),
        ddp=Samples([1.0, 2.0], [2.0, 1.5]),
        shardtrain_process_group=Samples([0.1, 0.1], [2.0, 1.6]),
        no_communication=Samples([0.5, 1.0], [2.0, 1.7]),
    )
    statuses = [comparison.verdict(name).status for name in comparison.samples]
    assert statuses == ["ok", "ok", "failed", "ok", "wrong", "ok"]
    assert comparison.ratios_to("fsdp2")["shardtrain"] == Spread(0.375, 0.3125, 0.4375, 2)
    assert comparison.verdict("no_communication").loss_difference == pytest.approx(0.2 / 1.5)
    assert comparison.ranked() == ["no_communication", "shardtrain", "ddp", "fsdp2"]
    assert comparison.ratios_to("shardtrain_process_group") == {}
    title, head, *ranked, failed, wrong = comparison.table()
    assert title == "tiny@8×2, 2 rounds"
    assert head.split()[-1] == "losses"
    assert [row.split("  ")[0] for row in ranked] == ["no communication", "shardtrain", "DDP", "FSDP2"]
    assert ranked[1].split() == ["shardtrain", "1000.0", "0.38", "0.31–0.44", "0.75", "equal", "to", "0e+00"]
    assert failed == "FSDP1: failed, not ranked: RuntimeError: not on this device"
    assert wrong.endswith("wrong, not ranked: losses differ from ddp's by up to 6.7e-02 of their value")
    text = "\n".join(measured(fsdp2=Samples(failure="refused"), shardtrain=Samples([1.0], [2.0])).table())
    for words in ("No ratios: FSDP2 has no right answers", "Losses were not compared", "1000.0"):
        assert words in text


def test_geometric_means_need_every_case() -> None:
    fast, slow, right = [1.0], [4.0], [2.0]
    cases = [
        measured(fsdp2=Samples(slow, right), ddp=Samples(fast, right), shardtrain=Samples(fast, right)),
        measured(fsdp2=Samples(slow, right), ddp=Samples(failure="full"), shardtrain=Samples(slow, right)),
    ]
    assert geometric_means(cases) == {"fsdp2": {"fsdp2": 1.0}, "shardtrain": {"fsdp2": pytest.approx(0.5)}}


def test_the_order_rotates() -> None:
    order: list[str] = []
    runners = {name: lambda _, name=name: torch.tensor(order.append(name) or 0.0) for name in "abc"}
    interleave(runners, {name: Samples() for name in "abc"}, CPU, warmup=1, rounds=3)
    assert "".join(order) == "abcbcacababc"


@pytest.mark.long
@each_rank(2, transport="auto")
def test_a_failure_on_one_rank_takes_the_contender_out_on_all() -> None:
    def fragile(number: int) -> torch.Tensor:
        if number == 1 and comm.rank() == 1:
            raise RuntimeError("only here\nand more")
        return torch.tensor(float(comm.rank()))

    samples = {"a": Samples(), "b": Samples()}
    runners = {"a": fragile, "b": lambda number: torch.tensor(float(number + comm.rank()))}
    interleave(runners, samples, CPU, warmup=1, rounds=2)
    assert (samples["a"].failure, samples["a"].losses) == ("RuntimeError: only here", [0.5])
    assert samples["b"].losses == [0.5, 1.5, 2.5]
    assert [len(samples[name].values) for name in "ab"] == [0, 2]


def test_mistakes_are_named() -> None:
    compose(["model=vgg11"])  # another program's models leave nothing behind in Hydra's store
    for line in (Path(__file__).parent / "bench_mistakes.txt").read_text().splitlines():
        require_told(line, lambda words: settings.read(words, speak=False))


def least_work() -> tuple[list[float], int]:
    model = nn.Linear(3, 4)  # 16 elements, of which a rank of three owns the first 6
    torch.nn.init.ones_(model.weight)
    work = LeastWork(model)
    model(torch.ones(1, 3)).sum().backward()
    sent = work._sent
    work.step()
    assert sent.equal(torch.ones(10))  # the gradients that others own
    assert work._cuts[0][1].grad.equal(torch.full((6,), 3.0))  # the sum over three ranks
    return model.weight.flatten().tolist(), len(work._received)


def test_the_bound_moves_what_ranks_cannot_avoid(on_ranks: Any) -> None:
    weight, received = on_ranks(3, least_work)[0]
    assert [value < 1 for value in weight] == [True] * 6 + [False] * 6
    assert received == 4  # of two other ranks, for two parameters


def test_steps_of_every_contender(tmp_path: Path) -> None:
    file = tmp_path / "some" / "bench.csv"
    short = "model=tiny", "rounds=2", "warmup=1", "accumulate=2"
    said = run(2, *short, f"out={tmp_path}", f"results={file}")
    assert "tiny@8×2, 2 rounds\n" in said
    found = result(tmp_path)
    (case,) = found["comparisons"]
    assert set(case["contenders"]) | {"shardtrain_process_group", *FOR_SLOW_LINKS} == set(TITLES)
    right = case["contenders"]["ddp"]["losses"]
    for name, contender in case["contenders"].items():
        assert contender["status"] == "ok", (name, contender["reason"])
        assert len(contender["values"]) == contender["ratios"]["fsdp2"]["n"] == 2
        assert len(contender["losses"]) == 3
        if name not in ("no_communication", "bound"):
            assert contender["losses"] == pytest.approx(right, rel=1e-5), name
        assert TITLES[name] in said
    assert case["contenders"]["no_communication"]["losses"] != pytest.approx(right, rel=1e-5)
    assert case["contenders"]["fsdp2"]["ratios"]["fsdp2"]["median"] == 1.0
    assert (found["conditions"]["ranks"], found["conditions"]["threads_per_rank"]) == (2, 1)
    assert found["conditions"]["torch"] == torch.__version__.split("+")[0]
    assert not found["interrupted"]
    assert (tmp_path / "bench.txt").read_text().rstrip() in said
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert {row["contender"] for row in rows} == {TITLES[name] for name in case["contenders"]}
    for row in rows:
        assert [row[key] for key in ("case", "ranks", "rounds")] == ["tiny@8×2, accumulate 2", "2", "2"]
        assert (row["torch"], row["reference"]) == (found["conditions"]["torch"], "FSDP2")
        assert f"  {row['value']}  " in said
        assert f"  {row['ratio']}  " in said


MARKED = """
<!-- some.csv ranks=2: {contender} | {case} | {ratio} -->

| | a@8×2 | b@8×2 |
| --- | --- | --- |
| FSDP2 | 1.00 | – |
| shardtrain | 0.50 | 0.70 |

"""


def test_the_tables_of_the_documents_are_printed_from_the_results(tmp_path: Path) -> None:
    samples = {"fsdp2": Samples([4.0], [2.0]), "shardtrain": Samples([1.0], [2.0])}
    facts = {"ranks": 2, "torch": "2.0"}
    for value, ranks in ((1.0, 2), (2.0, 2), (3.0, 4)):  # of equal names the last
        samples["shardtrain"].values = [value]
        comparison = Comparison(samples, "a@8×2", "ms per step", 1e3, ("fsdp2",))
        results.append(tmp_path / "some.csv", [comparison], "", {**facts, "ranks": ranks})
    alone = Comparison({"shardtrain": Samples([0.7], [2.0])}, "b@8×2", "ms per step", 1e3, ("fsdp2",))
    results.append(tmp_path / "some.csv", [alone], "", facts)
    expected = MARKED.replace("0.70", "")
    assert results.printed(MARKED.replace("0.50", "9"), tmp_path) == expected
    for document in map(ROOT.joinpath, results.DOCUMENTS):
        text = document.read_text()
        assert results.printed(text, ROOT) == text, "python -m shardtrain.recipes.bench.results"
        assert results.TABLE.search(text)


def test_one_command_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Dry. DDP is not among them: its reducer does not run over torch's fake process group."""
    listed = "contenders=[shardtrain,no_communication,fsdp2]", f"out={tmp_path}"
    found = settings.read(["device=cuda", "model=tiny", "rounds=1", "warmup=0", *listed], speak=False)
    monkeypatch.setitem(devices.BACKENDS, "cuda", "fake")
    with SimulatedDevice()(monkeypatch):
        program.run(found, ALONE, choose_device(found.device, ALONE))
    (case,), table = result(tmp_path)["comparisons"], (tmp_path / "bench.txt").read_text()
    assert {contender["status"] for contender in case["contenders"].values()} == {"ok"}, table
    for contender in case["contenders"].values():
        took = contender["footprint"]
        assert (took["peak bytes"], took["reserved bytes"], len(contender["host"])) == (3, 6, 1)
    plain, ours = (
        case["contenders"][name]["footprint"]["launches"] for name in ("no_communication", "shardtrain")
    )
    assert ours > plain > 100
    for words in ("in bf16", "of no communication", "host ms", "peak bytes", "reserved bytes", "launches"):
        assert words in table
    assert found.channels_last


@pytest.mark.long
def test_collectives(tmp_path: Path) -> None:
    said = run(2, "collectives", "rounds=2", "warmup=0", "sizes_kib=[4,16]", f"out={tmp_path}")
    comparisons = result(tmp_path)["comparisons"]
    assert [found["title"] for found in comparisons] == ["gather 4 KiB", "reduce 4 KiB", *SIXTEEN]
    for found in comparisons:
        own = {"shardtrain", "shardtrain_process_group", "shardtrain.comm"}
        assert set(found["contenders"]) | own == {*own, "gloo", "copy"}
        for contender in found["contenders"].values():
            assert (contender["status"], len(contender["values"])) == ("ok", 2)
            assert [contender["ratios"][to]["n"] for to in ("gloo", "copy")] == [2, 2]
    assert "gather 16 KiB, 2 rounds\n" in said


SIXTEEN = ("gather 16 KiB", "reduce 16 KiB")
ACTIVITIES = ("wrapping", "forward and backward", "optimizer.step")


@pytest.mark.long
def test_host_time_of_simulated_ranks(tmp_path: Path) -> None:
    said = run(1, "host", "world_sizes=[2,8]", "units=3", "rounds=2", "warmup=1", f"out={tmp_path}")
    comparisons = result(tmp_path)["comparisons"]
    titles = [f"{activity}, {world} ranks" for world in (2, 8) for activity in ACTIVITIES]
    assert [found["title"] for found in comparisons] == titles
    for found in comparisons:
        assert [*found["contenders"]] == ["shardtrain", "fsdp2"]
        assert {contender["ratios"]["fsdp2"]["n"] for contender in found["contenders"].values()} == {2}
        assert f"{found['title']}, 2 rounds\n" in said


def test_host_time_is_of_what_is_left_without_the_base() -> None:
    samples = {
        "shardtrain": Samples([24.0, 25.0]),
        "fsdp2": Samples([48.0, 50.0]),
        host.BASE: Samples([9.0, 8.0]),
    }
    host.without_base(samples)
    assert {name: own.values for name, own in samples.items()} == {
        "shardtrain": [15.0, 17.0],
        "fsdp2": [39.0, 42.0],
    }


def test_what_is_measured_on_one_host(tmp_path: Path) -> None:
    found, alone = (settings.read([word, f"out={tmp_path}"], speak=False) for word in ("memory", "host"))
    with pytest.raises(UserError, match=r"measures one process: python -m shardtrain\.recipes\.bench host"):
        program.run(alone, RankInfo(0, 2, 0, 1), CPU)
    for local, device, message in ((1, CPU, "start all ranks on it"), (2, DEVICE, "memory is for CPUs")):
        with pytest.raises(UserError, match=message):
            memory.measure(Bench(found, RankInfo(0, 2, 0, local), device))


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="Linux counts PSS, others do not")
def test_memory_of_fresh_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forked here, which is quicker than spawned."""
    given = ["memory", "model=tiny", "contenders=[ddp]", "reference=ddp", f"out={tmp_path}"]
    found = settings.read([*given, "device=cpu"], speak=False)
    forkserver()
    fork = functools.partial(start_processes, start_method="forkserver")
    with patch.object(memory, "spawn", fork):
        program.run(found, ALONE, CPU)
        assert memory.watch_ranks(found, "ddp", 2)[0] > 0
    contender = result(tmp_path)["comparisons"][0]["contenders"]["ddp"]
    assert contender["reason"] is None
    assert contender["values"][0] > 0
    assert len(contender["losses"]) == 5
    assert contender["ratios"]["ddp"]["median"] == 1.0
    assert TITLES["ddp"] in capsys.readouterr().out


def test_ctrl_c_leaves_what_was_measured(tmp_path: Path) -> None:
    arguments = ("model=tiny", "rounds=100000", "warmup=0", "contenders=[fsdp2,ddp]", f"out={tmp_path}")
    command = ("-m", BENCH, *arguments, "device=cpu")
    codes, said, _ = signalled("tiny@8×2  round ", signal.SIGINT, *command, folder=tmp_path, **ONE_THREAD)
    assert codes == [130]
    assert "interrupted: what was measured until then" in said
    found = result(tmp_path)
    assert found["interrupted"]
    assert 0 < found["comparisons"][0]["rounds"] < 100_000  # on a busy machine the first round may be shown
