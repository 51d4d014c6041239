"""Shard to full parameters, and back: the only place that changes a unit's full vector.

launch   give every full vector its memory and start filling it from all ranks' intervals
finish   wait until it is filled, and let the parameters show it
release  let the parameters show their local pieces and give the memory back
"""

from __future__ import annotations

from shardtrain.comm import trace
from shardtrain.comm.meter import waiting
from shardtrain.comm.transport import Pending
from shardtrain.unit import State, Unit


def launch(unit: Unit) -> None:
    """Start gathering ``unit``. Nothing may be read from its full vector before ``finish``."""
    assert unit.state is State.SHARDED, f"{unit.name}: {unit.state}"
    trace.begin("gather", unit.title)
    unit.account.add(int(bool(unit.segments)), unit.full_bytes)
    for segment in unit.segments:
        segment.hold_full()
    flats = [segment.flat for segment in unit.segments]
    unit.moving = unit.transport.gather(unit.gather_tag, flats) if flats else Pending()
    unit.state = State.GATHERING


def finish(unit: Unit) -> None:
    """Return once ``unit``'s full vector is valid."""
    assert unit.state is State.GATHERING, f"{unit.name}: {unit.state}"
    with waiting("all_gather", unit.title, unit.device):
        unit.moving.wait()
    trace.end("gather", unit.title)
    unit.state = State.GATHERED


def open_full(unit: Unit) -> None:
    """Whatever the state, let the parameters show their full values."""
    if unit.state is State.SHARDED:
        launch(unit)
    if unit.state is State.GATHERING:
        finish(unit)
    unit.show_full()


def release(unit: Unit) -> None:
    """Let the parameters show their local pieces and empty the full vector."""
    if unit.pinned:
        return
    unit.show_local()
    if unit.state is State.SHARDED:
        return
    if unit.state is State.GATHERING:
        finish(unit)
    unit.account.add(-int(bool(unit.segments)), -unit.full_bytes)
    for segment in unit.segments:
        segment.empty_full()
    unit.state = State.SHARDED
