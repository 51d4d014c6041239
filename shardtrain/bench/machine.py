"""What a number depends on: hardware and versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from shardtrain.launch import Place


def hardware(place: Place, device: torch.device) -> dict[str, str | int]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": cores,
        "ranks": place.world_size,
        "ranks_per_host": place.local_world_size,
        "threads_per_rank": torch.get_num_threads(),
        "device": device.type,
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "memory_gib": _memory_gib(),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("torch", "torchvision")}
    return {"python": platform.python_version(), **packages, "cuda": str(torch.version.cuda)}


def in_words(hardware: dict[str, str | int], versions: dict[str, str]) -> str:
    """One line for the table."""
    where = f"{hardware['cpu']}, {hardware['cores']} cores"
    if "gpu" in hardware:
        where += f", {hardware['gpu']}"
    ranks = _count(hardware["ranks"], "rank")
    threads = _count(hardware["threads_per_rank"], "thread")
    software = f"torch {versions['torch']}, python {versions['python']}"
    return f"{where}; {ranks} × {threads}, {hardware['backend']}; {software}"


def _count(number: str | int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _memory_gib() -> int:
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
