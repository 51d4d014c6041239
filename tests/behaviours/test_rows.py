"""Every row: of shardtrain's wrappers equal to a replica or refused by name; of others a verdict."""

import re
from collections.abc import Callable

from behaviours.refused import REFUSED
from behaviours.verdicts import outcomes, summary
from behaviours.wrappers import OWN
from pool import Pool

# In these rows each rank sees something else.
RANKS_DIFFER = ("Ranks that run", "Unequal numbers", "A rank that is")


def test_behaviour(
    name: str, wrapper: str, transport: str, pool: Pool, record_property: Callable[[str, object], None]
) -> None:
    by_rank = outcomes(pool, transport, wrapper, name)
    verdict, text = summary(by_rank)
    column = f"{wrapper} {transport}" if wrapper in OWN else wrapper
    record_property("behaviour", [column, name, verdict, text])
    if wrapper not in OWN:
        return
    refused = REFUSED.get(name)
    expected = "refused" if refused else "equal"
    for each in [summary(by_rank)] if name.startswith(RANKS_DIFFER) else by_rank:
        assert each.verdict == expected, each.text
        assert re.search(refused or "", each.text), each.text
