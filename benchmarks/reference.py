"""Measure the configurations of a reference table again, and compare the memory figures.

    python benchmarks/reference.py results/reference-h200.csv OUT.csv

The reference holds 25 short trainings of BERT-base on one H200, measured without this project.
"""

import csv
import sys
from pathlib import Path
from typing import Any

from pipeline.launcher import Launcher
from pipeline.preflight import prepare
from pipeline.presets import resolve

MAX_STEPS = 8
FIGURES = {
    "torch_peak_allocated_mib": "peak_allocated_mib",
    "torch_peak_reserved_mib": "peak_reserved_mib",
    "nvml_process_mib": "peak_memory_mib",
}


def overrides(row: dict[str, str]) -> dict[str, Any]:
    """Return our settings for a row of the reference."""
    same = ("seq_len", "attention", "micro_batch", "accumulation", "precision", "max_grad_norm")
    optimizer = row["optimizer"]
    return {name: row[name] for name in same} | {
        "optimizer": "bnb_adam8bit" if optimizer.startswith("bnb.optim") else optimizer,
        "gradient_checkpointing": row["gradient_checkpointing"],
        "compile": row["torch_compile"],
        "alloc_conf": row["alloc_conf"],
        "epochs": "100",
        "max_steps": MAX_STEPS,
    }


def main(reference: Path, out: Path) -> None:
    """Run every row and write theirs, ours and the difference."""
    with reference.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    results = []
    with Launcher() as launcher:
        launcher.warm()
        for row in rows:
            config = prepare(resolve("adamw", "bert-base", overrides(row)))
            record = launcher.launch(config, lambda event: None).record
            result: dict[str, Any] = {"name": row["name"], "outcome": record.outcome.value}
            for theirs, ours in FIGURES.items():
                before, now = float(row[theirs]), record.metrics.get(ours)
                result[f"{ours}_reference"] = before
                result[ours] = None if now is None else round(now, 1)
                result[f"{ours}_percent"] = now and round((now / before - 1) * 100, 2)
            result["startup_seconds"] = record.metrics.get("startup_seconds")
            results.append(result)
            changes = {k: v for k, v in result.items() if k.endswith("_percent")}
            print(row["name"], result["outcome"], record.message, changes, flush=True)
    with out.open("w", encoding="utf-8", newline="") as sink:
        writer = csv.DictWriter(sink, list(results[0]))
        writer.writeheader()
        writer.writerows(results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
