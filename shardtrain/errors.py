"""Mistakes of the user's: one clear message, exit code 2, no traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path


class UserError(ValueError):
    """Something the user can put right. The message says what was found, what was expected, what to do."""


def nearest(word: str, valid: Iterable[str]) -> str:
    """`"; did you mean X?"` for the valid word nearest to `word`, or `""` when none is near."""
    matches = get_close_matches(word, list(valid), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


@contextlib.contextmanager
def writing(key: str, path: Path) -> Iterator[None]:
    """Inside, what cannot be written is a mistake in the option `key`, which says to write to `path`."""
    try:
        yield
    except OSError as error:
        reason = f"cannot write there ({error.strerror})"
        raise UserError(f"{key}={path}: {reason}; choose another {key}") from error
