"""The moments of a step at which other rooms see or refuse something. A step computes the same without them.

docs/engine.md has a table of what other rooms do at each moment. A method may raise; then the step ends as
after any error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from shardtrain.engine.unit import Unit


class Attachment:
    """What sees a step from another room: a method for each moment, in order, which does nothing here."""

    def attach(self) -> None:
        """Hook and mark modules, by `Engine.keep`, `mark`, `extend` and `bind`. `Engine.detach` undoes it."""

    def at_rest(self) -> None:
        """See parameters before a forward, and in `Engine.adopt_changes`: users may have changed them."""

    def before_forward(self, units: Sequence[Unit]) -> None:
        """See the local shards that ``units`` gather from now on, before any other rank reads them."""

    def after_show(self, unit: Unit) -> None:
        """See the full parameters of ``unit``, which forward computes with now."""

    def before_hide(self, units: Iterable[Unit]) -> None:
        """See the full parameters of ``units`` once more, as forward is done with them.

        Those that a forward has left whole show them when a state dict or an optimizer's step needs shards.
        """

    def after_forward(self) -> None:
        """See the local shards as the root returns, while other ranks may still read them."""

    def before_backward(self) -> None:
        """See all parameters before the first gradient."""

    def after_backward(self, params: Sequence[nn.Parameter], missing: Sequence[str]) -> None:
        """See the parameters that got a gradient, and the names of those whose gradient autograd returned."""
