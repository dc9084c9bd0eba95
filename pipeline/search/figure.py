"""Memory against throughput: every trial, the floor, the Pareto front and the winner."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no screen

import plotly.graph_objects as go
from matplotlib import pyplot as plt

from pipeline.search.answer import Answer, Row, figures, is_feasible, pareto

_INK, _QUIET, _BAD, _GOOD, _START, _WINNER = (
    "#1f2937",
    "#9ca3af",
    "#d97706",
    "#2563eb",
    "#111827",
    "#b91c1c",
)
_X, _Y = "samples per second", "peak memory, MiB"


class _Group(NamedTuple):
    label: str
    color: str
    marker: str
    """matplotlib's; plotly's name follows from it."""
    size: float
    rows: Sequence[Row]


_PLOTLY_MARKERS = {"o": "circle", "X": "x", "D": "diamond", "*": "star"}


def _groups(answer: Answer) -> list[_Group]:
    shown = [row for row in answer.rows if row.peak_memory_mib and row.samples_per_second]
    trials = [row for row in shown if row.role != "start"]
    found = [
        _Group("reaches the floor", _GOOD, "o", 7, [r for r in trials if is_feasible(r)]),
        _Group("does not", _BAD, "X", 7, [r for r in trials if not is_feasible(r)]),
        _Group("start", _START, "D", 8, [answer.start] if answer.start else []),
        _Group("winner", _WINNER, "*", 16, [answer.best] if answer.best else []),
    ]
    return [
        group._replace(rows=[r for r in group.rows if r.peak_memory_mib and r.samples_per_second])
        for group in found
    ]


def _xy(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return (
        [row.samples_per_second or 0.0 for row in rows],
        [row.peak_memory_mib or 0.0 for row in rows],
    )


def _title(answer: Answer) -> str:
    if answer.best is None:
        return "Nothing reaches the floor"
    return f"Least memory: {answer.best.configuration}, {figures(answer.best)}"


def write_png(answer: Answer, path: Path) -> None:
    """Draw the figure for a page."""
    style: dict[Any, Any] = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        figure, axes = plt.subplots(figsize=(9, 5.2), dpi=150, layout="constrained")
        front = _xy(pareto(answer.rows))
        axes.step(*front, where="pre", color=_QUIET, lw=1.2, label="Pareto front", zorder=1)
        for group in _groups(answer):
            x, y = _xy(group.rows)
            if x:
                area = group.size**2
                axes.scatter(
                    x, y, s=area, c=group.color, marker=group.marker, label=group.label, zorder=3
                )
        if answer.floor:
            axes.axvline(answer.floor, color=_WINNER, lw=1, ls=(0, (4, 3)), zorder=2)
            axes.annotate(
                f"floor {answer.floor:.4g}",
                (answer.floor, 0.5),
                xycoords=("data", "axes fraction"),
                xytext=(-4, 0),
                textcoords="offset points",
                rotation=90,
                ha="right",
                va="center",
                color=_WINNER,
                fontsize=9,
            )
        title = "\n".join(wrap(_title(answer), 90))
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=_INK)
        axes.set_xlabel(_X)
        axes.set_ylabel(_Y)
        axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
        axes.legend(frameon=False, fontsize=9)
        figure.savefig(path)
        plt.close(figure)


def write_html(answer: Answer, path: Path) -> None:
    """Draw the figure for a browser: complete in one file, each point tells what it is."""
    figure = go.Figure()
    x, y = _xy(pareto(answer.rows))
    line = {"color": _QUIET, "shape": "vh"}
    figure.add_scatter(x=x, y=y, mode="lines", line=line, name="Pareto front", hoverinfo="skip")
    for group in _groups(answer):
        x, y = _xy(group.rows)
        marker = {
            "color": group.color,
            "symbol": _PLOTLY_MARKERS[group.marker],
            "size": group.size + 3,
        }
        texts = [
            f"{row.role} {row.trial}: {row.configuration}<br>{figures(row)}<br>{row.verdict}"
            for row in group.rows
        ]
        figure.add_scatter(
            x=x, y=y, mode="markers", marker=marker, name=group.label, text=texts, hoverinfo="text"
        )
    if answer.floor:
        text = f"floor {answer.floor:.4g}"
        figure.add_vline(answer.floor, line_dash="dash", line_color=_WINNER, annotation_text=text)
    figure.update_layout(
        title=_title(answer), xaxis_title=_X, yaxis_title=_Y, template="plotly_white"
    )
    figure.write_html(path, include_plotlyjs=True)
