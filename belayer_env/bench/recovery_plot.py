"""The recovery bench as a picture: how long each way back takes, and an env of each policy on a time axis."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from belayer_env.bench.overhead import Arm
from belayer_env.bench.recovery import FORKS, Comebacks
from belayer_env.picture import add_legend, draw_lanes, new_figure, save_figure
from belayer_env.timeline import Kind, in_words, lanes, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_recoveries", "waits_back"]

SHOWN_S = 75.0
"""Of each env, at its end, with the kill: so a checkpoint of 0.1 s is still as wide as it is long."""

_COLOUR, _COLOURS = "#cc79a7", {"fork": "#56b4e9"}


def draw_recoveries(found: Comebacks, arms: Mapping[str, Arm], path: Path) -> None:
    """A PNG, 1600 pixels wide.

    Raises:
        PlottingUnavailable: matplotlib is not installed.
        RuntimeFailed, StoreFull: the file cannot be written."""
    shown = [
        (f"{name}, one env, its end and a kill: {summary(arm.drilled)}", arm.drilled)
        for name, arm in arms.items()
        if arm.drilled is not None
    ]
    figure = new_figure(260 + 240 * len(shown))
    grid = figure.subplots(1 + len(shown), 1, squeeze=False, height_ratios=[1.0] + [1.1] * len(shown))
    _draw_bars(grid[0, 0], waits_back(found))
    kinds: set[Kind] = set()
    for axes, (title, telemetry) in zip(grid[1:, 0], shown, strict=True):
        end_s = lanes(telemetry).end_s
        kinds |= draw_lanes(axes, lanes(telemetry), max(0.0, end_s - SHOWN_S), end_s)
        axes.set_title(title, fontsize=10, loc="left")
    if shown:
        grid[-1, 0].set_xlabel("seconds since the episode began")
        add_legend(figure, kinds)
    save_figure(figure, path)


def waits_back(found: Comebacks) -> dict[str, float]:
    """Median seconds until a command has answered, by the way back, the slowest first. Pure."""
    ways = {
        "fresh container + replay": [comeback.answered_s for comeback in found.replays],
        "restore of the newest checkpoint": [comeback.answered_s for comeback in found.restores],
        "standby swap": [comeback.answered_s for comeback in found.swaps],
        f"fork({FORKS}), all of them": [fork.answered_s for fork in found.forks],
    }
    return {way: statistics.median(times) for way, times in ways.items() if times}


def _draw_bars(axes: Axes, waits: Mapping[str, float]) -> None:
    names = list(waits)
    colours = [_COLOURS.get(name.partition("(")[0], _COLOUR) for name in names]
    axes.barh(range(len(names)), [waits[name] for name in names], color=colours, height=0.65)
    for height, name in enumerate(names):
        axes.annotate(
            in_words(waits[name]),
            (waits[name], height),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
        )
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(waits.values()) / 3, max(waits.values()) * 3)
    axes.set_xlabel("seconds until the next command has answered (logarithmic)")
    axes.set_title("the way back after a kill", fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
