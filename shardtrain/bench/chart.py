"""A bar chart of ratios, with quartiles as whiskers. Matplotlib is optional and imported only here."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardtrain.bench.statistics import Spread

MISSING = 'no picture: matplotlib is not installed (pip install "shardtrain[bench]")'


def draw(path: Path, title: str, label: str, groups: Mapping[str, Mapping[str, Spread]]) -> str | None:
    """One panel a group, one bar an entry, in the order given.

    Returns why there is no picture, if there is none.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return MISSING
    groups = {name: bars for name, bars in groups.items() if bars}
    if not groups:
        return "no picture: there is nothing to compare"
    height = 1.2 + sum(0.6 + 0.32 * len(bars) for bars in groups.values())
    figure = Figure(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(figure)
    heights = [0.6 + 0.32 * len(bars) for bars in groups.values()]
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=heights)
    for axes, (name, bars) in zip(panels[:, 0], groups.items(), strict=True):
        _panel(axes, name, bars)
    panels[-1, 0].set_xlabel(label)
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=150)
    return None


def _panel(axes, name: str, bars: Mapping[str, Spread]) -> None:  # type: ignore[no-untyped-def]
    names = list(bars)[::-1]  # matplotlib counts from the bottom
    values = [bars[bar].median for bar in names]
    below = [bars[bar].median - bars[bar].low for bar in names]
    above = [bars[bar].high - bars[bar].median for bar in names]
    colors = ["tab:orange" if bar.startswith("shardtrain") else "tab:blue" for bar in names]
    drawn = axes.barh(names, values, xerr=[below, above], color=colors, ecolor="0.3", capsize=2)
    axes.bar_label(drawn, labels=[f"{value:.2f}" for value in values], padding=6, fontsize=8)
    axes.axvline(1.0, color="0.5", linewidth=0.8, linestyle=":")
    axes.margins(x=0.15)
    axes.set_title(name, fontsize=9, loc="left")
    axes.tick_params(labelsize=8)
