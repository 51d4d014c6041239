"""Steps, hooks, and trainers of a user's own model and data: what they compute, resume and refuse."""

import contextlib
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

import shardtrain.evaluate.__main__ as evaluating
import shardtrain.export.__main__ as exporting
import shardtrain.predict.__main__ as predicting
from shardtrain import comm
from shardtrain.config.errors import UserError
from shardtrain.data import sets
from shardtrain.job.build import build
from shardtrain.job.evaluation import Evaluation
from shardtrain.launch import launcher
from shardtrain.train import Hook, Trainer
from shardtrain.train.loop import train
from shardtrain.train.steps import BaseTrainer

import tiny
from pool import each_rank
from small import raised_soon
from tiny import CPU, composed, context, files_of, refused, result_of

QUIET = ("data.limit=48", "train.log_every=1", "monitor.writers=[]", "checkpoint.keep=0")
TWO_STEPS = (*QUIET, "train.max_steps=2")
CALLS: list[tuple[str, int]] = []


def run(folder: Path, hook: str, *arguments: str) -> dict[str, Any]:
    return tiny.run(
        str(folder), *QUIET, f"allow=[{__name__}]", f"train.hooks=[{__name__}.{hook}]", *arguments
    )


class Noting(Hook):
    def before_fit(self, trainer: BaseTrainer) -> None:
        CALLS.append(("begin", trainer.job.first_step))

    def after_step(self, trainer: BaseTrainer, step: int, finite: bool) -> None:
        assert finite
        assert all(param.grad is not None for param in trainer.model.parameters())
        assert trainer.monitor.scalars["grad_norm"] == trainer.norm.item()
        CALLS.append(("step", step))

    def after_evaluation(self, trainer: BaseTrainer, step: int, evaluation: Evaluation) -> None:
        assert trainer.monitor.scalars["loss/val"] == evaluation.scores.loss
        CALLS.append(("evaluation", step))

    def before_save(self, trainer: BaseTrainer, step: int) -> None:
        CALLS.append(("save", step))

    def at_end(self, trainer: BaseTrainer) -> None:
        CALLS.append(("end", comm.world_size()))


@each_rank(2, transport="auto")
def test_hooks_are_called_after_each_step_and_evaluation_on_every_rank(tmp_path: Path) -> None:
    CALLS.clear()
    result = run(tmp_path, "Noting", "train.max_steps=2", "checkpoint.keep=1")
    assert result["status"] == "finished"
    assert CALLS == [("begin", 0), ("step", 1), ("step", 2), ("evaluation", 2), ("save", 2), ("end", 2)]


class Lonely(Hook):
    def after_step(self, trainer: BaseTrainer, step: int, finite: bool) -> None:
        if trainer.rank == 0:  # as many bytes as the trainer itself sums next
            comm.all_reduce(torch.ones(4))


@each_rank(2, transport="auto")
def test_a_collective_that_a_hook_calls_on_one_rank_alone_is_named(tmp_path: Path) -> None:
    comm.guard_world()
    told = raised_soon(comm.Diverged, lambda: run(tmp_path, "Lonely", "train.max_steps=4"))
    assert "rank 0 is all-reducing 16 bytes (sum of float32), rank 1 is all-reducing 16 bytes (max" in told


def start(read: Any, job: Any) -> Any:
    """Do what the launcher does, on the ranks of this group."""
    return job(read([], True), context(".").rank_info, CPU)


def fit(trainer: Trainer) -> float | None:
    with patch.object(launcher, "start", start):
        return trainer.fit()


def linear(width: int = 5) -> nn.Module:
    torch.manual_seed(comm.rank())  # rank 0's values count
    return nn.Linear(3, width)


def points(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.randn(count, 3, generator=generator), torch.randint(5, (count,), generator=generator)
    )


class Sometimes(Trainer):
    """Targets of class 0 do not count in the loss."""

    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        counts = targets > 0
        return F.cross_entropy(outputs[counts], targets[counts], reduction="sum"), counts.sum()

    def score(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        right = outputs.argmax(1) == targets
        return {"far": (outputs.argmax(1) - targets).abs(), "acc1": 100.0 * right}

    score.higher_is_better = False  # type: ignore[attr-defined]


def words(folder: Path, *more: str) -> str:
    quiet = ["monitor.writers=[]", "train.log_every=1", "train.batch_size=12", "optim.weight_decay=0"]
    return " ".join([f"run.dir={folder}", *quiet, *more])


PLAIN = ("optim.momentum=0", "optim.nesterov=false", "optim.lr=0.5", "train.epochs=1")


@pytest.mark.parametrize("split", ["", "train.accumulate=3", "parallel.virtual_ranks=4"])
@each_rank(2, transport="auto")
def test_losses_and_scores_are_means_over_all_targets_that_count(split: str, tmp_path: Path) -> None:
    """Of 12 items on two ranks, in up to six parts of different weights; and of 7, or 3 on four ranks."""
    train_set = points(12)
    val_set = points(3 if "virtual" in split else 7, seed=1)
    keys = words(tmp_path, *PLAIN, "train.best=far/val", split)
    best = fit(Sometimes(linear(), train_set, val_set, keys))
    torch.manual_seed(0)
    plain = nn.Linear(3, 5)
    inputs, targets = train_set.tensors
    expected = F.cross_entropy(plain(inputs), targets, ignore_index=0)
    expected.backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    result = result_of(tmp_path)
    assert result["loss/train"] == pytest.approx(expected.item())
    assert result["grad_norm"] == pytest.approx(norm.item())
    torch.optim.SGD(plain.parameters(), result["lr/group0"]).step()
    inputs, targets = val_set.tensors
    with torch.no_grad():
        outputs = plain(inputs)
    assert result["loss/val"] == pytest.approx(F.cross_entropy(outputs, targets, ignore_index=0).item())
    distance = (outputs.argmax(1) - targets).abs().float()
    assert result["far/val"] == pytest.approx(distance.mean().item())
    assert result["acc1/val"] == pytest.approx(100 * (distance == 0).float().mean().item())
    assert (result["best_is_lowest"], best) == (True, result["far/val"])


class Words:
    """A data set of sentences of two words of four; what is drawn from them is another one each time."""

    targets = torch.arange(48).view(24, 2)

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return torch.randint(7, (2, 4)), self.targets[index] % 7


class Reader(nn.Module):
    """[batch, 2, 4] to [batch, 7, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 9)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(9, 7)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.embedding(words).mean(2)))
        return logits.transpose(1, 2)


@each_rank(2, transport="auto")
def test_a_run_of_ones_own_resumes_to_the_same_bits(tmp_path: Path) -> None:
    folders = tmp_path / "whole", tmp_path / "parts"
    for folder, lasts in zip(folders, ([4], [2, 4]), strict=True):
        for last in lasts:
            torch.manual_seed(comm.rank())  # rank 0's values count
            keys = words(folder, "ema.decay=0.9", f"train.max_steps={last}", "sched=constant")
            fit(Trainer(Reader(), Words(), Words(), keys))
    assert "continuing after step 2 of 4" in (folders[1] / "log.txt").read_text()
    whole, parts = (files_of(folder / "checkpoints/step-00000004") for folder in folders)
    assert whole == parts
    scores = [result_of(folder)["acc1/val_ema"] for folder in folders]
    assert scores[0] == scores[1]


class Uncounted(Trainer):
    def loss(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, int]:
        return super().loss(outputs, targets)[0], 0


@each_rank(1)
def test_what_a_trainer_cannot_train(tmp_path: Path) -> None:
    trainer = Trainer(linear(), points(12), points(4), words(tmp_path / "a", "train.max_steps=1"))
    fit(trainer)
    with pytest.raises(UserError, match=r"^Trainer.fit: the model is trained already; make another Trainer"):
        fit(trainer)
    with pytest.raises(
        UserError, match=r"^Trainer.loss: what divides the sum is 0.0 in step 1, expected > 0"
    ):
        fit(Uncounted(linear(), points(12), points(4), words(tmp_path / "b", *PLAIN)))
    command = composed("+recipe=resnet", "model=resnet20", f"resume={tmp_path}/a", "monitor.writers=[]")
    with pytest.raises(UserError, match=r"^resume: .*step-00000001: a program has given the model and the d"):
        train(command, context(tmp_path / "c"))


class Renamed(Reader):
    pass


class Fewer(Words):
    def __len__(self) -> int:
        return 23


class Others(Words):
    targets = torch.arange(48).flip(0).view(24, 2)


@each_rank(1)
def test_other_data_do_not_resume_a_run(tmp_path: Path) -> None:
    keys = words(tmp_path, "train.max_steps=1")
    fit(Trainer(Reader(), Words(), Words(), keys))
    for model, data, told in (
        (Reader(), Fewer(), "images=24, this one has 23"),
        (Reader(), Others(), "train labels .their digest.=24 items"),
        (Renamed(), Words(), "the run has model=Reader, this one has Renamed"),
    ):
        with pytest.raises(UserError, match=told):
            fit(Trainer(model, data, Words(), keys))
    for other in (Fewer(), Others()):
        fit(Trainer(Reader(), Words(), other, keys))
        told = rf"validation data have changed \(val labels .* items, .*, this one has {len(other)} items"
        assert re.search(told, (tmp_path / "log.txt").read_text())
    run = f"run={tmp_path}"
    told = rf"^{run}: a program has given the model and the data to shardtrain.train.Trainer; there, a hook"
    where = context(".").rank_info, CPU
    with pytest.raises(UserError, match=told):
        evaluating.score(evaluating.read([run]), *where)
    with pytest.raises(UserError, match=told):
        exporting.export(exporting.read([run, "out=a.pth"], True), *where)
    with pytest.raises(UserError, match=told):
        predicting.predict(predicting.read([run, "out=a.csv", "data.root=."], True), *where)
    config = composed(f"config={tmp_path}/config.yaml")
    with pytest.raises(UserError, match=r"^data._target_=shardtrain.train.Trainer: a program has given"):
        sets.load(config.data)


class Plain:
    """A hook that is of no class of shardtrain's, and ends the run."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def after_step(self, trainer: Trainer, step: int, finite: bool) -> None:
        self.calls.append((type(trainer), step))
        trainer.end = "enough" if step == 2 else ""

    def at_end(self, trainer: Trainer) -> None:
        self.calls.append("end")


@each_rank(1)
def test_any_object_with_a_method_for_steps_is_a_hook_and_may_end_the_run(tmp_path: Path) -> None:
    hook = Plain()
    keys = words(tmp_path, "train.epochs=9", "checkpoint.keep=0")
    fit(Sometimes(linear(), points(24), points(4), keys, hooks=[hook]))
    assert hook.calls == [(Sometimes, 1), (Sometimes, 2), "end"]
    assert result_of(tmp_path)["status"] == "finished"
    assert "stopped after step 2: enough" in (tmp_path / "log.txt").read_text()
    with pytest.raises(UserError, match=r"^hooks: Linear has no method after_step"):
        Trainer(linear(), points(2), points(2), hooks=[linear()])


@pytest.mark.parametrize(
    ("code", "launched", "stays"), [(0, True, False), (2, False, False), (2, True, True)]
)
@each_rank(1)
def test_signals_are_handled_after_a_run_as_before_it(code: int, launched: bool, stays: bool) -> None:
    """But not where a launcher's rank ends with an error, since launchers repeat signals."""

    def start(*_: object) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if code:
            sys.exit(code)

    before = signal.getsignal(signal.SIGUSR1)
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv("RANK", raising=False)
        if launched:
            patched.setenv("RANK", "7")
        patched.setattr(launcher, "start", start)
        with contextlib.suppress(SystemExit):
            Trainer(linear(), points(2), points(2)).fit()
    assert signal.signal(signal.SIGUSR1, before) == (signal.SIG_IGN if stays else before)


@each_rank(1)
def test_other_parts_of_the_data_do_not_resume_a_run(tmp_path: Path) -> None:
    """As `random_split` returns, of other seeds; and a part of a part."""
    keys = words(tmp_path, "train.max_steps=1")
    whole = points(48)
    fit(Trainer(linear(), Subset(Subset(whole, range(24, 48)), range(12)), points(4), keys))
    for inner, outer in ((range(24), range(12)), (range(24, 48), range(12, 24))):
        with pytest.raises(UserError, match=r"train labels .their digest.=12 items"):
            fit(Trainer(linear(), Subset(Subset(whole, inner), outer), points(4), keys))


@pytest.mark.parametrize(
    ("train", "val", "told"),
    [
        ((24, 1), (12, 0), "training set differs between ranks: rank 1 has 24 items"),
        ((25, 0), (12, 0), "training set differs between ranks: rank 1 has 25 items"),
        ((24, 0), (12, 1), "validation set differs between ranks: rank 1 has 12 items"),
    ],
)
@each_rank(2)
def test_data_that_differ_between_ranks_are_refused_on_all(
    train: tuple[int, int], val: tuple[int, int], told: str, tmp_path: Path
) -> None:
    sets = [points(*(part if comm.rank() else usual)) for part, usual in ((train, (24, 0)), (val, (12, 0)))]
    said = refused(lambda: fit(Trainer(linear(), *sets, words(tmp_path))))
    assert f"Trainer: the {told}" in said
    assert "make it alike on all" in said


class Parts(nn.Module):
    """A model whose outputs have parts that are no tensors, or that have no row of each item."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 5)

    def forward(self, inputs: Tensor) -> Any:
        logits = self.linear(inputs)
        return {"logits": logits, "kind": 7, "bias": torch.ones(5), "none": None, "mean": inputs.mean()}


class OfParts(Trainer):
    def loss(self, outputs: Any, targets: Tensor) -> Any:
        return super().loss(outputs["logits"], targets)

    def score(self, outputs: Any, targets: Tensor) -> Any:
        assert (outputs["kind"], outputs["none"], outputs["bias"].shape) == (7, None, (5,))
        return {"right": (outputs["logits"].argmax(1) == targets).numpy(), "one": [1.0] * len(targets)}


@each_rank(2)
def test_parts_of_outputs_that_are_no_rows_stay_whole(tmp_path: Path) -> None:
    """In the second batch of four, rank 1 has one item fewer."""
    keys = words(tmp_path, "train.max_steps=1", "train.best=one/val")
    assert fit(OfParts(Parts(), points(24), points(23), keys)) == 1.0


class Given(Trainer):
    """A trainer whose loss is what its class has been given."""

    given: Any = None

    def loss(self, outputs: Tensor, targets: Tensor) -> Any:
        return self.given(outputs, targets)


class Scored(Trainer):
    """A trainer whose score is what its class has been given."""

    given: Any = None

    def score(self, outputs: Tensor, targets: Tensor) -> Any:
        return self.given(outputs, targets)


def items(*parts: Any) -> list[Any]:
    return [(torch.zeros(3), 1)] * 12 + [*parts]


def squares(outputs: Tensor, targets: Tensor) -> Any:
    return (outputs - targets).square().sum(), targets.numel()


REAL = [(torch.zeros(3), torch.zeros(5))] * 12
WORDS = """
model=resnet50 | model=resnet50: a Trainer's model, data and scores are its own; leave the word out
data.image_size=8 | data.image_size=8: a Trainer's model, data and scores are its own; leave the word out
augment=photo | augment=photo: a Trainer's model, data and scores are its own; leave the word out
monitor.scores=[] | monitor.scores=[]: a Trainer's model, data and scores are its own; leave the word out
train.mixup=0.2 | train.mixup=0.2: a Trainer's model and data are its own; say
+recipe=resnet50_imagenet_v2 | own; say data.repeats=1
debug=overfit | data.limit=12: a Trainer's model and data are its own; say data.limit=null
train.best=recall/val | train.best=recall/val: no such score
run.name='a | run.name='a": No closing quotation; close the quotation mark
"""
DATA: list[tuple[Any, str]] = [
    ({}, "the training set is a dict, expected a data set with items[i]"),
    ([], "the training set is empty"),
    ([3], "the training set: item 0 is a int, expected (input, target)"),
    (items((torch.zeros(4), 1)), "item 12 is float32 [4] and int64 [], the"),
    (items((torch.zeros(3), "a")), "training set: item 12: "),
    (REAL, "targets are torch.float32, cross entropy needs int64: override Trainer.loss"),
]
RETURNED: list[tuple[Any, Any, str]] = [
    (Given, F.cross_entropy, "Trainer.loss returned a Tensor, expected two numbers: sum, and"),
    (Given, lambda *_: (torch.zeros(2), 2), "Trainer.loss returned a pair of tensors [2] and []"),
    (Given, lambda y, _: (y.sum(), None), "Trainer.loss: Could not infer dtype of NoneType; expected"),
    (Given, lambda y, _: (y.sum(), -1), "what divides the sum is -1.0 of all targets, expected > 0"),
    (Given, squares, "train.best=acc1/val: no such score (valid: loss/val)"),
    (Scored, lambda y, _: {"a": y.mean()}, "Trainer.score: a is a tensor [] of targets [2], expected"),
    (Scored, lambda y, right: {"a": y[:, :1] - right}, "a is a tensor [2, 2] of targets [2], expected"),
    (Scored, lambda *_: None, "Trainer.score returned a NoneType, expected tensors by name"),
    (Scored, lambda *_: {"a": None}, "Trainer.score: a: Could not infer dtype of NoneType; expected num"),
]


@each_rank(1)
def test_mistakes_of_a_trainer_are_named(tmp_path: Path) -> None:
    def require_told(told: str, kind: Any, data: Any, word: str = "seed=0") -> None:
        val = data[:12] if len(data) >= 12 else items()
        size = f"train.batch_size={max(12, len(data))}"
        said = refused(
            lambda: fit(kind(linear(), data, val, words(tmp_path, "checkpoint.keep=0", size, word)))
        )
        assert told in said
        assert "\n" not in said

    for line in WORDS.strip("\n").splitlines():
        word, _, told = line.partition(" | ")
        require_told(told, Trainer, items(), word)
    for data, told in DATA:
        require_told(told, Trainer, data)
    for kind, given, told in RETURNED:
        with patch.object(kind, "given", staticmethod(given)):
            require_told(told, kind, REAL if given is squares else items())


@each_rank(2, transport="auto")
def test_an_optimizer_that_is_refused_in_its_first_step_is_a_mistake(tmp_path: Path) -> None:
    told = r"^optim\._target_=torch\.optim.*\.Adafactor: Adafactor cannot step on a sharded model: "
    with pytest.raises(UserError, match=told):
        tiny.run(str(tmp_path), *TWO_STEPS, "optim._target_=torch.optim.Adafactor")


@pytest.mark.smoke
def test_repetitions_are_exact_and_settings_count(tmp_path: Path) -> None:
    """A seed changes much, bf16 little, and activations that are computed again change nothing."""
    again = "parallel.activation_checkpoint=true"
    bf16 = "parallel.precision=bf16"
    settings = ("seed=0", "seed=0", again, "seed=1", bf16)
    results = [tiny.run(str(tmp_path / str(n)), *TWO_STEPS, setting) for n, setting in enumerate(settings)]
    tags = ("loss/train", "loss/val", "grad_norm")
    first, second, recomputed, other, rounded = ([result[tag] for tag in tags] for result in results)
    assert first == second == recomputed
    assert first != other
    assert rounded[0] == pytest.approx(first[0], rel=0.05)
    assert rounded[0] != first[0]


@pytest.mark.long
def test_compiling_without_a_compiler_is_a_mistake() -> None:
    # Not a monkeypatch, whose end these settings do not survive.
    missing = inductor.patch({"cpp.cxx": ("no-such-compiler",)})
    with missing, pytest.raises(UserError, match=r"needs a C\+\+ compiler, and there is none: install g\+\+"):
        build(tiny.configure(*tiny.SHORT, "parallel.compile=true"), 0, 1, CPU)


@pytest.mark.long
def test_channels_last_reaches_the_activations() -> None:
    job, _ = build(tiny.configure(*tiny.SHORT, "train.channels_last=true"), 0, 1, CPU)
    seen: list[bool] = []
    job.model.layer2.register_forward_hook(
        lambda module, inputs, output: seen.append(output.is_contiguous(memory_format=torch.channels_last))
    )
    job.model(next(iter(job.train)).images)
    assert seen == [True]
