"""Short forms of what `torture.py` does at length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import torture


@pytest.mark.parametrize(
    ("part", "arguments", "lines"),
    [
        (torture.points, (["in the middle of a data file", "after the rename"],), 2),
        pytest.param(torture.points, (), len(torture.POINTS), marks=pytest.mark.long),
        (torture.flips, (40,), 1),
        (torture.files, (), 11),
        pytest.param(torture.kills, (4,), 4, marks=pytest.mark.long),
    ],
)
def test_checkpoints_under_torture(tmp_path: Path, part: Any, arguments: Any, lines: int) -> None:
    assert len(list(part(tmp_path, *arguments))) == lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose undisturbed run serves both of these tests."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
@pytest.mark.parametrize("part", [torture.runs, torture.restarts])
def test_killed_runs_end_as_undisturbed_ones(folder: Path, part: Any) -> None:
    assert len(list(part(folder, 1, ["train.epochs=1", "data.train_images=120"]))) == 1
