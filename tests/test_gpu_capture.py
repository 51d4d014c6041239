"""What a card will run for at most six minutes: dry, and with scenes that fail, hang or end their process."""

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_capture
from gpu_capture import CARD_ONLY, EXTRAS, PROGRAM, RANKS, SCENES, TABLE

NAMES = ["first", "second", "third", "fourth"]
FIGURES = {"eager_ms": 2.0, "captured_ms": 1.0, "eager_launches": 9, "captured_launches": 1}
FIGURES |= {"eager_reserved_mb": 5, "captured_reserved_mb": 6, "right": True}


def scripted(actions: dict[str, str]) -> gpu_capture.Command:
    """Return commands of a process that does to each scene what ``actions`` say, and else finds figures."""
    script = f"""
import json, sys, time
for name in sys.argv[2:]:
    finding = {{"what": name, "counted": sys.argv[1] == "counts"}}
    action = {actions!r}.get(name, "")
    if action == "hang": time.sleep(60)
    if action == "abort" or action == "profiler" and finding["counted"]: sys.exit(9)
    print("noise", flush=True)
    print("FOUND " + json.dumps(finding | ({{"error": "E"}} if action == "error" else {{}})), flush=True)
    if action == "error": sys.exit(1)
print("END", flush=True)
"""
    return lambda names, way: [sys.executable, "-c", script, "counts" if way.counts else "", *names]


@pytest.fixture
def all_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Return what yields all findings of four scenes. Two ranks and the program are never run."""
    monkeypatch.setattr(gpu_capture, "SCENES", dict.fromkeys(NAMES))
    monkeypatch.setattr(gpu_capture, "two_ranks", lambda *_: {"what": RANKS})
    monkeypatch.setattr(gpu_capture, "program", lambda *_: {"what": PROGRAM})

    def run(actions: dict[str, str], left: Callable[[], float] = lambda: 600.0) -> list[dict[str, Any]]:
        return [*gpu_capture.findings(tmp_path, False, left, scripted(actions))]

    return run


def whats(found: Sequence[dict[str, Any]]) -> list[str]:
    return [finding["what"] for finding in found]


@pytest.mark.long
@pytest.mark.parametrize("failing", [["first"], ["second", "third"], ["fourth"], NAMES])
@pytest.mark.parametrize("action", ["error", "abort"])
def test_a_failing_scene_stops_no_other(
    all_findings: Callable[..., list[dict[str, Any]]], failing: list[str], action: str
) -> None:
    found = all_findings(dict.fromkeys(failing, action))
    scenes = [finding for finding in found if finding["what"] != "launches"]
    assert whats(scenes) == [*NAMES, RANKS, PROGRAM]
    assert [finding["what"] for finding in scenes if "error" in finding] == failing
    assert all("died" not in finding for finding in found)
    if action == "abort":
        assert "the process ended with 9: " in scenes[NAMES.index(failing[0])]["error"]


def test_a_profiler_that_ends_the_process_costs_the_launches_only(
    all_findings: Callable[..., list[dict[str, Any]]],
) -> None:
    found = all_findings({"second": "profiler"})
    assert whats(found) == ["first", "launches", "second", "third", "fourth", RANKS, PROGRAM]
    assert [finding.get("counted") for finding in found] == [True, None, False, False, False, None, None]
    assert "error" not in found[2]


@pytest.mark.long
def test_a_scene_that_hangs_is_stopped(
    all_findings: Callable[..., list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is short here, and that of others is not: only its end is awaited."""
    limits = itertools.chain([86.0, 86.0, 86.0, 71.0], itertools.repeat(600.0))
    monkeypatch.setattr(gpu_capture, "RANKS_S", 10)
    monkeypatch.setattr(gpu_capture, "PROGRAM_S", 60)
    found = all_findings({"third": "hang"}, lambda: next(limits))
    assert whats(found) == [*NAMES, RANKS, PROGRAM]
    assert found[2]["error"] == "stopped after 1 s"


def test_scenes_are_cut_in_time_for_the_program(all_findings: Callable[..., list[dict[str, Any]]]) -> None:
    found = all_findings({}, lambda: gpu_capture.PROGRAM_S + 14.0)
    assert [finding.get("cut") for finding in found] == ["no time was left"] * 4 + [None] * 2


def test_findings_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written as soon as they are there."""
    first, second, third, *_ = SCENES
    found = [
        {"what": first, **FIGURES},
        {"what": second, **FIGURES, "right": False},
        {"what": third, "peer_error": "E"},
        {"what": "clip", **FIGURES},
        {"what": PROGRAM, "right": True},
    ]
    monkeypatch.setattr(gpu_capture, "findings", lambda *_: iter(found))
    for count, finding in enumerate(gpu_capture.report(tmp_path, True, lambda: 1.0), 1):
        lines = (tmp_path / "captured.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == found[:count]
        assert finding == found[count - 1]
    text = (tmp_path / "captured.md").read_text()
    small = next(iter(TABLE))
    assert f"| {small} | 2.0 → 1.0 | 2.0 → 1.0 (bits differ) | failed | – | – | – |" in text
    assert f"| {small} | 9 → 1 | 9 → 1 (bits differ) | failed | – | – | – |" in text
    assert "| clip | 2.0 → 1.0 | 9 → 1 | 5 → 6 | equal |" in text


def test_what_was_left_out_and_what_went_wrong_come_last() -> None:
    found = [
        {"what": "first", "right": True},
        {"what": "second", "right": False},
        {"what": "third", "cut": "no time was left"},
        {"what": "fourth", "peer_error": "E"},
        {"what": RANKS, "left_out": "two GPUs"},
    ]
    assert gpu_capture.last_lines(found) == [
        "left out: 2",
        "third: no time was left",
        "two ranks: two GPUs",
        "peers that failed: 1",
        "fourth: E",
        "went wrong: 1",
        '{"what": "second", "right": false}',
    ]
    assert gpu_capture.last_lines(found[:1]) == [
        "left out: nothing",
        "peers that failed: nothing",
        "went wrong: nothing",
    ]


@pytest.fixture
def two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Any]]:
    """Return the finding of two ranks that share a GPU; in their place some code runs."""
    python = sys.executable
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    def run(code: str) -> dict[str, Any]:
        script = tmp_path / "ranks"
        script.write_text(f"#!{python}\n{code}")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return gpu_capture.two_ranks(tmp_path, False, 60.0)

    return run


def test_ranks_that_cannot_share_a_gpu_are_left_out(
    two_ranks: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the variable they are not started. With it an older NCCL says so."""
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    text = two_ranks("raise ValueError")["left_out"]
    assert text.endswith("with NCCL 2.30 or newer, and NCCL_MULTI_RANK_GPU_ENABLE=1")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    refused = two_ranks("print('Duplicate GPU detected : rank 0 and rank 1'); exit(1)")
    assert refused["left_out"].endswith("the NCCL that is loaded is older")


def test_ranks_that_end_or_do_not_are_found(
    two_ranks: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    line = "print('noise'); print('FOUND {\"right\": true}')"
    assert two_ranks(line) == {"what": RANKS, "right": True}
    assert two_ranks(f"{line}; exit(3)") == {"what": RANKS, "right": True, "error": "then exit code 3"}
    assert two_ranks("exit('lost')") == {"what": RANKS, "error": "exit code 1: lost\n"}


@pytest.mark.release
@pytest.mark.timeout(800)
def test_steps_captured_on_a_card_run_dry(tmp_path: Path) -> None:
    found = [*gpu_capture.findings(tmp_path, True, lambda: 7000.0)]
    assert whats(found) == [*SCENES, RANKS, PROGRAM]
    by_name = {finding["what"]: finding for finding in found}
    for name, scene in SCENES.items():
        finding = by_name[name]
        if scene.wrapper in CARD_ONLY:
            assert finding["card_only"].startswith("cannot be simulated: "), finding
        else:
            assert finding.get("right"), finding
            assert finding["off"] == 0
        assert finding["eager_ms"] > 0
    assert {by_name[name]["summary"] for name in EXTRAS} == {
        "11 replayed, 3 not: 3 to warm up",
        "10 replayed, 4 not: 3 to warm up, 1 after a change",
    }
    assert by_name[RANKS]["right"]
    assert by_name[RANKS]["off"] == 0
    assert "the program refuses a CPU" in by_name[PROGRAM]["card_only"]
    assert "failed" not in gpu_capture.table(found)
