"""Users' mistakes, also those that parsers of their files find: one clear line each, by `UserError`."""

from __future__ import annotations

import contextlib
import importlib
import os
import traceback
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from shardtrain.errors import UserError as UserError

Kinds = type[Exception] | tuple[type[Exception], ...]
MOST_REASON = 400  # characters of a parser's message
MOST_SHOWN = 30  # valid words in a message: all keys of a section, but not all of a hundred models


class WorkerError(UserError):
    """What a loader's worker cannot give, without the traceback that torch adds to the text."""

    def __init__(self, text: str) -> None:
        super().__init__(text.rpartition(f"{type(self).__name__}: ")[2].strip())


class UnknownKey(UserError):
    """A mistake: a ``key`` that there is not."""

    def __init__(self, key: str, text: object) -> None:
        super().__init__(str(text))
        self.key = key


class Unreadable(WorkerError):
    """An image that cannot be read."""


def not_valid(what: str, word: object, valid: Iterable[str], prefix: str = "") -> UserError:
    """Return the error for a ``word`` that is not in ``valid``; ``what`` begins the message."""
    valid = list(valid)
    near = "".join(f"; did you mean {prefix}{match}?" for match in get_close_matches(str(word), valid, n=1))
    shown = [*(prefix + each for each in valid[:MOST_SHOWN]), *(["…"] if len(valid) > MOST_SHOWN else [])]
    return UserError(f"{what}{near} (valid: {', '.join(shown)})")


def advice(key: str, elsewhere: Iterable[str] = ()) -> str:
    """Return what the name of an unknown ``key`` may mean, by `hints.yaml` or by a key ``elsewhere``."""
    last = key.rpartition(".")[2]
    hints = OmegaConf.load(program_configs().FOLDER / "hints.yaml").items()
    meanings = [str(meaning) for meaning, words in hints if last in words.split()]
    texts = [
        text if " " in text else f"did you mean {text}?" for text in (*meanings, *elsewhere) if text != key
    ]
    return next(iter(texts), "")


def program_configs() -> Any:
    """Return the package of the program's config groups, which a checkout has beside this one."""
    return importlib.import_module("shardtrain.configs")


def writing(key: str, path: Path) -> contextlib.AbstractContextManager[None]:
    """Turn an OSError inside into a UserError about the option ``key``, whose value is ``path``."""
    return reading(f"{key}={path}", f"cannot write there; choose another {key}", OSError)


@contextlib.contextmanager
def reading(what: str, expected: str, kinds: Kinds = Exception) -> Iterator[None]:
    """Turn an exception inside into a UserError. ``kinds``: by default all, since parsers raise many.

    ``what`` is a file, or a key and its value. ``expected``: what it should be.
    """
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        reason = " ".join(str(error).split())[:MOST_REASON] or type(error).__name__
        raise UserError(f"{what}: {reason}; {expected}") from error


def reason_with_line(error: Exception) -> str:
    """Return one line: what a user's function raised, in which file and line."""
    *_, frame = traceback.extract_tb(error.__traceback__)
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"{reason} ({frame.filename}, line {frame.lineno})"


def path_of(key: str, text: str) -> Path:
    """Return ``text``, the value of ``key``, as a path, with `~` replaced.

    Raises UserError if no file can have that name, or if it is a folder that may not be entered.
    """
    # It may be too long, the home of nobody, or have a NUL.
    with reading(f"{key}={text}", "expected a path that can be entered"):
        if not text:
            raise ValueError("it is empty")
        path = Path(text).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(f"{path}/.")  # raises PermissionError for a folder that may not be entered
        return path


def plain_file(path: Path) -> Path:
    """Return ``path``. Raises OSError for a pipe or a device, from which reading might wait or never end."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    return path
