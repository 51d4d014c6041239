"""Stop a training run at random moments until it has ended, and compare it with an undisturbed one, exactly.

    python tests/torture.py SECONDS [SEED]

Each trial trains on two ranks. It starts the same command again whenever a rank or torchrun got SIGKILL,
SIGTERM or Ctrl-C, and fails at the first hang, orphan, file left in /dev/shm, or difference.
`two_hosts.py --flap` does the same to the link between two hosts.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, LIMIT_S = 60, 60.0
SETTINGS = (
    *("+recipe=resnet", "model=vit_cifar", "model.layers=2", "model.width=48", "model.heads=2"),
    *("model.mlp_width=96", "data.workers=1", "ema.decay=0.9", "ema.every_steps=2"),
    *(f"train.max_steps={STEPS}", "train.log_every=5", "checkpoint.every_steps=7"),
)
VICTIMS = [(0, "SIGKILL"), (1, "SIGKILL"), (1, "SIGTERM"), (0, "SIGTERM"), (0, "SIGINT"), (2, "SIGKILL")]


def start(folder: Path) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (folder / "said").open("a") as said:
        command = [*torchrun, "-m", "shardtrain.train", *SETTINGS, f"run.dir={folder}/run"]
        return subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, text=True)


def is_alive(process: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def disturb(torchrun: subprocess.Popen[str], choice: random.Random) -> str:
    """Send a signal after a while, and wait until all processes are gone. Return what was done."""
    ranks: list[int] = []
    try:
        seconds = choice.uniform(3, 15)
        torchrun.wait(seconds)
        return "ended"
    except subprocess.TimeoutExpired:
        children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
        ranks = [int(rank) for rank in children.read_text().split()]
        victim, name = choice.choice(VICTIMS)
        os.kill([torchrun.pid, *ranks][min(victim, len(ranks))], getattr(signal, name))
    torchrun.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while alive := [rank for rank in ranks if is_alive(rank)]:
        assert time.monotonic() < deadline, f"orphans: {alive}"
        time.sleep(0.1)
    return f"{name} to {'a rank' if victim else 'torchrun'} after {seconds:.1f} s"


def outcome(folder: Path) -> tuple[object, ...]:
    """Return losses, accuracies and exported weights of a run that has ended."""
    file = folder / "weights.safetensors"
    export = [sys.executable, "-m", "shardtrain.export", f"run={folder}/run", f"out={file}"]
    subprocess.run(export, check=True, capture_output=True, timeout=LIMIT_S)
    result = json.loads((folder / "run/result.json").read_text())
    kinds = ("train/", "val/", "test/", "best")
    scores = {key: value for key, value in result.items() if key.startswith(kinds)}
    return result["step"], scores, file.read_bytes()


def main(seconds: float, seed: int) -> None:
    choice, deadline = random.Random(seed), time.monotonic() + seconds
    before, trials = os.listdir("/dev/shm"), 0
    with tempfile.TemporaryDirectory() as name:
        undisturbed = Path(name, "undisturbed")
        undisturbed.mkdir()
        assert start(undisturbed).wait(5 * LIMIT_S) == 0, (undisturbed / "said").read_text()
        expected = outcome(undisturbed)
        while time.monotonic() < deadline:
            folder = Path(name, str(trials := trials + 1))
            folder.mkdir()
            while (done := disturb(torchrun := start(folder), choice)) != "ended" or torchrun.returncode:
                print(f"trial {trials}: {done}, exit code {torchrun.returncode}", flush=True)
                assert done != "ended", (folder / "said").read_text()
            assert outcome(folder) == expected, f"trial {trials} differs: {folder}"
            assert os.listdir("/dev/shm") == before
    print(f"{trials} trials ended as the undisturbed run did (seed {seed})")


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
