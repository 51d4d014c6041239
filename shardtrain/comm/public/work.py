"""What ``async_op=True`` returns."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Protocol

import torch


class Work(Protocol):
    """A collective under way, as torch's own ``Work``: ours or the backend's."""

    def wait(self) -> bool:
        """Return once the results may be read; raise what went wrong."""

    def is_completed(self) -> bool:
        """Whether ``wait()`` would return at once."""


class Background:
    """Runs ``move`` in a thread of its own.

    gloo's messages do not say whether they have arrived except to a thread that waits for them, so the
    thread is what makes ``is_completed()`` true without a ``wait()``, and merges what arrives while the
    caller computes.
    """

    def __init__(self, move: Callable[[], None]) -> None:
        self._move: Callable[[], None] | None = move
        self._error: BaseException | None = None
        self._inference = torch.is_inference_mode_enabled()
        self._thread = Thread(target=self._run, name="shardtrain-collective", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        move, self._move = self._move, None
        assert move is not None, "a thread runs once"
        try:
            # Inference mode belongs to a thread, and tensors made in it may only be written in it.
            with torch.inference_mode(self._inference):
                move()
        except BaseException as error:
            self._error = error

    def wait(self) -> bool:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        return not self._thread.is_alive()
