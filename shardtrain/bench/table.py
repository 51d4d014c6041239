"""Results as text, best first."""

from __future__ import annotations

from collections.abc import Mapping

from shardtrain.bench.contenders import TITLES
from shardtrain.bench.judging import EXEMPT
from shardtrain.bench.statistics import Spread
from shardtrain.bench.steps import Measurement, Verdict
from shardtrain.text import aligned, counted


def of_steps(measurement: Measurement) -> str:
    """One line a contender: time of a step, ratio to the reference with quartiles, loss difference."""
    verdicts = measurement.verdicts()
    ok = {name: verdict for name, verdict in verdicts.items() if verdict.status == "ok"}
    ranked = sorted(ok, key=lambda name: _order(ok[name]))
    reference = TITLES[measurement.reference]
    rows = [["", "ms a step", f"of {reference}", "quartiles", "losses"]]
    rows += [_row(name, ok[name]) for name in ranked]
    precision = "" if measurement.precision == "fp32" else f" in {measurement.precision}"
    lines = [f"{measurement.case.shape}{precision}, {counted(measurement.rounds, 'round')}", *aligned(rows)]
    if ok and measurement.reference not in ok:
        lines.append(f"No ratios: {reference} has no right answers to compare with.")
    if ok and measurement.judge is None:
        lines.append("Losses were not compared: no peer is among the contenders.")
    return "\n".join([*lines, *_left_out(verdicts)])


def of_suite(means: Mapping[str, Mapping[str, float]], cases: int) -> str:
    """Geometric means over the cases, one column a reference."""
    names = sorted({name for column in means.values() for name in column}, key=list(TITLES).index)
    rows = [["", *(f"of {TITLES[reference]}" for reference in means)]]
    for name in names:
        cells = [f"{column[name]:.2f}" if name in column else "-" for column in means.values()]
        rows.append([TITLES[name], *cells])
    return "\n".join([f"geometric means over {cases} cases", *aligned(rows)])


def quartiles(found: Spread) -> str:
    return f"{found.low:.2f}–{found.high:.2f}"


def _order(verdict: Verdict) -> float:
    found = verdict.ratio or verdict.seconds
    assert found is not None
    return found.median


def _row(name: str, verdict: Verdict) -> list[str]:
    assert verdict.seconds is not None
    ratio = verdict.ratio
    return [
        TITLES[name],
        f"{verdict.seconds.median * 1e3:.1f}",
        f"{ratio.median:.2f}" if ratio else "-",
        quartiles(ratio) if ratio else "-",
        _losses(name, verdict.loss_difference),
    ]


def _losses(name: str, difference: float | None) -> str:
    if difference is None:
        return "not compared"
    return f"differ by {difference:.0e}" if name in EXEMPT else f"equal to {difference:.0e}"


def _left_out(verdicts: Mapping[str, Verdict]) -> list[str]:
    return [
        f"{TITLES[name]}: {verdict.status}, not ranked: {verdict.reason}"
        for name, verdict in verdicts.items()
        if verdict.status != "ok"
    ]
