"""What a card will run for at most nine minutes, dry."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import gpu_capture


@pytest.mark.release
@pytest.mark.timeout(800)
def test_steps_captured_on_a_card_run_dry(tmp_path: Path) -> None:
    """All scenes, without a failure."""
    command = [sys.executable, gpu_capture.__file__, "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=780, check=False)
    found = [json.loads(line) for line in (tmp_path / "captured.jsonl").read_text().splitlines()]
    names = [*gpu_capture.SCENES, gpu_capture.RANKS]
    assert [each["what"] for each in found] == names, done.stderr
    assert all(each["right"] and each["off"] == 0 for each in found), found
    assert {each["summary"] for each in found} == {
        "11 replayed, 3 not: 3 to warm up",
        "10 replayed, 4 not: 3 to warm up, 1 after a change",
    }
    assert done.returncode == 0


def test_a_scene_that_fails_or_hangs_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {"exit(3)": "exit code 3", "import time; time.sleep(60)": "stopped after 2 s", "print(1)": ""}
    for code, failure in scripts.items():
        line = f"print('FOUND {{\"off\": 0}}', flush=True); {code}"
        ended = gpu_capture.run([sys.executable, "-c", line], tmp_path / "log", 2.0, {})
        assert (ended.findings, ended.failure) == ([{"off": 0}], failure)
