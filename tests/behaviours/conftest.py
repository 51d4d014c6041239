"""Options, the wrappers that rows are tried with, and the table at the end."""

from typing import Any

import pytest
import torch

from behaviours.rows import ROWS
from behaviours.verdicts import Found, table
from behaviours.wrappers import KNOWN, OWN, find
from pool import PRELOADED, Pool

LIMIT_S = 30.0  # after which a row hangs
TRANSPORTS = ("process_group", "shared_memory")
# Rows that find a fault of `tests/mutants.txt`. What others find, the rooms' tests find, too.
FINDERS = ("A module attached", "A penalty", "Models that differ", "Training equals")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("behaviours")
    names = ", ".join(KNOWN)
    group.addoption("--wrapper", help=f"whose behaviours: PACKAGE.FUNCTION, or one of {names}")
    group.addoption("--transport", help="over which shardtrain's wrappers run; without it over both")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a wrapper that does not exist."""
    wrapper = config.getoption("--wrapper", None)
    if wrapper is None or wrapper in OWN:
        return
    if config.getoption("--transport"):
        raise pytest.UsageError(f"--transport is of {', '.join(OWN)}; {wrapper} chooses by itself")
    try:
        find(wrapper)
    except (ImportError, AttributeError, ValueError) as error:
        names = ", ".join(KNOWN)
        raise pytest.UsageError(
            f"--wrapper {wrapper}: {error}; expected {names} or PACKAGE.FUNCTION"
        ) from None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Try each row with the wrapper that is asked for, or with shardtrain's.

    If none is asked for, a few rows are tried. With ``--long`` every second row is tried over one transport,
    the others over the other one; the other halves, and other wrappers of ours, are for releases.
    """
    if "wrapper" not in metafunc.fixturenames:
        return
    asked = metafunc.config.getoption("--wrapper", None)
    transport = metafunc.config.getoption("--transport", None)
    trials = []
    for wrapper in [asked] if asked else OWN:
        transports = TRANSPORTS if wrapper in OWN else ("auto",)
        for each in (transport,) if transport else transports:
            for number, name in enumerate(ROWS):
                is_second = transport is None and each == TRANSPORTS[number % 2]
                for_release = is_second or wrapper != "shardtrain.shard"
                later = pytest.mark.release if for_release else pytest.mark.long
                is_default = asked or (name.startswith(FINDERS) and not for_release)
                trials.append(pytest.param(wrapper, each, name, marks=() if is_default else later))
    metafunc.parametrize(("wrapper", "transport", "name"), trials)


@pytest.fixture(scope="session")
def _fresh_pool() -> Pool:
    PRELOADED.append("behaviours.verdicts")
    return Pool(LIMIT_S, fresh=True)


@pytest.fixture
def pool(wrapper: str, request: pytest.FixtureRequest) -> Pool:
    """The ranks for rows of ``wrapper``."""
    return request.getfixturevalue("_pool" if wrapper in OWN else "_fresh_pool")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table of what ran."""
    found = []
    for report in terminalreporter.stats.get("passed", []) + terminalreporter.stats.get("failed", []):
        found += [Found(*value) for name, value in report.user_properties if name == "behaviour"]
    if found:
        terminalreporter.section(f"behaviours, torch {torch.__version__}")
        terminalreporter.write_line("\n".join(table(found)))
