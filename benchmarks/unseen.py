"""Predict trainings that nothing was tuned on, then measure them on the GPU that is at hand.

    python benchmarks/unseen.py predict results/unseen-predicted.csv
    python benchmarks/unseen.py measure results/unseen-predicted.csv results/unseen-h200.csv

Other models, lengths and optimizers than those of the reference; predicted on a CPU, and before.
"""

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from pipeline.cards import CARDS
from pipeline.config import RunConfig
from pipeline.estimate import predict
from pipeline.launcher import Launcher
from pipeline.prediction import NoPrediction
from pipeline.preflight import with_device
from pipeline.presets import resolve

MODELS = Path(__file__).resolve().parent / "models"
GPT2, LLAMA = str(MODELS / "gpt2.json"), str(MODELS / "llama-small.json")
ROBERTA, DISTILBERT = str(MODELS / "roberta-base.json"), str(MODELS / "distilbert.json")
CAUSAL = "causal-lm"
TRAININGS: dict[str, dict[str, Any]] = {
    "bert-large": {"model": "bert-large"},
    "bert-large eager bf16": {
        "model": "bert-large", "attention": "eager", "precision": "bf16", "micro_batch": 2,
    },
    "bert-large leanest": {
        "model": "bert-large", "precision": "pure_bf16", "optimizer": "adamw_bnb_8bit",
        "gradient_checkpointing": True, "micro_batch": 8,
    },
    "bert-base 128 tokens": {"seq_len": 128, "micro_batch": 32, "precision": "bf16"},
    "bert-base 256 tokens, foreach": {
        "seq_len": 256, "micro_batch": 8, "optimizer": "adamw_torch",
    },
    "bert-base lion_8bit": {"optimizer": "lion_8bit"},
    "bert-base adafactor bf16": {
        "optimizer": "adafactor", "precision": "bf16", "micro_batch": 8,
    },
    "bert-base sgd tf32": {"optimizer": "sgd", "precision": "tf32", "micro_batch": 8},
    "gpt2": {"model": GPT2, "task": CAUSAL},
    "gpt2 bf16 checkpointing": {
        "model": GPT2, "task": CAUSAL, "precision": "bf16", "micro_batch": 8,
        "gradient_checkpointing": True,
    },
    "llama 1024 tokens": {
        "model": LLAMA, "task": CAUSAL, "precision": "bf16", "micro_batch": 2, "seq_len": 1024,
    },
    "llama pure bf16": {
        "model": LLAMA, "task": CAUSAL, "precision": "pure_bf16", "micro_batch": 4,
        "accumulation": 2, "optimizer": "adamw_8bit",
    },
    "roberta masked-lm": {
        "model": ROBERTA, "task": "masked-lm", "seq_len": 384, "micro_batch": 8,
        "precision": "bf16",
    },
    "distilbert eager": {
        "model": DISTILBERT, "attention": "eager", "seq_len": 256, "micro_batch": 16,
    },
}  # fmt: skip
MAX_STEPS = 6


def configuration(settings: dict[str, Any], device: str) -> RunConfig:
    """Return the configuration of one of them."""
    length = {"max_steps": MAX_STEPS, "epochs": 100, "device": device}
    return with_device(resolve("adamw", "bert-base", settings | length))


def predicted() -> list[dict[str, Any]]:
    """Return a row for each, as an H200 is expected to show it."""
    configs = [configuration(settings, "cuda") for settings in TRAININGS.values()]
    with Launcher() as launcher:
        found = predict(launcher, configs, CARDS["h200"])
    rows: list[dict[str, Any]] = []
    for name, prediction in zip(TRAININGS, found, strict=True):
        if isinstance(prediction, NoPrediction):
            raise SystemExit(f"{name}: {prediction.reason}")
        rows.append(
            {
                "name": name,
                "predicted_allocated_mib": round(prediction.peak_allocated_mib, 1),
                "predicted_peak_mib": round(prediction.peak_memory_mib, 1),
            }
        )
    return rows


def measured(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with what was measured beside it."""
    with Launcher() as launcher:
        launcher.warm()
        for row in rows:
            config = configuration(TRAININGS[row["name"]], "cuda")
            record = launcher.launch(config, lambda event: None).record
            row["outcome"] = record.outcome.value
            for kind, key in (("allocated", "peak_allocated_mib"), ("peak", "peak_memory_mib")):
                value = record.metrics.get(key)
                before = float(row[f"predicted_{kind}_mib"])
                row[f"{kind}_mib"] = value and round(value, 1)
                row[f"{kind}_error_percent"] = value and round((before / value - 1) * 100, 2)
            print(row, record.message, flush=True)
    return list(rows)


def main(what: str, *paths: Path) -> None:
    """See the module."""
    if what == "predict":
        rows = predicted()
    else:
        with paths[0].open(encoding="utf-8", newline="") as lines:
            rows = measured(list(csv.DictReader(lines)))
        for kind in ("allocated", "peak"):
            errors = [abs(row[f"{kind}_error_percent"]) for row in rows if row[f"{kind}_mib"]]
            print(f"{kind}: mean error {mean(errors):.2f} %, largest {max(errors):.2f} %")
    with paths[-1].open("w", encoding="utf-8", newline="") as sink:
        writer = csv.DictWriter(sink, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
