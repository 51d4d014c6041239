"""The optimizers that are known to be right on what a rank holds, and users' word for others."""

from __future__ import annotations

from typing import TypeVar

import torch

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)

# Of ``torch.optim``: those that treat each element by itself, and those that treat each parameter so.
_ELEMENTS = "SGD Adam AdamW NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD"
_ELEMENT_WISE = frozenset(_ELEMENTS.split())
_BY_PARAMETER = ["Adafactor", "Muon"]
_TRUSTED = "_shardtrain_trusted"  # an attribute of optimizers


def trusted(optimizer: Optimizer) -> Optimizer:
    """Take the user's word that ``optimizer`` is right on what a rank holds; return it.

    That is a part of each parameter, of which it must treat each element by itself; or with
    ``layout="whole"`` some whole parameters, of which it must treat each by itself. Its steps are not
    looked at. For optimizers whose kernels read memory, or which take numbers that concern one parameter.
    """
    setattr(optimizer, _TRUSTED, True)
    return optimizer


def is_known(optimizer: torch.optim.Optimizer, whole: bool) -> bool:
    """Return whether ``optimizer`` is right on what a rank holds. ``whole``: whole parameters.

    Raises ValueError for an optimizer of ``torch.distributed``, which owns whole parameters itself.
    """
    kind = type(optimizer)
    if any(base.__module__.startswith("torch.distributed.") for base in kind.__mro__):
        raise ValueError(
            f"{kind.__name__} owns, averages or broadcasts whole parameters itself, of which a rank holds "
            "pieces: use the optimizer that it wraps, such as torch.optim.AdamW; its state is sharded already"
        )
    if getattr(optimizer, _TRUSTED, False):
        return True
    is_listed = kind.__name__ in _ELEMENT_WISE or (whole and kind.__name__ in _BY_PARAMETER)
    return is_listed and f"{kind.__module__}.".startswith("torch.optim.")
