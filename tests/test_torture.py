"""Short forms of what `torture.py` does at length."""

from __future__ import annotations

from pathlib import Path

import pytest

import torture


def test_kills_at_named_points(tmp_path: Path) -> None:
    names = list(torture.POINTS)
    assert len(list(torture.points(tmp_path, names))) == len(names)


def test_kills_at_random_times(tmp_path: Path) -> None:
    assert len(list(torture.kills(tmp_path, 4))) == 4


def test_flipped_bits(tmp_path: Path) -> None:
    assert list(torture.flips(tmp_path, 80)) == ["80 bit flips in 4 files: all noticed and named"]


def test_spoilt_files(tmp_path: Path) -> None:
    assert len(list(torture.files(tmp_path))) == 11


def test_full_and_read_only_disks(tmp_path: Path) -> None:
    told = list(torture.disks(tmp_path))
    if len(told) == 1:
        pytest.skip(told[0])
    assert len(told) == 3


SHORT = ["train.epochs=1", "data.train_images=120"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose undisturbed run serves both of these tests."""
    return tmp_path_factory.mktemp("runs")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_runs_that_are_killed(runs: Path) -> None:
    assert len(list(torture.runs(runs, 1, SHORT))) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tensorboard's own
def test_workers_of_torchrun_that_are_killed(runs: Path) -> None:
    assert len(list(torture.restarts(runs, 1, SHORT))) == 1
