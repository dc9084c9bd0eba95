"""The picture of a comparison: memory against throughput, what the peaks hold, all curves."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import StrMethodFormatter

from pipeline.comparison import LEDGER, Comparison
from pipeline.figures import INK, QUIET, STYLE

Curves = Sequence[Sequence[tuple[float, float]]]
"""(second, MiB) of one training of each row."""

COLORS = ("#2563eb", "#d97706", "#059669", "#b91c1c", "#7c3aed", "#0891b2", "#be185d", "#65a30d")
PARTS = dict(
    zip(
        LEDGER,
        ("#1e40af", "#0891b2", "#7c3aed", "#d97706", "#d1d5db", "#9ca3af"),
        strict=True,
    )
)


def comparison_figure(comparison: Comparison, curves: Curves, path: Path) -> None:
    """Draw it as a PNG."""
    height = 7.2 + 0.22 * len(comparison.rows)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplot_mosaic(
            [["tradeoff", "parts"], ["curves", "curves"]],
            figsize=(12, height),
            dpi=130,
            layout="constrained",
        )
        _tradeoff(axes["tradeoff"], comparison)
        _parts(axes["parts"], comparison)
        _curves(axes["curves"], comparison, curves)
        title = f"{comparison.ladder} on {comparison.workload}, {comparison.device}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
        figure.savefig(path)
        plt.close(figure)


def color(index: int) -> str:
    """Return the colour of a row, the same in every figure."""
    return COLORS[index % len(COLORS)]


def _tradeoff(axes: Axes, comparison: Comparison) -> None:
    for index, row in enumerate(comparison.rows):
        if row.memory is None or row.speed is None:
            continue
        x, y = row.speed.median, row.memory.median
        axes.errorbar(
            x, y,
            xerr=[[max(x - row.speed.low, 0)], [max(row.speed.high - x, 0)]],
            fmt="o", ms=7, color=color(index), capsize=3, lw=1.2,
        )  # fmt: skip
        axes.annotate(
            row.preset, (x, y), xytext=(6, 6), textcoords="offset points",
            color=color(index), fontsize=9,
        )  # fmt: skip
    axes.set_title("less memory is down, faster is right", loc="left", fontsize=10, color=QUIET)
    axes.set_xlabel("samples per second")
    axes.set_ylabel("peak memory, MiB")
    axes.margins(x=0.2, y=0.15)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _parts(axes: Axes, comparison: Comparison) -> None:
    rows = [row for row in comparison.rows if row.memory]
    known = any(row.ledger for row in rows)
    for place, row in enumerate(rows):
        left = 0.0
        for part in LEDGER if row.ledger else ():
            width = row.ledger.get(part, 0.0)
            axes.barh(place, width, left=left, color=PARTS[part], height=0.65)
            left += width
        assert row.memory
        if not row.ledger:
            axes.barh(place, row.memory.median, color=QUIET, height=0.65)
        axes.text(row.memory.median, place, f" {row.memory.median:,.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row.preset for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("MiB at the peak")
    axes.margins(x=0.12)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    said = "what the peak holds" if known else "peak memory"
    axes.set_title(said, loc="left", fontsize=10, color=QUIET)
    if known:
        handles = [Patch(color=PARTS[part]) for part in LEDGER]
        axes.legend(
            handles, LEDGER, ncols=3, fontsize=8, frameon=False,
            loc="upper left", bbox_to_anchor=(0, -0.14),
        )  # fmt: skip


def _curves(axes: Axes, comparison: Comparison, curves: Curves) -> None:
    for index, (row, points) in enumerate(zip(comparison.rows, curves, strict=True)):
        if points:
            seconds, heights = zip(*points, strict=True)
            axes.plot(seconds, heights, color=color(index), lw=1.6, label=row.preset)
    axes.set_title(
        "memory taken by each training, first repeat", loc="left", fontsize=10, color=QUIET
    )
    axes.set_xlabel("seconds since the training process took up the training")
    axes.set_ylabel("memory, MiB")
    axes.set_ylim(bottom=0)
    axes.margins(x=0)
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if axes.lines:
        axes.legend(frameon=False, fontsize=9, loc="lower right", labelcolor=INK)
