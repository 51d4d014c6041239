"""Judge wrappers: ``torchrun --nproc-per-node 2 -m shardtrain.judge wrapper=PACKAGE.FUNCTION``.

Each row runs in fresh processes, since some hang and some end the process. Rank 0 starts them and writes the
table; the other ranks only say how many there are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch

from shardtrain.job import launch
from shardtrain.job.dist_env import RankInfo, together
from shardtrain.job.errors import UserError
from shardtrain.job.hydra_app import compose
from shardtrain.job.schema import above, checked
from shardtrain.judge.ranks import Trial, find, load
from shardtrain.judge.rows import FAULTS, HONEST, ROWS, Outcome
from shardtrain.plan.report import Output

ALONE = ("Memory", "Failures")  # what a fault is not tried on: slow, or with time-outs
LONGEST = 150  # characters of a table's cell
TITLES = {
    "wrong": "**wrong**: {}",
    "hangs": "**hangs** ({})",
    "ends": "**ends the process** ({})",
    "equal": "equal",
}


@dataclass(frozen=True)
class Settings:
    """`config.yaml` explains every key."""

    wrapper: tuple[str, ...]
    mutants: bool
    rows: tuple[str, ...]
    only: str
    out: str | None
    limit_s: float = above(0)
    device: str = "cpu"
    threads: int = 1


def read(arguments: Sequence[str], speak: bool) -> Settings | None:
    """Return the settings of ``arguments``; None if a flag asks for output."""
    raw = compose(arguments, speak=speak, folder=Path(__file__).parent / "configs")
    if raw is None:
        return None
    for key in ("wrapper", "rows"):
        raw[key] = [raw[key]] if isinstance(raw[key], str) else raw[key]
    return checked(raw, Settings)


def cell(found: Outcome) -> str:
    text = found.text.replace("|", "\\|")
    text = text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
    return TITLES.get(found.verdict, f"{found.verdict}: {{}}").format(text)


def table(columns: Sequence[str], found: dict[str, dict[str, Outcome]]) -> Iterator[str]:
    """Yield the lines of a table for each kind of rows."""
    kind = ""
    for name, outcomes in found.items():
        if ROWS[name].kind != kind:
            kind = ROWS[name].kind
            yield from ("", f"## {kind}", "", f"| behaviour | {' | '.join(columns)} |")
            yield f"| --- |{' --- |' * len(columns)}"
        yield f"| {name} | {' | '.join(cell(outcomes[each]) for each in columns)} |"


def judge(settings: Settings, trial: Trial) -> tuple[str, dict[str, dict[str, Outcome]]]:
    """Try every row with every wrapper; return the table, and the outcomes by row and wrapper."""
    chosen = [name for name in ROWS if re.search(settings.only, name)]
    found: dict[str, dict[str, Outcome]] = {}
    for row in chosen:
        found[row] = {name: trial(name, row)[row] for name in settings.wrapper}
        print(f"{row}: " + ", ".join(each.verdict for each in found[row].values()), file=sys.stderr)
    return "\n".join(table(settings.wrapper, found)), found


def try_mutants(settings: Settings, trial: Trial) -> tuple[str, dict[str, dict[str, Outcome]]]:
    """Find for every fault a row that catches it: in which the honest wrapper is equal, and it is not."""
    chosen = [name for name in ROWS if re.search(settings.only, name) and ROWS[name].kind not in ALONE]
    found = {HONEST: trial(HONEST, *chosen)}
    honest = [row for row, each in found[HONEST].items() if each.verdict == "equal"]
    lines = [f"{len(honest)} rows", "", "| fault | caught by |", "| --- | --- |"]
    for name in [name for name in FAULTS if name != HONEST]:
        found[name] = {row: each for row, each in trial(name, *honest).items() if each.verdict != "equal"}
        first = next((f"{row}: {cell(each)}" for row, each in found[name].items()), "**not caught**")
        lines.append(f"| {name} | {first} |")
        print(lines[-1], file=sys.stderr)
    return "\n".join(lines), found


def run(settings: Settings, rank_info: RankInfo, device: torch.device) -> None:
    """Judge on rank 0, and write the table; exit with 1 if a mutant was not caught."""
    together(lambda: load(settings.rows))
    together(lambda: [find(name) for name in settings.wrapper])
    if settings.mutants and not FAULTS:
        raise UserError(
            f"mutants=true: rows={[*settings.rows]} have no faults; add shardtrain.recipes.faults"
        )
    world = max(2, rank_info.world_size)
    columns = ["mutants"] if settings.mutants else [name.rpartition(".")[2] for name in settings.wrapper]
    output = Output("judge", settings.out, f"{'-'.join(columns)}-{world}ranks")
    if rank_info.rank:
        return
    trial = Trial(settings.rows, world, settings.limit_s)
    text, found = (try_mutants if settings.mutants else judge)(settings, trial)
    versions = f"torch {torch.__version__}, Python {sys.version.split()[0]}, {date.today().isoformat()}"
    output.write(f"{world} ranks on the CPU, {versions}\n{text}", {"settings": settings, "found": found})
    if "**not caught**" in text:
        sys.exit(1)


main = partial(launch.start, read, run)

if __name__ == "__main__":
    main()
