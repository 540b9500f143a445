"""Pictures of episodes: lanes over a time axis, drawn by matplotlib. Colours: Okabe and Ito, Color Universal
Design (2008), which the colour-blind can tell apart; what was not hidden is hatched as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from belayer_env.disk import disk_errors
from belayer_env.errors import PlottingUnavailable
from belayer_env.telemetry import Telemetry
from belayer_env.timeline import LANES, Bar, Kind, Lanes, lanes, rows, summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["add_legend", "draw_episode", "draw_lanes", "new_figure", "save_figure"]

DPI = 100
LEAST_PIXELS = 2.0
"""A bar is at least so wide, so that a pause of 20 ms is seen in an episode of an hour."""
MOST_LABELS = 8
_LANE_HEIGHT = 0.72


@dataclass(frozen=True, slots=True)
class _Style:
    colour: str
    hatch: str = ""


_STYLES = {
    Kind.BUBBLE: _Style("#d9d9d9"),
    Kind.RESET: _Style("#8c8c8c"),
    Kind.COMMAND: _Style("#0072b2"),
    Kind.WAIT: _Style("#d55e00", "////"),
    Kind.HIDDEN: _Style("#66c2a5"),
    Kind.EXPOSED: _Style("#d55e00", "////"),
    Kind.PAUSE: _Style("#00543d"),
    Kind.PUBLISH: _Style("#56b4e9"),
    Kind.RECOVERY: _Style("#cc79a7"),
    Kind.FAULT: _Style("#000000"),
}


def draw_episode(
    telemetry: Telemetry, path: Path, *, title: str, began_s: float = 0.0, ended_s: float | None = None
) -> None:
    """A PNG of 1600 x 600 pixels of the episode, or of the stretch between two instants.

    Raises:
        PlottingUnavailable: matplotlib is not installed.
        RuntimeFailed, StoreFull: the file cannot be written."""
    figure = new_figure(600)
    episode = lanes(telemetry)
    stretches = rows(episode, began_s, episode.end_s if ended_s is None else ended_s)
    grid = figure.subplots(len(stretches), 1, squeeze=False)
    kinds: set[Kind] = set()
    for axes, (row_from, row_to) in zip(grid[:, 0], stretches, strict=True):
        kinds |= draw_lanes(axes, episode, row_from, row_to)
    grid[-1, 0].set_xlabel("seconds since the episode began")
    figure.suptitle(f"{title}\n{summary(telemetry)}", fontsize=12)
    add_legend(figure, kinds)
    save_figure(figure, path)


def draw_lanes(axes: Axes, episode: Lanes, began_s: float, ended_s: float) -> set[Kind]:
    """One stretch of an episode; returns the kinds of bars that are in it."""
    least_s = max(ended_s - began_s, 1e-3) / (axes.bbox.width or 1) * LEAST_PIXELS
    drawn = set()
    for height, kinds in enumerate(reversed(LANES.values())):
        for kind in kinds:
            bars = [bar for bar in episode.of(kind) if bar.ended_s >= began_s and bar.began_s <= ended_s]
            if not bars:
                continue
            drawn.add(kind)
            if kind is Kind.FAULT:
                axes.plot(
                    [bar.began_s for bar in bars],
                    [height] * len(bars),
                    "x",
                    color="black",
                    ms=9,
                    mew=2.5,
                    zorder=4,
                )
            else:
                _draw_bars(axes, kind, bars, height, least_s)
        axes.axhline(height - 0.5, color="#eeeeee", linewidth=0.8, zorder=0)
    _label_recoveries(axes, episode, began_s, ended_s)
    shown_s = max(ended_s - began_s, 1e-3)
    axes.set_xlim(began_s, ended_s + 0.005 * shown_s)  # with room for what ended last
    axes.set_ylim(-0.5, len(LANES) - 0.5)
    axes.set_yticks(range(len(LANES)), list(reversed(LANES)))
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return drawn


def add_legend(figure: Figure, kinds: set[Kind]) -> None:
    """What the colours mean, below; only of what is there."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Patch | Line2D] = []
    for kind in (kind for lane in LANES.values() for kind in lane if kind in kinds):
        style = _STYLES[kind]
        if kind is Kind.FAULT:
            handles.append(Line2D([], [], color="black", marker="x", linestyle="", mew=2.5, label=kind.value))
        else:
            handles.append(
                Patch(facecolor=style.colour, hatch=style.hatch, edgecolor="white", label=kind.value)
            )
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False, fontsize=9)


def new_figure(height_pixels: int) -> Figure:
    """An empty one, 1600 pixels wide.

    Raises:
        PlottingUnavailable: matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlottingUnavailable(
            f"pictures need matplotlib ({error}); run: pip install 'belayer[plot]'"
        ) from error
    # No pyplot: it would choose a window system, and keep every figure.
    return Figure(figsize=(1600 / DPI, height_pixels / DPI), dpi=DPI, layout="constrained")


def save_figure(figure: Figure, path: Path) -> None:
    """Write it as a PNG, whatever the name ends in.

    Raises:
        RuntimeFailed, StoreFull: the file cannot be written."""
    with disk_errors(f"writing {path}"):
        figure.savefig(path, format="png")


def _draw_bars(axes: Axes, kind: Kind, bars: Sequence[Bar], height: int, least_s: float) -> None:
    style = _STYLES[kind]
    thickness = _LANE_HEIGHT * (0.4 if kind is Kind.PAUSE else 1)
    axes.broken_barh(
        [(bar.began_s, max(bar.ended_s - bar.began_s, least_s)) for bar in bars],
        (height - thickness / 2, thickness),
        facecolor=style.colour,
        hatch=style.hatch or None,
        edgecolor="white" if style.hatch else style.colour,
        linewidth=0,
        zorder=3 if kind in (Kind.WAIT, Kind.EXPOSED, Kind.PAUSE) else 2,
    )


def _label_recoveries(axes: Axes, episode: Lanes, began_s: float, ended_s: float) -> None:
    bars = [bar for bar in episode.of(Kind.RECOVERY) if began_s <= bar.ended_s <= ended_s]
    if len(bars) > MOST_LABELS:
        return
    for bar in bars:
        is_late = bar.ended_s > began_s + 0.8 * (ended_s - began_s)
        axes.annotate(
            bar.label,
            (bar.began_s if is_late else bar.ended_s, 0),
            xytext=(-10 if is_late else 10, 0),
            textcoords="offset points",
            ha="right" if is_late else "left",
            va="center",
            fontsize=9,
        )
