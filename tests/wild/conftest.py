from __future__ import annotations

import pytest

import pool
from wild import MISSING, PACKAGES


def pytest_configure(config: pytest.Config) -> None:
    """Import the packages once, before ranks are forked: each rank would take seconds."""
    if config.getoption("--long") and not MISSING:
        pool.PRELOADED.extend([*PACKAGES, "transformers.models.auto.modeling_auto"])
