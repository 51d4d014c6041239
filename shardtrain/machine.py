"""What a number depends on: hardware and versions."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

from shardtrain.text import counted


def cores() -> int:
    """Of this host, those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_of(device: torch.device) -> int:
    """Bytes of a GPU's memory, or of this host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def hardware(device: torch.device, ranks: int, ranks_per_host: int) -> dict[str, str | int]:
    found: dict[str, str | int] = {
        "cpu": _cpu_name(),
        "cores": cores(),
        "ranks": ranks,
        "ranks_per_host": ranks_per_host,
        "threads_per_rank": torch.get_num_threads(),
        "device": device.type,
        "backend": "nccl" if device.type == "cuda" else "gloo",
        "memory_gib": round(memory_of(torch.device("cpu")) / 2**30),
    }
    if device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(device)
    return found


def versions(*packages: str) -> dict[str, str]:
    """Of Python, torch, torchvision, CUDA and further ``packages``."""
    found = {name: version(name) for name in ("torch", "torchvision", *packages)}
    return {"python": platform.python_version(), **found, "cuda": str(torch.version.cuda)}


def in_words(hardware: dict[str, str | int], versions: dict[str, str]) -> str:
    """One line for the table."""
    where = f"{hardware['cpu']}, {hardware['cores']} cores"
    if "gpu" in hardware:
        where += f", {hardware['gpu']}"
    ranks = counted(int(hardware["ranks"]), "rank")
    threads = counted(int(hardware["threads_per_rank"]), "thread")
    software = f"torch {versions['torch']}, python {versions['python']}"
    return f"{where}; {ranks} × {threads}, {hardware['backend']}; {software}"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
