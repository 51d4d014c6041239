"""What a row of the judge's table is, and what it says of a wrapper.

Rows are registered by the modules of `rows=`: `shardtrain.recipes.behaviours` and those beside it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import NamedTuple

from shardtrain.judge.wrappers import NotOffered, Wrapper

# What a refusal names: something of the user's, or that a thing is not supported.
NAMED = r"weight|bias|\b\w+(\.\w+)*\.\d+\b|sharded|support|differ"
HONEST = "honest"  # the wrapper among the faults that has none


class Wrong(Exception):
    """A result differs from the replica's, and nobody was told."""


class Row(NamedTuple):
    """Hold what a row does with a wrapper; ``named``: what a refusal names, a regular expression."""

    kind: str
    run: Callable[[Wrapper], object]
    named: str


class Outcome(NamedTuple):
    verdict: str  # equal, refused, error (which names nothing), wrong, hangs, ends, not offered
    text: str = ""


ROWS: dict[str, Row] = {}
FAULTS: dict[str, Callable[[], object]] = {}  # make a wrapper that has the fault


def outcome(wrapper: Wrapper, row: Row) -> Outcome:
    """Run ``row`` on this rank; return what became of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", message=".* cannot be tried on pieces")
            row.run(wrapper)
    except NotOffered as error:
        return Outcome("not offered", str(error))
    except Wrong as error:
        return Outcome("wrong", str(error))
    except BaseException as error:
        line = next((line for line in str(error).splitlines() if line.strip()), "")
        text = ". ".join([f"{type(error).__name__}: {line}", *getattr(error, "__notes__", ())])
        return Outcome("refused" if re.search(row.named, text) else "error", text)
    return Outcome("equal")
