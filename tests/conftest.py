import functools
import gc
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from pool import Pool

# The same examples in every run, and none that fails because the machine is busy.
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked `long` or `release` too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked ``long`` or ``release``, unless it is asked for."""
    if not config.getoption("--long"):
        later = {item for item in items if any(map(item.get_closest_marker, ("long", "release")))}
        config.hook.pytest_deselected(items=[*later])
        items[:] = [item for item in items if item not in later]


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import torch and the tests without collections of garbage, which took a third of the time."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_finish() -> None:
    """Prepare a process that runs tests. The one that only starts others needs no torch."""
    import torch

    # Threads that wait for one another on busy cores made a run of half a second last ten.
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection took 0.2 s to look through torch's modules


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Begin each test with the same random numbers, whatever ran before it; ranks of the pool do so, too."""
    import torch

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.stop()


@pytest.fixture(params=["shared_memory", pytest.param("process_group", marks=pytest.mark.long)])
def ranks(_pool: Pool, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``ranks(world, body, *args)`` runs ``body`` on that many ranks; over messages only with ``--long``."""
    return functools.partial(_pool.run, request.param)


@pytest.fixture(params=["process_group", "shared_memory"])
def ranks_over_each(_pool: Pool, request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """``ranks``, over messages by default, too: for what depends on the transport."""
    return functools.partial(_pool.run, request.param)


@pytest.fixture
def on_ranks(_pool: Pool) -> Callable[..., list[Any]]:
    """``on_ranks(world, body, *args)``: the same, once; bodies choose transports themselves."""
    return functools.partial(_pool.run, "auto")
