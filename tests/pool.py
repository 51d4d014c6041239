"""A persistent pool of ranks: real processes over gloo, started once, given one test after another.

Every call gets a process group of its own, so that tests cannot disturb one another. A call that takes too
long, or a rank that dies, fails that one test, and the pool is started afresh. So it is after any exception
while answers are awaited, such as that of a time-out or Ctrl-C: late answers must not reach the next call.

Programs, too, are forked from a process that has imported torch already, which takes four seconds. Each is
``__main__`` of its own processes, with its arguments, environment, folder and outputs, and its ranks meet at
a store as under torchrun. `test_cli.py` starts torchrun itself.
"""

import functools
import gc
import inspect
import multiprocessing
import os
import random
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest

Ranks = Callable[..., list[Any]]  # of the fixtures `ranks` and `on_ranks`
LARGEST = 4  # ranks that are started at once: those of one test are of one age
TIMEOUT_S = 150.0
# What tests import, so that ranks are forked with it; `shardtrain.train` stands for what programs import.
PRELOADED = ["torch", "torchvision", "shardtrain.train.loop", "matplotlib.figure", "pytest", "hypothesis"]


@functools.cache
def forkserver() -> Any:
    """What starts ranks: a process that has imported `PRELOADED`, forked for each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


class LostRanks(AssertionError):
    """An error: ranks died or did not answer; ``codes``: the exit code of each, None of one that runs."""

    def __init__(self, lines: list[str], codes: list[int | None]) -> None:
        super().__init__("\n".join(lines))
        self.codes = codes


class Pool:
    """Ranks that wait for calls. Those of a ``fresh`` pool end after one call, with all that it leaves."""

    def __init__(self, limit_s: float = TIMEOUT_S, fresh: bool = False) -> None:
        self.limit_s = limit_s
        self.fresh = fresh
        self._ranks: list[tuple[Any, Connection]] = []
        self._count = 0  # of tests

    def run(
        self, transport: str, world: int, body: Callable[..., Any], *args: Any, **keywords: Any
    ) -> list[Any]:
        """Call ``body(*args, **keywords)`` on ``world`` ranks, whose `small.shard` takes ``transport``.

        Returns the results in rank order. If a rank raises, dies or does not answer, the AssertionError has
        every rank's traceback.
        """
        if dead := [process.exitcode for process, _ in self._ranks if not process.is_alive()]:
            self.stop()
            raise AssertionError(f"ranks ended between two tests, with exit codes {dead}")
        if not self._ranks:
            # Of stores, which must outlive what tests leave to the garbage collector: else a rank aborts.
            self._folder = tempfile.TemporaryDirectory()
        while len(self._ranks) < (world if self.fresh else max(world, LARGEST)):
            self._ranks.append(self._start())
        self._count += 1
        store = f"{self._folder.name}/{self._count}"
        try:
            for rank, (_, pipe) in enumerate(self._ranks[:world]):
                pipe.send((self._count, body, args, keywords, rank, world, store, transport))
            answers = self._answers(world)
        except BaseException:
            self.stop()
            raise
        codes = [process.exitcode for process, _ in self._ranks[:world]]
        if self.fresh or len(answers) < world:
            self.stop()
        failed = [f"--- rank {rank}\n{text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        if silent := sorted({*range(world)} - {*answers}):
            raise LostRanks([f"ranks {silent} died or did not answer in {self.limit_s} s", *failed], codes)
        if failed:
            raise AssertionError("\n".join(failed))
        return [answers[rank][1] for rank in range(world)]

    def _answers(self, world: int) -> dict[int, tuple[bool, Any]]:
        """Return what each rank answers to the latest call. Answers to earlier calls are dropped."""
        answers: dict[int, tuple[bool, Any]] = {}
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:world])}
        deadline = time.monotonic() + self.limit_s
        while pipes and time.monotonic() < deadline:
            for ready in wait(list(pipes), timeout=max(0.0, deadline - time.monotonic())):
                try:
                    number, answer = ready.recv()
                except EOFError:  # it died: the others have time to say what they saw of that
                    pipes.pop(ready)
                    deadline = min(deadline, time.monotonic() + 100)
                    continue
                if number == self._count:
                    answers[pipes.pop(ready)] = answer
        return answers

    def _start(self) -> tuple[Any, Connection]:
        ours, theirs = forkserver().Pipe()
        process = forkserver().Process(target=_serve, args=(theirs, sys.path, self.fresh), daemon=True)
        process.start()
        theirs.close()
        return process, ours

    def stop(self) -> None:
        for process, pipe in self._ranks:
            pipe.close()
            process.kill()
            process.join()
        if self._ranks:
            self._folder.cleanup()
        self._ranks = []


def each_rank(
    *worlds: int, transport: str = "shared"
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Turn a function into a test that runs it on every rank: ``@each_rank(2, 3)`` on two, then on three.

    Where 3 is among the worlds (it divides no width of the tests' models), 2 and 4 show the same again and
    are for releases. ``transport``: ``shared`` is over shared memory, and over messages with ``--long``;
    ``each`` is over both by default, for what depends on it; ``auto`` is once. The function's parameters are
    those of ``pytest.mark.parametrize``, or fixtures whose values can be pickled.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        fixture = {"each": "ranks_over_each", "shared": "ranks"}.get(transport, "on_ranks")

        @functools.wraps(body)
        def test(world: int, **given: Any) -> None:
            given.pop(fixture)(world, test, **given)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        own = [inspect.Parameter(name, kind) for name in ("world", fixture)]
        parameters = [*own, *inspect.signature(body).parameters.values()]
        test.__signature__ = inspect.Signature(parameters)
        test.on_rank = body
        again = [world for world in worlds if world in (2, 4) and 3 in worlds]
        each = [pytest.param(w, marks=pytest.mark.release if w in again else ()) for w in worlds]
        return pytest.mark.parametrize("world", each)(test)

    return decorate


def once(body: Callable[..., Any], name: str = "", *args: Any) -> Any:
    """Return a fixture: a path at which two ranks have run ``body(path, *args)``, once for the module."""

    @pytest.fixture(scope="module")
    def path(_pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
        place = tmp_path_factory.mktemp("once") / name
        _pool.run("auto", 2, body, str(place), *args)
        return place

    return path


def _serve(pipe: Connection, path: list[str], fresh: bool) -> None:
    sys.path[:] = path
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
    warnings.filterwarnings("ignore", r".torch.jit.\w+. is deprecated")  # torch's own, of two categories
    warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)  # torch 2.11's
    gc.freeze()  # every test ends with a collection, which took 0.2 s to look through torch's modules
    _answer_calls(pipe, fresh)


def _answer_calls(pipe: Connection, fresh: bool) -> None:
    while True:
        try:
            number, body, args, keywords, rank, world, store, transport = pipe.recv()
        except EOFError:
            return
        body = getattr(body, "on_rank", body)  # of a test made by `each_rank`
        os.environ["SHARDTRAIN_TEST_TRANSPORT"] = transport
        pipe.send((number, _call(functools.partial(body, *args, **keywords), rank, world, store)))
        if fresh:
            os._exit(0)  # so that connections end that something still holds


def _call(body: Callable[..., Any], rank: int, world: int, store: str) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist

    environment = dict(os.environ)
    torch.set_num_threads(1)  # accelerate takes all cores, which made every later test ten times as slow
    random.seed(0)
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


class Ended(NamedTuple):
    codes: list[int]
    output: str
    errors: str


def ended(world: int, *command: str, folder: Path, timeout: float = 300.0, **environment: str) -> Ended:
    """Run ``command`` (-m and a module, or a file; arguments) on ``world`` ranks until all have ended."""
    from torch.distributed import TCPStore

    common = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"} | environment
    # The store listens already, so that no port is lost to others.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world > 1 else None
    processes = []
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as said:
        output = Path(said) / "output"
        errors = Path(said) / "errors"
        for rank in range(world):
            added = by_torchrun(rank, world, store.port) if store is not None else {}
            arguments = (list(command), str(folder), said, common | added)
            processes.append(forkserver().Process(target=_program, args=arguments))
            processes[-1].start()
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
                assert not process.is_alive(), f"not over: {output.read_text()}{errors.read_text()}"
        finally:
            for process in processes:
                process.kill()
                process.join()
        return Ended([process.exitcode for process in processes], output.read_text(), errors.read_text())


def by_torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    """Return what torchrun adds to the environment of a rank."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    added = {**place, **store, "TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": 1}
    return {name: str(value) for name, value in added.items()}


def _program(command: list[str], folder: str, said: str, environment: dict[str, str]) -> None:
    gc.freeze()  # as above
    import torch

    # Torch is imported already, and so it has not read the variable: two ranks of two threads each took
    # minutes on two busy cores.
    if "OMP_NUM_THREADS" in environment:
        torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "output"), (2, "errors")):
        os.dup2(os.open(f"{said}/{name}", os.O_WRONLY | os.O_APPEND | os.O_CREAT), number)
    sys.stdout = open(1, "w", closefd=False, encoding="utf-8")  # noqa: SIM115  # both live as long as the process
    sys.stderr = open(2, "w", closefd=False, encoding="utf-8", buffering=1)  # noqa: SIM115
    if command[0] == "-m":
        sys.argv = command[1:]
        sys.path.insert(0, folder)
        for name in (command[1], f"{command[1]}.__main__"):
            sys.modules.pop(name, None)  # forked with it; now it runs under another name
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).absolute().parent))
        runpy.run_path(command[0], run_name="__main__")
