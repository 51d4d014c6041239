"""A bar chart of ratios, with quartiles as whiskers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain import pictures
from shardtrain.bench.statistics import Spread


def draw(path: Path, title: str, label: str, groups: Mapping[str, Mapping[str, Spread]]) -> str | None:
    """One panel a group, one bar an entry, in the order given.

    Returns why there is no picture, if there is none.
    """
    groups = {name: bars for name, bars in groups.items() if bars}
    if not groups:
        return "no picture: there is nothing to compare"
    heights = [0.6 + 0.32 * len(bars) for bars in groups.values()]

    def panels(figure: Any) -> None:
        found = figure.subplots(len(groups), 1, sharex=True, squeeze=False, height_ratios=heights)
        for axes, (name, bars) in zip(found[:, 0], groups.items(), strict=True):
            _panel(axes, name, bars)
        found[-1, 0].set_xlabel(label)
        figure.suptitle(title, fontsize=9)

    picture = pictures.plot(panels, (8, 1.2 + sum(heights)), dpi=150)
    if isinstance(picture, str):
        return picture
    pictures.save(path, picture)
    return None


def _panel(axes: Any, name: str, bars: Mapping[str, Spread]) -> None:
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
