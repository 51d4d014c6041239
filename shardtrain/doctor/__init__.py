"""Check that this installation is fit, and that sharding changes nothing.

    python -m shardtrain.doctor +recipe=resnet

Read in this order: `Finding` (one line of the report), ``twin`` (the same steps with a sharded and an
unsharded model), ``__main__`` (the program, and what it checks of the installation and of the plan).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from shardtrain import comm

OK, WARNING, FAILED = "ok", "warning", "failed"


class Finding(NamedTuple):
    """What a check found. ``text`` says it; ``advice``, unless all is well, says what to do."""

    verdict: str
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.verdict:<8} {self.text}" + (f": {self.advice}" if self.advice else "")


def shared(findings: Sequence[Finding]) -> list[Finding]:
    """Return every rank's findings on every rank; what all ranks found is listed once. Collective."""
    texts = comm.gather_texts(json.dumps(findings), comm.plain_transport(), comm.control_device())
    ranks: dict[Finding, list[str]] = {}
    for rank, text in enumerate(texts):
        for fields in json.loads(text):
            ranks.setdefault(Finding(*fields), []).append(str(rank))
    listed = []
    for finding, own in ranks.items():
        who = "" if len(own) == len(texts) else f"rank{'s' * (len(own) > 1)} {', '.join(own)}: "
        listed.append(finding._replace(text=who + finding.text))
    return listed
