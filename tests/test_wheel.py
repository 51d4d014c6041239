"""The program as it is installed: from a wheel, in an empty directory, without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = """
import sys
from setuptools import build_meta
print(build_meta.build_wheel(sys.argv[1]))
"""


def _run(command: list[str], folder: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, and nothing else."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    source, site = folder / "source", folder / "site"
    source.mkdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout
    if not tracked:
        pytest.skip("not a git checkout")
    for name in filter(None, tracked.decode().split("\0")):
        if not name.startswith(("tests/", "outputs/")):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    _run([sys.executable, "-W", "ignore", "-c", BUILD, str(folder)], source)
    (wheel,) = folder.glob("*.whl")
    _run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(site)], folder)
    return site


def test_the_wheel_trains_in_an_empty_directory(installed: Path, tmp_path: Path) -> None:
    where = "from importlib.util import find_spec; print(find_spec('shardtrain').origin)"
    path = {"PYTHONPATH": str(installed)}
    assert Path(_run([sys.executable, "-c", where], tmp_path, **path).strip()).is_relative_to(installed)
    program = [sys.executable, "-m", "shardtrain.train", "+recipe=resnet", "debug=fdr", "data.limit=12"]
    options = ["model=squeezenet1_1", "data=fake", "train.batch_size=12", "run.name=here"]
    said = _run([*program, *options], tmp_path, **path)
    assert "finished  step 2" in said
    assert {entry.name for entry in tmp_path.iterdir()} == {"outputs"}
    for name in ("recipe/resnet.yaml", "data/webdataset.yaml", "images.yaml", "slurm/train.sbatch"):
        theirs, ours = installed / "shardtrain/configs" / name, ROOT / "configs" / name
        assert theirs.read_bytes() == ours.read_bytes()
