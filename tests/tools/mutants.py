"""Plant one fault after the other, each in one line, and see whether the tests that must notice do.

    python tests/tools/mutants.py            all of mutants.txt
    python tests/tools/mutants.py 20 40      those numbered from 20 to 40

`tests/mutants.txt` has arguments of pytest on lines of their own, and below them, indented, the faults that
these tests must find: `FILE: WHAT STANDS THERE => WHAT IT BECOMES`. Arguments with `--long` are of faults
that no default test finds; all others are found by default. Those of optuna and of test_wild need `.[wild]`.
It is run by hand, in a copy of the checkout. A fault whose text does not stand in its file exactly once ends
the run before it begins.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests/mutants.txt"
LONGEST_S = 300  # of the tests of one fault; a fault that makes them hang is found
VERDICTS = {"passed": "SURVIVED", "failed": "found", "hung": "hung"}


class Mutant(NamedTuple):
    number: int
    tests: str
    file: str
    before: str
    after: str


def mutants() -> list[Mutant]:
    """Read the list; SystemExit names each fault that cannot be planted."""
    tests = ""
    listed = list[Mutant]()
    problems = []
    for line in filter(None, LIST.read_text().splitlines()):
        if not line.startswith("  "):
            tests = line
            continue
        file, _, change = line.strip().partition(": ")
        before, _, after = change.partition(" => ")
        path = file if file.startswith(("recipes/", "configs/", "tests/", "docs/")) else f"shardtrain/{file}"
        mutant = Mutant(len(listed) + 1, tests, path, before, after)
        listed.append(mutant)
        times = (ROOT / path).read_text().count(before) if (ROOT / path).exists() else 0
        if times != 1 or before == after:
            problems.append(f"{mutant.number}: {path} has {before!r} {times} times, expected once")
    if problems:
        sys.exit("\n".join(problems))
    return listed


def copy(folder: Path) -> Path:
    """Copy what git knows, so that the copy's package comes before the installed one."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, names.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    for name in ("recipes", "configs"):
        (folder / "shardtrain" / name).symlink_to(folder / name)
    return folder


def outcome(tests: str, folder: Path) -> str:
    """Run ``tests`` in ``folder`` and return "passed", "failed" or "hung"; SystemExit if there are none."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    own = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        words = [*command, *shlex.split(tests)]
        run = subprocess.run(words, cwd=folder, env=os.environ | own, capture_output=True, timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        return "hung"
    if run.returncode not in (0, 1):
        sys.exit(f"pytest {tests} ended with {run.returncode}:\n{run.stdout.decode()[-2000:]}")
    return "failed" if run.returncode else "passed"


def main() -> None:
    first, last = map(int, sys.argv[1:] or (1, 1_000_000))
    chosen = [m for m in mutants() if first <= m.number <= last]
    survivors = []
    known = set[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = copy(Path(name))
        for number, tests, file, before, after in chosen:
            if tests not in known and outcome(tests, folder) != "passed":
                sys.exit(f"pytest {tests} fails without a fault")
            known.add(tests)
            path = folder / file
            text = path.read_text()
            path.write_text(text.replace(before, after))
            verdict = VERDICTS[outcome(tests, folder)]
            path.write_text(text)
            survivors += [number] if verdict == "SURVIVED" else []
            tier = "long" if "--long" in tests else "default"
            print(f"{number:>3} {verdict:8} {tier:7} {file}: {after}", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} found; survivors: {survivors or 'none'}")


if __name__ == "__main__":
    main()
