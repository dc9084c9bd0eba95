"""Predict the configurations of a reference table and compare with what was measured.

    python benchmarks/estimate_error.py [results/reference-h200.csv]

No GPU is used. The errors are those of the allocator's peak and of the driver's figure for the
process.
"""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import NamedTuple

from reference import overrides
from rich.console import Console
from rich.table import Table

from pipeline.cards import CARDS
from pipeline.estimate import predict
from pipeline.launcher import Launcher
from pipeline.prediction import NoPrediction
from pipeline.presets import resolve

REFERENCE = Path(__file__).resolve().parents[1] / "results" / "reference-h200.csv"
CARD = CARDS["h200"]


class Compared(NamedTuple):
    """A configuration: predicted and measured, in MiB."""

    name: str
    allocated: float
    allocated_measured: float
    process: float
    process_measured: float

    @property
    def allocated_percent(self) -> float:
        """Error of the allocator's peak."""
        return (self.allocated / self.allocated_measured - 1) * 100

    @property
    def process_percent(self) -> float:
        """Error of the process's figure."""
        return (self.process / self.process_measured - 1) * 100


def compare(reference: Path) -> Iterator[Compared]:
    """Yield the rows of the reference with their predictions. Raises ValueError where one fails."""
    with reference.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    configs = [resolve("adamw", row["model"], overrides(row) | {"device": "cuda"}) for row in rows]
    with Launcher() as launcher:
        predictions = predict(launcher, configs, CARD)
    for row, prediction in zip(rows, predictions, strict=True):
        if isinstance(prediction, NoPrediction):
            raise ValueError(f"{row['name']}: {prediction.reason}")
        yield Compared(
            row["name"],
            prediction.peak_allocated_mib,
            float(row["torch_peak_allocated_mib"]),
            prediction.peak_memory_mib,
            float(row["nvml_process_mib"]),
        )


def main(reference: Path) -> None:
    """Print the table, and the mean and the largest error below it."""
    rows = list(compare(reference))
    table = Table("configuration", *["predicted MiB", "measured", "error %"] * 2)
    for row in rows:
        table.add_row(
            row.name,
            f"{row.allocated:.1f}",
            f"{row.allocated_measured:.1f}",
            f"{row.allocated_percent:+.2f}",
            f"{row.process:.0f}",
            f"{row.process_measured:.0f}",
            f"{row.process_percent:+.2f}",
        )
    console = Console(width=120)
    console.print(table)
    for what, errors in {
        "allocated": [abs(row.allocated_percent) for row in rows],
        "process": [abs(row.process_percent) for row in rows],
    }.items():
        console.print(f"{what}: mean error {mean(errors):.2f} %, largest {max(errors):.2f} %")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else REFERENCE)
