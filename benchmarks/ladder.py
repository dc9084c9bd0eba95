"""Run a ladder row by row and write each row's figures beside the article's.

    python benchmarks/ladder.py article OUT.csv [--workload article] [--repeats 3]

Repeats are interleaved (A B C A B C), so that drift cannot favour a row.
"""

import argparse
import csv
import statistics
from pathlib import Path
from typing import Any

from pipeline.launcher import Launcher
from pipeline.preflight import prepare
from pipeline.presets import read_ladder, resolve
from pipeline.record import RunRecord

# The article's own readings (RTX 3080, 2023): samples/s and MiB used on the device afterwards.
ARTICLE = {
    "baseline": (31.90, 5790),
    "accumulation": (25.93, 4169),
    "checkpointing": (20.40, 3706),
    "fp16": (25.91, 3829),
    "adam8bit": (29.18, 3161),
}
FIGURES = (
    "peak_memory_mib",
    "device_memory_end_mib",
    "peak_allocated_mib",
    "peak_reserved_mib",
    "samples_per_second",
    "samples_per_second_low",
    "samples_per_second_high",
    "train_samples_per_second",
    "step_time_p50_ms",
    "tflops",
    "mfu",
    "startup_seconds",
)


def summary(preset: str, records: list[RunRecord]) -> dict[str, Any]:
    """Return the medians of a row, the spread of its throughput, and the article's figures."""
    row: dict[str, Any] = {"preset": preset, "outcome": records[0].outcome.value}
    for name in FIGURES:
        values = [r.metrics[name] for r in records if name in r.metrics]
        row[name] = round(statistics.median(values), 4) if values else None
    speeds = [r.metrics["samples_per_second"] for r in records if "samples_per_second" in r.metrics]
    row["repeats"] = len(records)
    row["slowest"], row["fastest"] = (min(speeds), max(speeds)) if speeds else (None, None)
    row["article_samples_per_second"], row["article_mib"] = ARTICLE.get(preset, (None, None))
    return row


def main() -> None:
    """Run the ladder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ladder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--workload", default="article")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    presets = read_ladder(options.ladder)
    records: dict[str, list[RunRecord]] = {preset: [] for preset in presets}
    with Launcher() as launcher:
        launcher.warm()
        for _ in range(options.repeats):
            for preset in presets:
                config = prepare(resolve(preset, options.workload, {}))
                record = launcher.launch(config, lambda event: None).record
                records[preset].append(record)
                print(preset, record.outcome, record.message, record.metrics, flush=True)
    rows = [summary(preset, records[preset]) for preset in presets]
    with options.out.open("w", encoding="utf-8", newline="") as sink:
        writer = csv.DictWriter(sink, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
