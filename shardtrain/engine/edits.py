"""Notice that users change parameters while other ranks may compute with them, and refuse it by name.

Its own file, since no step needs it: `Driver` says when values are shown, used and hidden.
"""

from __future__ import annotations

from shardtrain.engine.unit import Shown, Unit

Values = list[tuple[int, int]]  # of each parameter, autograd's version of it, and where it lies


class Edits:
    """Compare what parameters show with what they showed. Written here only."""

    def __init__(self) -> None:
        self._full: dict[Unit, Values] = {}
        self._shards: dict[Unit, Values] = {}

    def note(self, unit: Unit) -> None:
        """Note the values that parameters of ``unit`` show now."""
        noted = self._full if unit.shown is Shown.FULL else self._shards
        noted[unit] = _values(unit)

    def refuse(self, unit: Unit) -> None:
        """Raise ValueError if a full parameter was changed: ranks would disagree, or the change be lost."""
        if unit.shown is Shown.FULL and (edited := _edited(unit, self._full)):
            raise ValueError(
                f"{', '.join(edited)} changed while {unit.title} was whole, which would be lost or done once "
                "per rank; change parameters between steps, inside shardtrain.unsharded(model). After a "
                "forward with gradients, the root is whole until its backward: evaluate under torch.no_grad()"
            )

    def refuse_inside_forward(self, unit: Unit) -> None:
        """Raise ValueError if local shards were changed since forward began: other ranks may read them."""
        if unit.shown is Shown.SHARD and (edited := _edited(unit, self._shards)):
            raise ValueError(
                f"forward changed {', '.join(edited)} of {unit.title}, with which other ranks may compute "
                "now; change parameters between steps (a momentum encoder after optimizer.step())"
            )


def _values(unit: Unit) -> Values:
    return [(member.param._version, member.param.data_ptr()) for member in unit.members]


def _edited(unit: Unit, noted: dict[Unit, Values]) -> list[str]:
    """Return the names of parameters that users have changed since they were ``noted``."""
    values = _values(unit)
    noted_values = noted.get(unit, values)
    if values == noted_values:
        return []
    members = zip(unit.members, values, noted_values, strict=True)
    return [member.name for member, value, old in members if value != old]
