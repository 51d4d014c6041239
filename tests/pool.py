"""A persistent pool of ranks: real processes over gloo, started once, given one test after another.

Starting two processes costs seconds, a test in running ones milliseconds. Every call gets a process
group of its own, so tests cannot disturb one another; a call that takes too long, or a rank that dies,
fails that one test and the pool is started afresh.
"""

from __future__ import annotations

import functools
import gc
import inspect
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

Ranks = Callable[..., list[Any]]  # of the fixtures `ranks` and `on_ranks`
LARGEST = 4
TIMEOUT_S = 150.0
# What tests import, so that ranks are forked with it; `shardtrain.train` stands for what programs import.
WILD = ["transformers", "accelerate", "timm", "peft", "torchmetrics"]  # packages that `test_wild.py` needs
PRELOADED = ["torch", "torchvision", "shardtrain.train.loop", "matplotlib.figure", "pytest", "hypothesis"]


@functools.cache
def forkserver() -> Any:
    """What starts ranks: a process that has imported `PRELOADED`, forked for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class RankFailed(AssertionError):
    """A rank raised, died or did not answer; the message holds every rank's traceback."""


class Pool:
    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []

    def run(
        self, transport: str, world: int, body: Callable[..., Any], *args: Any, **keywords: Any
    ) -> list[Any]:
        """Call ``body(*args, **keywords)`` on ``world`` ranks, whose `small.shard` takes ``transport``.

        Returns the results in rank order.
        """
        if dead := [process.exitcode for process, _ in self._ranks if not process.is_alive()]:
            self.stop()
            raise RankFailed(f"ranks ended between two tests, with exit codes {dead}")
        if not self._ranks:
            self._ranks = [self._start(rank) for rank in range(LARGEST)]
        with tempfile.TemporaryDirectory() as folder:
            for rank, (_, pipe) in enumerate(self._ranks[:world]):
                pipe.send((body, args, keywords, rank, world, str(Path(folder) / "store"), transport))
            answers = self._answers(world)
        failed = [f"--- rank {rank}\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        if len(answers) < world:
            self.stop()
            silent = sorted(set(range(world)) - set(answers))
            raise RankFailed("\n".join([f"ranks {silent} died or did not answer in {TIMEOUT_S} s", *failed]))
        if failed:
            raise RankFailed("\n".join(failed))
        return [answers[rank][1] for rank in range(world)]

    def _answers(self, world: int) -> dict[int, tuple[bool, Any]]:
        answers: dict[int, tuple[bool, Any]] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:world])}
        deadline = time.monotonic() + TIMEOUT_S
        while pipes and time.monotonic() < deadline:
            for ready in wait(list(pipes), timeout=max(0.0, deadline - time.monotonic())):
                rank = pipes.pop(ready)  # type: ignore[arg-type]
                try:
                    answers[rank] = ready.recv()  # type: ignore[union-attr]
                except EOFError:  # it died: the others have a moment to say what they saw of that
                    deadline = min(deadline, time.monotonic() + 12)
        return answers

    def _start(self, rank: int) -> tuple[Any, Connection]:
        ours, theirs = forkserver().Pipe()
        process = forkserver().Process(target=_serve, args=(theirs, sys.path), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        self._ranks = []


def each_rank(*worlds: int, transport: str = "each") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a test that runs it on every rank: ``@each_rank(2, 3)`` on two, then on three.

    Where 3 is among the worlds (it divides no width of the tests' models), 2 and 4 show the same again and
    are long. ``transport``: ``each`` is once over messages and once over shared memory, ``auto`` once. The
    function's parameters are those of ``pytest.mark.parametrize``, or fixtures whose values can be pickled.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        fixture = "ranks" if transport == "each" else "on_ranks"

        @functools.wraps(body)
        def test(world: int, **given: Any) -> None:
            given.pop(fixture)(world, test, **given)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [inspect.Parameter(name, kind) for name in ("world", fixture)]
        parameters = [*own, *inspect.signature(body).parameters.values()]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        test.on_rank = body  # type: ignore[attr-defined]
        again = [world for world in worlds if world in (2, 4) and 3 in worlds]
        each = [pytest.param(w, marks=pytest.mark.long if w in again else ()) for w in worlds]
        marked: Callable[..., None] = pytest.mark.parametrize("world", each)(test)
        return marked

    return decorate


def once(body: Callable[..., Any], name: str = "", *args: Any) -> Any:
    """Return a fixture: a path at which two ranks have run ``body(path, *args)``, once for the module."""

    @pytest.fixture(scope="module")
    def path(_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
        place = tmp_path_factory.mktemp("once") / name
        _pool.run("auto", 2, body, str(place), *args)
        return place

    return path


def _serve(pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
    gc.freeze()  # every test ends with a collection, which took 0.2 s to look through torch's modules
    while True:
        try:
            body, args, keywords, rank, world, store, transport = pipe.recv()
        except EOFError:
            return
        body = getattr(body, "on_rank", body)  # of a test made by `each_rank`
        os.environ["SHARDTRAIN_TEST_TRANSPORT"] = transport
        pipe.send(_call(functools.partial(body, *args, **keywords), rank, world, store))


def _call(body: Callable[..., Any], rank: int, world: int, store: str) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist

    environment = dict(os.environ)
    torch.set_num_threads(1)  # accelerate takes all cores, which made every later test ten times as slow
    torch.manual_seed(0)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
        dist.barrier()  # a rank that is done at once must not leave while others still connect to it
        result = body()
        assert dict(os.environ) == environment, "the test left environment variables behind"
        return True, result
    except BaseException:
        return False, traceback.format_exc()
    finally:
        # DDP holds the group in C++. Were it the last to let go, torch 2.11 would end gloo's threads with
        # Python's lock held, for which they may be waiting; so this is the last.
        group = dist.group.WORLD if dist.is_initialized() else None
        if group is not None:
            dist.destroy_process_group()
        gc.collect()  # models are cycles; four ranks' worth of them would wait for a full collection
        del group
        gc.freeze()  # what is left are modules that the test was the first to import
