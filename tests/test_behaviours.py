"""The scenes of `behaviours.py`, whose table compares shardtrain with FSDP2."""

import contextlib
import re

import pytest
import torch.distributed as dist

from behaviours import SCENES, Shardtrain, outcome
from pool import each_rank

# They end in an error that others may have to wait for, or need a time-out: `test_guard.py` has them.
_ALONE = [name for name, scene in SCENES.items() if scene.kind == "Transport" and "300" not in name]


@pytest.mark.parametrize("name", [name for name in SCENES if name not in _ALONE])
@each_rank(3)
def test_every_behaviour_is_equal_or_refused(name: str) -> None:
    text, refused = outcome(Shardtrain(), name), SCENES[name].refused
    with contextlib.suppress(RuntimeError):  # where the group has failed, all ranks know
        dist.barrier()  # each rank is refused by itself, and the others may still be on their way there
    assert text == "equal" if refused is None else re.search(refused, text), text
