"""The small FSDP of `docs/course/mini.py` trains to the same bits as the engine and as FSDP2."""

import contextlib
import copy
import inspect
import io
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ladder
import mini
import pytest
import torch
import torch.distributed as dist
import walk
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchvision.models.resnet import BasicBlock, ResNet

from behaviours.rows import outcome
from behaviours.verdicts import ROWS
from behaviours.wrappers import with_verbs
from pool import each_rank
from small import images, shard

COURSE = Path(__file__).parents[2] / "docs/engine.md"

Losses = Callable[[nn.Module, int], torch.Tensor]


def fsdp2(model: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    for module in [*blocks, model]:
        fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def walks(net: nn.Module, number: int) -> torch.Tensor:
    return net(torch.full((1, 4), dist.get_rank() + number + 1.0, dtype=torch.float64)).square().mean()


def classifies(net: nn.Module, number: int) -> torch.Tensor:
    x, y = images(number, n=3, size=40)
    return nn.functional.cross_entropy(net(x), y)


MODELS: dict[str, tuple[Callable[[], nn.Module], Losses]] = {
    "walk": (walk.small_model, walks),
    "resnet": (lambda: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=5), classifies),
}


def losses_of(model: nn.Module, loss_of: Losses, lr: float = 1e-3) -> list[float]:
    """Train for three steps of two micro-batches, the first cleared in between, as loops do."""
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    losses = []
    for number in range(3):
        loss = loss_of(model, number)
        optimizer.zero_grad()
        loss.backward()
        loss_of(model, number + 9).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.long
@pytest.mark.parametrize("name", ["walk", pytest.param("resnet", marks=pytest.mark.long)])
@each_rank(2, 4, transport="auto")
def test_mini_trains_to_the_bits_of_the_engine_and_of_fsdp2(name: str) -> None:
    make, loss_of = MODELS[name]
    torch.manual_seed(0)
    small, ours, theirs = (copy.deepcopy(model) for model in [make()] * 3)
    blocks = mini.members(ours)
    fsdp2(theirs, mini.members(theirs))
    shard(ours, units=lambda _, module: module in blocks)
    losses = [losses_of(model, loss_of) for model in (mini.shard(small), ours, theirs)]
    if dist.get_world_size() == 2:  # of four, everybody adds up in an order of their own
        assert losses[0] == losses[1] == losses[2]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.long
@each_rank(2, transport="auto")
def test_mini_passes_the_rows_of_training() -> None:
    rows = ["A parameter used on one rank only", "A parameter used nowhere, in a unit that ran", "AdamW"]
    rows += ["Three micro-batches, each of them reduced", "Uneven and empty batches"]
    for name in rows:
        assert outcome(with_verbs(mini), ROWS[name]).verdict == "equal", name


OWN_MEMORY = """self.full = torch.zeros_like(self.full)
        self.whole = [self.full.as_strided(w.shape, w.stride(), w.storage_offset()) for w in self.whole]
        self.full.untyped_storage().resize_(0)"""
AT_ONCE = """dist.all_to_all_single(self.parts, input=self.sent)
        self.reducing = torch.futures.Future()
        self.reducing.set_result(None)"""
VARIANTS = {  # of `mini`, by what is replaced in its text: the rungs on which it does not stand
    "as it is": ("", "", [5]),
    "new memory for each gather": ("self.full.untyped_storage().resize_(0)", OWN_MEMORY, [2, 5]),
    "without prefetch": ("self.order[len(self.calls)].gather()", "pass", [3, 5]),
    "waiting for every reduction": ("self.reducing = unit", "self.reducing = unit and unit.finish()", [4, 5]),
    "synchronous": (
        "self.reducing = dist.all_to_all_single(self.parts, self.sent, async_op=True)",
        AT_ONCE,
        [4, 5],
    ),
    "kept after forward": ("unit.release()\n        self.watch", "pass\n        self.watch", [2]),
    "sums": ("parts[0] / self.world", "parts[0]", [1, 5]),
}


@pytest.mark.long
@pytest.mark.parametrize("name", VARIANTS)
@each_rank(2, transport="auto")
def test_the_ladder_tells_on_which_rung_a_variant_stands(name: str) -> None:
    old, new, missed = VARIANTS[name]
    text = inspect.getsource(mini)
    assert old in text
    module = types.ModuleType("mine")
    exec(text.replace(old, new) if old else text, vars(module))
    rungs = ladder.rungs(module)
    assert [rung[0] for rung, stands in rungs if not stands] == [str(rung) for rung in missed]
    assert ("where a replica has" in rungs[0][0]) == (1 in missed)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "expected the name of one module, such as mine; found none"),
        (["mine", "yours"], "expected the name of one module, such as mine; found mine yours"),
        (["./mine.py"], "./mine.py: expected the name of a module; say mine, in the folder of the file"),
        (["mimes"], "mimes: there is no module of this name; expected mimes.py in "),
        (["no.such"], "no.such: there is no module of this name"),
        (["-mine"], "-mine: there is no module of this name"),
        (["without"], "without: expected a function shard(model) in "),
        (["forgets"], "forgets.shard: expected to return the model, returned None"),
        (["another"], "another.shard: the model that it returns calls none of the four blocks"),
    ],
    ids=str,
)
def test_mistakes_on_the_ladder_are_one_line(
    words: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    (tmp_path / "without.py").write_text("def share(model): ...")
    (tmp_path / "forgets.py").write_text("def shard(model): ...")
    (tmp_path / "another.py").write_text("from torch import nn\ndef shard(model): return nn.Linear(7, 7)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("sys.argv", ["ladder", *words])
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        ladder.main()
    error = capfd.readouterr().err
    assert caught.value.code == 2
    assert error.startswith(text), error
    assert error.count("\n") == 1


def test_the_ladder_without_ranks_names_the_command(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit):
        ladder.module_of(["mini"])
    command = "torchrun --nproc-per-node 2 docs/course/ladder.py mini"
    assert capfd.readouterr().err == f"no ranks: {command}\n"


@each_rank(2)
def test_the_walk_prints_what_the_course_shows() -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        walk.walk()
    shown = re.search(r"```\n(At rest.*?)\n```", COURSE.read_text(), re.DOTALL)
    assert shown is not None
    assert printed.getvalue().strip() == (shown[1] if dist.get_rank() == 0 else "")
