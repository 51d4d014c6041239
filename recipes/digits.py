"""Train ten seeds of the `resnet` recipe on the digits, beside a support vector machine on the same split.

    python -m shardtrain.recipes.digits                     ten runs of one process
    python -m shardtrain.recipes.digits --ranks 2           of two ranks each
    python -m shardtrain.recipes.digits --out outputs/choose data.validation=0.2 train.epochs=6

The last one judges a setting by a fifth of the training images. The 360 test images are for the setting that
is chosen. Finished runs in the output directory are not repeated. The support vector machine needs
scikit-learn (`pip install shardtrain[digits]`).
"""

from __future__ import annotations

import argparse
import importlib.resources
import io
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Split(NamedTuple):
    """Hold images as rows, float64 [images, 64], and labels, of both parts."""

    train: tuple[Any, Any]
    held_out: tuple[Any, Any]


def split() -> Split:
    """Return the fixed split that the training program uses."""
    packed = importlib.resources.files("shardtrain.job.data").joinpath("digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as arrays:
        parts = [(arrays[f"{part}_images"], arrays[f"{part}_labels"]) for part in ("train", "val")]
    return Split(*((images.reshape(len(images), -1).astype(np.float64), labels) for images, labels in parts))


def svm_accuracy() -> float | None:
    """Return the accuracy in percent of scikit-learn's RBF support vector machine; None without it."""
    try:
        from sklearn.svm import SVC
    except ImportError:
        return None
    parts = split()
    return 100 * float(SVC().fit(*parts.train).score(*parts.held_out))


def run(seed: int, folder: Path, ranks: int, overrides: Sequence[str]) -> dict[str, Any]:
    """Return result.json of the run with `seed`, after running it unless it is finished."""
    found = folder / "result.json"
    if not found.exists() or json.loads(found.read_text())["status"] != "finished":
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)] if ranks > 1 else []
        options = ["+recipe=resnet", f"seed={seed}", f"run.dir={folder}", *overrides]
        subprocess.run([sys.executable, *launcher, "-m", "shardtrain.train", *options], check=True)
    result = json.loads(found.read_text())
    assert isinstance(result, dict)
    return result


def report(results: Mapping[int, Mapping[str, Any]], svm: float | None) -> str:
    """Return the table of results by seed: on validation images if there are any, else on test images."""
    rows = ["seed  acc1 %  seconds"]
    rows += [f"{seed:<4}  {r['val/acc1']:6.2f}  {r['seconds']:7.1f}" for seed, r in results.items()]
    found = [result["val/acc1"] for result in results.values()]
    mean, deviation = statistics.mean(found), statistics.stdev(found) if len(found) > 1 else 0.0
    rows.append(f"mean of {len(found)}: {mean:.2f} %, standard deviation {deviation:.2f}")
    if any("test/acc1" in result for result in results.values()):
        return "\n".join(
            [*rows, "on validation images; the test images are for the settings that are chosen"]
        )
    beside = "scikit-learn is not installed" if svm is None else f"{svm:.2f} %"
    images = len(split().held_out[1])
    rows.append(
        f"{images} test images, so one is {100 / images:.2f} points; RBF-SVM on the same split: {beside}"
    )
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="ranks per run")
    parser.add_argument("--seeds", type=int, default=10, help="number of runs, seeded from 0 on")
    parser.add_argument("--out", type=Path, default=Path("outputs/digits-report"))
    parser.add_argument("overrides", nargs="*", help="settings of the runs, key=value")
    asked = parser.parse_args(arguments)
    seeds = range(asked.seeds)
    results = {seed: run(seed, asked.out / str(seed), asked.ranks, asked.overrides) for seed in seeds}
    print(report(results, svm_accuracy()))


if __name__ == "__main__":
    main()
