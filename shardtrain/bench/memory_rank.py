"""One rank of one contender in a process of its own, watched from outside by ``memory``.

It says ``ready`` when everything is imported and the ranks have met, waits for a line, takes its steps and
answers with one line of JSON: losses and peak device memory, or why it failed.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardtrain.bench import contenders
from shardtrain.bench.cases import CASES, POOL, Case, build_data, build_model
from shardtrain.bench.contenders import PRECISIONS, Setup
from shardtrain.bench.group import process_group
from shardtrain.launch import Place, choose_device


@dataclass(frozen=True)
class Task:
    """What one contender is to do, as it travels on a command line."""

    contender: str
    model: str
    image_size: int
    batch_size: int
    precision: str
    accumulate: int
    optimizer: str
    lr: float
    seed: int
    steps: int
    device: str
    threads: int
    meeting: str  # where in the launcher's store the ranks of this contender meet

    @property
    def case(self) -> Case:
        return Case(self.model, CASES[self.model].build, self.image_size, self.batch_size)


def _train(task: Task, place: Place, device: torch.device) -> dict[str, object]:
    data = build_data(task.case, task.accumulate, task.seed, place.rank, device)
    model = build_model(task.case, task.seed, device)
    setup = Setup(task.optimizer, task.lr, PRECISIONS[task.precision], device)
    contender = contenders.build(task.contender, model, setup)
    del model
    losses = [contender.step(data[number % POOL]).item() for number in range(task.steps)]
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    dist.barrier()
    return {"losses": losses, "device_bytes": on_device}


def _answer(task: Task, place: Place, device: torch.device) -> dict[str, object]:
    try:
        return _train(task, place, device)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]}


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    warnings.simplefilter("ignore")
    place = Place.from_environment(os.environ)
    device = choose_device(task.device, place)
    torch.set_num_threads(task.threads)
    with process_group(place, device, task.meeting):
        dist.barrier()
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(_answer(task, place, device)), flush=True)
        sys.stdin.readline()  # stay, with everything mapped, until the others have answered


if __name__ == "__main__":
    main()
