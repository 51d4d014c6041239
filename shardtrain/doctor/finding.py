"""What a check finds: one line, from one rank or from all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from shardtrain import comm

OK, WARNING, FAILED = "ok", "warning", "failed"


class Finding(NamedTuple):
    """``text`` says what was found; ``advice``, unless all is well, what to do."""

    verdict: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.text}" + (f": {self.advice}" if self.advice else "")


def shared(findings: Sequence[Finding]) -> list[Finding]:
    """Every rank's findings on every rank; what all ranks found is listed once. Collective."""
    texts = comm.gather_texts(json.dumps(findings), comm.plain_transport(), comm.control_device())
    ranks: dict[Finding, list[int]] = {}
    for rank, text in enumerate(texts):
        for found in json.loads(text):
            ranks.setdefault(Finding(*found), []).append(rank)
    return [_of_ranks(finding, found, len(texts)) for finding, found in ranks.items()]


def _of_ranks(finding: Finding, ranks: list[int], world: int) -> Finding:
    if len(ranks) == world:
        return finding
    names = ", ".join(map(str, ranks))
    return finding._replace(text=f"rank{'s' if len(ranks) > 1 else ''} {names}: {finding.text}")
