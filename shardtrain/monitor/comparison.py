"""The plan of a run beside what the run measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardtrain.build import Job
from shardtrain.config import Config
from shardtrain.monitor.sink import Sink
from shardtrain.plan.run import plan_of
from shardtrain.plan.simulate import Plan
from shardtrain.text import MIB, aligned


class Row(NamedTuple):
    """One line of the comparison. ``exact``: the plan promises every byte."""

    name: str
    planned: int
    measured: float
    exact: bool

    @property
    def verdict(self) -> str:
        if self.measured == self.planned:
            return "exact"
        difference = f"{100 * (self.measured - self.planned) / max(self.planned, 1):+.1f} %"
        return f"{difference}, which should be exact" if self.exact else difference


# What the last report of a run holds in MiB, and what the plan says of it in bytes.
STATE = {
    "parameters": "memory/params_mib",
    "gradients": "memory/grads_mib",
    "optimizer": "memory/optimizer_mib",
}
TRAFFIC = {
    "all_gather": "comm/all_gather_mib_per_step",
    "reduce_scatter": "comm/reduce_scatter_mib_per_step",
    "all_reduce": "comm/all_reduce_mib_per_step",
}


def compare(plan: Plan, scalars: Mapping[str, float], *, on_cuda: bool, scaled: bool) -> list[Row]:
    """Plan and measurement of rank 0. On CUDA the allocator knows the peak; on the CPU nobody does.

    ``scaled``: the loss was, so the ranks have told one another of overflows, in a few more bytes each time.
    """
    rows = [Row(name, getattr(plan, name), scalars[tag] * MIB, True) for name, tag in STATE.items()]
    rows.append(Row("gathered at once", plan.gathered, scalars["memory/gathered_peak_mib"] * MIB, True))
    names = ["gathers send", "reductions send", *(["averages send"] if plan.question.replicate > 1 else [])]
    for name, (kind, tag) in zip(names, TRAFFIC.items(), strict=False):
        exact = not (scaled and kind == "all_reduce")
        rows.append(Row(name, plan.sent.get(kind, 0), scalars[tag] * MIB, exact))
    if on_cuda:
        rows.append(Row("peak", plan.peak, scalars["memory/peak_mib"] * MIB, False))
    return rows


def comparison(rows: Sequence[Row]) -> str:
    """The rows as text."""
    cells = [["MiB, rank 0", "planned", "measured", ""]]
    for row in rows:
        cells.append([row.name, f"{row.planned / MIB:,.2f}", f"{row.measured / MIB:,.2f}", row.verdict])
    return "\n".join(aligned(cells))


class Comparison(Sink):
    """Tells at the end of a run how far plan and measurement are apart. To plan takes a second or two."""

    def __init__(self, config: Config, job: Job, speaker: Sink) -> None:
        self.config, self.job, self.speaker = config, job, speaker
        self.scalars: dict[str, float] = {}

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self.scalars.update(scalars)

    def close(self, status: str) -> None:
        if status != "finished" or "memory/params_mib" not in self.scalars:
            return
        on_cuda, scaled = self.job.device.type == "cuda", self.job.scaler.is_enabled()
        try:
            plan = plan_of(self.config, self.job, rank=0)
            text = comparison(compare(plan, self.scalars, on_cuda=on_cuda, scaled=scaled))
        except Exception as error:  # the model needs values, say; the run has done well all the same
            text = f"no plan to compare with: {type(error).__name__}: {error}".split("\n", 1)[0]
        self.speaker.say(text)
