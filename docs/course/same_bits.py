"""Train one model on several numbers of ranks, and draw the loss curves and their differences.

    python docs/course/same_bits.py [FOLDER]

Every wrapper gets the same micro-batches in the same order, four per step: what it may change is the order in
which gradients are summed. shardtrain's runs must be equal bit for bit, the killed one and that on two hosts
included (simulated ones, by a variable). Those of DDP and FSDP2 show what rounding becomes in training.
It takes six minutes on two busy cores, and writes a JSON file per run and ``same_bits.png``.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torchvision.models.resnet import BasicBlock, ResNet

import shardtrain
from shardtrain.launch.launcher import close_process_group

# Micro-batches per step, steps, and images per step.
VIRTUAL = 4
STEPS = 60
BATCH = 64
# Steps after which the killed run saves, and ends.
SAVED = 20
KILLED = 25
# Wrapper, and for each run its name and the ranks of the processes that compute it, one after the other.
RUNS = {
    "shardtrain": {
        "1 rank": [1],
        "2 ranks": [2],
        "4 ranks": [4],
        "2 hosts × 2": [4],
        "killed, 4 → 2": [4, 2],
    },
    "DDP": {"1 rank": [1], "2 ranks": [2], "4 ranks": [4]},
    "FSDP2": {"1 rank": [1], "2 ranks": [2], "4 ranks": [4]},
}


def micro_batch(images: Tensor, labels: Tensor, step: int, number: int) -> tuple[Tensor, Tensor]:
    """Return images [BATCH / VIRTUAL, 1, 8, 8] and labels of one micro-batch."""
    size = BATCH // VIRTUAL
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(step))
    rows = order[number * size : (number + 1) * size]
    return images[rows], labels[rows]


def work(wrapper: str, run: str, folder: Path) -> None:
    """Train as one rank; rank 0 writes the mean loss of each step, and the digest of the weights."""
    rank = int(os.environ["RANK"])
    world = int(os.environ["WORLD_SIZE"])
    if "hosts" in run:
        os.environ["SHARDTRAIN_HOST_KEY"] = f"host {2 * rank // world}"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    packed = importlib.resources.files("shardtrain.data").joinpath("digits.npz")
    with packed.open("rb") as file:
        arrays = np.load(file)
        images = torch.from_numpy(arrays["train_images"]).float().view(-1, 1, 8, 8) / 8 - 1
        labels = torch.from_numpy(arrays["train_labels"]).long().flatten()
    model: nn.Module = ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)
    model.conv1 = nn.Conv2d(1, 64, 3, padding=1, bias=False)
    if wrapper == "shardtrain":
        shardtrain.shard(model, virtual_ranks=VIRTUAL)
    elif wrapper == "FSDP2":
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    saved = folder / "saved"
    first = 0
    losses = torch.zeros(STEPS, VIRTUAL)
    if saved.exists() and "killed" in run:
        extra = shardtrain.checkpoint.load(saved, model, optimizer)
        first = extra["step"]
        losses.copy_(extra["losses"])
    own = range(rank * VIRTUAL // world, (rank + 1) * VIRTUAL // world)
    for step in range(first, STEPS):
        for number in own:
            last = number == own[-1]
            inside: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
            if wrapper == "shardtrain":
                inside = shardtrain.virtual_rank(model, number, seed=0, step=step)
            elif wrapper == "FSDP2":
                model.set_requires_gradient_sync(last)  # type: ignore[operator]
            elif not last:
                inside = model.no_sync()  # type: ignore[operator]
            with inside:
                x, y = micro_batch(images, labels, step, number)
                loss = F.cross_entropy(model(x), y)
                (loss if wrapper == "shardtrain" else loss / len(own)).backward()
            losses[step, number] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(losses[step])  # beside zeros: exact
        if "killed" in run and world == 4 and step + 1 in (SAVED, KILLED):
            if step + 1 == KILLED:
                os._exit(0)
            extra = {"step": SAVED, "losses": losses}
            shardtrain.checkpoint.save(saved, model, optimizer, extra=extra)
    state = shardtrain.full_state_dict(model) if wrapper == "shardtrain" else {}
    if rank == 0:
        digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in state.values())).hexdigest()
        result = {"losses": losses.mean(1).tolist(), "weights": digest}
        (folder / f"{wrapper}, {run}.json").write_text(json.dumps(result))


def draw(figure: Any, curves: dict[str, dict[str, list[float]]]) -> None:
    """Draw all curves, and below them how far each wrapper's runs are from its run on one rank."""
    above, below = figure.subplots(2, 1, sharex=True)
    steps = range(1, STEPS + 1)
    for run, losses in curves["shardtrain"].items():
        above.plot(steps, losses, label=run, linewidth=1.2)
    above.set(ylabel="training loss", title="shardtrain: one curve on any number of ranks")
    above.legend(title="shardtrain, drawn on top of each other", fontsize="small")
    for wrapper, colour, width in (("DDP", "tab:orange", 3), ("FSDP2", "tab:red", 1.2)):
        for run, style in (("2 ranks", "-"), ("4 ranks", "--")):
            pairs = zip(curves[wrapper][run], curves[wrapper]["1 rank"], strict=True)
            gaps = [abs(a - b) or None for a, b in pairs]
            below.plot(steps, gaps, style, color=colour, label=f"{wrapper}, {run}", linewidth=width)
    below.set_yscale("log")
    below.axhline(1e-9, color="tab:blue", label="shardtrain, all runs: exactly 0")
    below.set(xlabel="step", ylabel="difference from one rank")
    below.legend(fontsize="small")


def main(folder: Path) -> None:
    """Compute all runs, and compare and draw them."""
    folder.mkdir(parents=True, exist_ok=True)
    curves: dict[str, dict[str, list[float]]] = {}
    digests = set()
    for wrapper, runs in RUNS.items():
        for run, worlds in runs.items():
            print(f"{wrapper}, {run}", flush=True)
            for world in worlds:
                launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world)]
                worker = [__file__, "--work", wrapper, run, str(folder)]
                subprocess.run([*launcher, *worker], check=True)
            result = json.loads((folder / f"{wrapper}, {run}.json").read_text())
            curves.setdefault(wrapper, {})[run] = result["losses"]
            digests |= {result["weights"]} if wrapper == "shardtrain" else set()
    equal = len(digests) == 1 and len({str(losses) for losses in curves["shardtrain"].values()}) == 1
    for wrapper, by_run in curves.items():
        alone = by_run["1 rank"]
        gaps = [0.0]
        for losses in by_run.values():
            gaps += [abs(a - b) for a, b in zip(losses, alone, strict=True)]
        print(f"{wrapper}: losses differ between runs by at most {max(gaps):.3g}")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print('no picture: matplotlib is not installed (pip install "shardtrain[pictures]")')
    else:
        figure = Figure(figsize=(8, 5.5), dpi=150, layout="constrained")
        draw(figure, curves)
        figure.savefig(folder / "same_bits.png")
    print(f"written to {folder}; shardtrain's losses and weights are {'equal' if equal else 'NOT equal'}")
    sys.exit(not equal)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        close_process_group()  # the model, which holds the group, is gone: else a rank may abort
    else:
        main(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/same_bits"))
