"""The comparison as one HTML file that needs no network: tables, words, interactive figures."""

from html import escape
from pathlib import Path

import plotly.graph_objects as go
from plotly.io import to_html

from pipeline.comparison import LEDGER, Comparison
from pipeline.comparison_figure import PARTS, Curves, color
from pipeline.comparison_text import explanation, headline, remarks, table

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1400px; margin: auto; padding: 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; }
th, td { padding: .35rem .7rem; text-align: right; border-bottom: 1px solid #8885; }
td { white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
p.note { color: #808080; font-size: 13px; margin: .3rem 0; }
"""
_CONFIG = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d"]}
# Grey that is read on white and on black: the page follows the reader's theme, a figure does not.
_GREY = "#808080"


def comparison_page(comparison: Comparison, curves: Curves, path: Path) -> None:
    """Write the page."""
    figures = [_tradeoff(comparison), _parts(comparison), _curves(comparison, curves)]
    drawn = [
        to_html(figure, include_plotlyjs=number == 0, full_html=False, config=_CONFIG)
        for number, figure in enumerate(figures)
    ]
    title = escape(f"{comparison.ladder} on {comparison.workload}")
    first = comparison.rows[0]
    words = "".join(
        f"<h2>{escape(row.preset)}</h2><p>{escape(explanation(row, first))}</p>"
        for row in comparison.rows
    )
    notes = "".join(f'<p class="note">{escape(remark)}</p>' for remark in remarks(comparison))
    said = escape(headline(comparison)).replace("**", "")
    path.write_text(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<link rel="icon" href="data:,"><style>{_STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{said}</p>{_table(comparison)}{notes}{''.join(drawn)}{words}"
        "</body></html>\n",
        encoding="utf-8",
    )


def _table(comparison: Comparison) -> str:
    heads, rows = table(comparison)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>" for cells in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _figure(title: str, x: str, y: str, height: int) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        title={"text": title, "font": {"size": 15}},
        xaxis={"title": x, "gridcolor": "#8883", "zerolinecolor": "#8885"},
        yaxis={"title": y, "gridcolor": "#8883", "zerolinecolor": "#8885"},
        height=height,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _GREY},
        margin={"l": 70, "r": 20, "t": 60, "b": 50},
    )
    return figure


def _tradeoff(comparison: Comparison) -> go.Figure:
    figure = _figure("Memory against throughput", "samples per second", "peak memory, MiB", 420)
    for index, row in enumerate(comparison.rows):
        if row.memory is None or row.speed is None:
            continue
        figure.add_scatter(
            x=[row.speed.median],
            y=[row.memory.median],
            error_x={
                "symmetric": False,
                "array": [row.speed.high - row.speed.median],
                "arrayminus": [row.speed.median - row.speed.low],
            },
            mode="markers+text",
            text=[row.preset],
            textposition="top right",
            marker={"size": 11, "color": color(index)},
            name=row.preset,
            hovertemplate="%{y:,.0f} MiB at %{x:.4g} samples/s",
        )
    figure.update_yaxes(rangemode="tozero")
    figure.update_xaxes(rangemode="tozero")
    figure.update_layout(showlegend=False)
    return figure


def _parts(comparison: Comparison) -> go.Figure:
    rows = [row for row in comparison.rows if row.memory]
    names = [row.preset for row in rows]
    figure = _figure("What the peak holds", "MiB at the peak", "", 160 + 40 * len(rows))
    parts = [part for part in LEDGER if any(part in row.ledger for row in rows)]
    for part in parts:
        values = [row.ledger.get(part) for row in rows]
        figure.add_bar(x=values, y=names, orientation="h", name=part, marker_color=PARTS[part])
    if not parts:
        peaks = [row.memory.median for row in rows if row.memory]
        figure.add_bar(x=peaks, y=names, orientation="h", name="peak", marker_color=_GREY)
    figure.update_layout(barmode="stack", yaxis={"autorange": "reversed", "automargin": True})
    return figure


def _curves(comparison: Comparison, curves: Curves) -> go.Figure:
    figure = _figure("Memory taken by each training, first repeat", "seconds", "memory, MiB", 420)
    for index, (row, points) in enumerate(zip(comparison.rows, curves, strict=True)):
        if points:
            seconds, heights = zip(*points, strict=True)
            figure.add_scatter(
                x=seconds, y=heights, mode="lines", name=row.preset, line={"color": color(index)}
            )
    figure.update_yaxes(rangemode="tozero")
    return figure
