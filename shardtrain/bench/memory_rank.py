"""One rank of one contender in a process of its own, looked at from outside by ``memory``.

Its command line is the benchmark's settings, with this contender alone and the number of threads.
It says ``ready`` when everything is imported and the ranks have met, waits for a line, takes its steps and
answers with one line of JSON: losses and peak device memory, or why it failed.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from omegaconf import OmegaConf

from shardtrain.bench import contenders
from shardtrain.bench.cases import POOL, build_data, build_model
from shardtrain.bench.group import process_group
from shardtrain.bench.settings import Settings
from shardtrain.checked import checked
from shardtrain.place import Place, choose_device

STEPS = 5  # the optimizer's state is there after the first; allocators settle in the next


def meeting_of(contender: str) -> str:
    """Where in the launcher's store the ranks of a contender meet."""
    return f"shardtrain/bench/memory/{contender}"


def _train(settings: Settings, contender: str, place: Place, device: torch.device) -> dict[str, object]:
    case = settings.case(settings.model)
    data = build_data(case, settings.accumulate, settings.seed, place.rank, device)
    trained = contenders.build(contender, build_model(case, settings.seed, device), settings.setup(device))
    losses = [trained.step(data[number % POOL]).item() for number in range(STEPS)]
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    dist.barrier()
    return {"losses": losses, "device_bytes": on_device}


def _answer(settings: Settings, contender: str, place: Place, device: torch.device) -> dict[str, object]:
    try:
        return _train(settings, contender, place, device)
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]}


def main() -> None:
    settings = checked(OmegaConf.create(json.loads(sys.argv[1])), Settings)
    (contender,) = settings.chosen
    warnings.simplefilter("ignore")
    place = Place.from_environment(os.environ)
    device = choose_device(settings.device, place)
    assert settings.threads is not None
    torch.set_num_threads(settings.threads)
    with process_group(place, device, meeting_of(contender)):
        dist.barrier()
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(_answer(settings, contender, place, device)), flush=True)
        sys.stdin.readline()  # stay, with everything mapped, until the others have answered


if __name__ == "__main__":
    main()
