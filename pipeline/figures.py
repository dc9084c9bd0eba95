"""The memory curve as a picture."""

from pathlib import Path
from typing import Any, Literal

import matplotlib

matplotlib.use("Agg")  # before pyplot: there may be no screen

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from pipeline.record import MIB, RunRecord
from pipeline.recorder import Recorder

INK, QUIET, _ALLOCATED, _PEAK = "#1f2937", "#9ca3af", "#d97706", "#b91c1c"
_CURVE = "#2563eb"
_PHASES = {"start-up": "#f3f4f6", "warm-up": "#e5e7eb", "measured steps": "#ffffff"}
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def memory_figure(record: RunRecord, recorder: Recorder, path: Path) -> None:
    """Draw the memory of one training over time, with its phases and its peak, as a PNG."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(9, 4.8), dpi=150, layout="constrained")
        _phases(axes, recorder)
        _curves(axes, recorder)
        _peak(axes, recorder)
        _frame(axes, record)
        figure.savefig(path)
        plt.close(figure)


def _phases(axes: Axes, recorder: Recorder) -> None:
    """Shade start-up, warm-up and measured steps; those too narrow for their name share a line."""
    end = max([sample.seconds for sample in recorder.samples], default=0.0)
    steps, warmup = recorder.steps, recorder.warmup
    first = steps[0].begun if steps else end
    steady = steps[warmup - 1].ended if steps and warmup else first
    last = steps[-1].ended if steps else end
    spans = zip(_PHASES.items(), ((0.0, first), (first, steady), (steady, last)), strict=True)
    narrow = []
    for (name, color), (begin, finish) in spans:
        if finish <= begin:
            continue
        axes.axvspan(begin, finish, color=color, lw=0, zorder=0)
        if finish - begin < 0.1 * end:
            narrow.append(name)
            continue
        _above(axes, (begin + finish) / 2, name, "center")
    if narrow:
        _above(axes, 0.0, ", ".join(narrow), "left")
    for mark in steps[warmup:] if len(steps) <= 40 else []:
        axes.axvline(mark.ended, color=_PHASES["warm-up"], lw=0.8, zorder=0)


def _above(axes: Axes, seconds: float, text: str, align: Literal["left", "center"]) -> None:
    axes.text(
        seconds,
        1.01,
        text,
        ha=align,
        va="bottom",
        color=QUIET,
        fontsize=9,
        transform=axes.get_xaxis_transform(),
    )


def _curves(axes: Axes, recorder: Recorder) -> None:
    for name, label, color, width in (
        ("process", "taken by the training", _CURVE, 1.8),
        ("reserved", "reserved by torch", QUIET, 1.2),
        ("allocated", "allocated by torch", _ALLOCATED, 1.0),
    ):
        readings = [(s.seconds, getattr(s, name)) for s in recorder.samples]
        times = [seconds for seconds, count in readings if count is not None]
        heights = [count / MIB for _, count in readings if count is not None]
        if heights:
            axes.plot(times, heights, color=color, lw=width, label=label)
        if heights and name == "process":
            axes.fill_between(times, heights, color=color, alpha=0.08, lw=0)
    if len(axes.lines) > 1:
        axes.legend(loc="lower right", frameon=False, fontsize=9)


def _peak(axes: Axes, recorder: Recorder) -> None:
    peak = recorder.peak
    if peak is None or not peak.process:
        return
    height = peak.process / MIB
    axes.axhline(height, color=_PEAK, lw=0.8, ls=(0, (4, 3)))
    axes.plot([peak.seconds], [height], "o", color=_PEAK, ms=5)
    end = recorder.samples[-1].seconds
    right = peak.seconds > end / 2
    axes.annotate(
        f"peak {height:,.0f} MiB",
        (peak.seconds, height),
        xytext=(-8 if right else 8, 6),
        textcoords="offset points",
        ha="right" if right else "left",
        color=_PEAK,
        fontweight="bold",
    )
    axes.set_ylim(0, height * 1.15)


def _frame(axes: Axes, record: RunRecord) -> None:
    speed = record.metrics.get("samples_per_second")
    pace = f"   {speed:.4g} samples/s" if speed else ""
    device = record.device.name if record.device else ""
    axes.set_title(
        f"{record.config.preset.name} on {record.config.workload_name}{pace}",
        loc="left", fontsize=13, fontweight="bold", pad=18,
    )  # fmt: skip
    axes.set_title(device, loc="right", fontsize=9, color=QUIET, pad=18)
    axes.set_xlabel("seconds since the training process took up the training")
    axes.set_ylabel("memory, MiB")
    axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    axes.margins(x=0)
