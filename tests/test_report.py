"""A record in words: figures with units, a dash where there is none, and what to know of them."""

from collections.abc import Mapping
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.record import MIB, Device, Effective, Outcome, Process, RunRecord
from pipeline.report import note, remarks, rows, title, verdict

MEASURED = {
    "peak_memory_mib": 4863.7,
    "peak_allocated_mib": 3870.5,
    "peak_reserved_mib": 4122.0,
    "samples_per_second": 89.84,
    "samples_per_second_low": 88.1,
    "samples_per_second_high": 91.7,
    "step_time_p50_ms": 44.2,
    "step_time_p95_ms": 51.0,
    "warmup_steps": 3.0,
    "warmup_seconds": 1.25,
    "tflops": 29.6,
    "mfu": 0.442,
    "effective_batch": 4.0,
}


def record(
    config: RunConfig, metrics: Mapping[str, float] | None = None, **values: Any
) -> RunRecord:
    known = {"outcome": Outcome.COMPLETED, "started_at": 0.0, "ended_at": 9.0, "steps": 20}
    return RunRecord(config=config, metrics=metrics or {}, **(known | values))


def figures(shown: RunRecord) -> dict[str, str]:
    return dict(rows(shown))


def effective(states: Mapping[str, int]) -> Effective:
    return Effective(
        parameter_dtype="float32",
        autocast_dtype=None,
        tf32=False,
        optimizer="o",
        optimizer_state_dtypes=states,
        checkpointed_layers=0,
        attention="eager",
        compiled=False,
        micro_batch=4,
        accumulation=1,
        parameters=1,
    )


def test_title_names_preset_and_workload(config: RunConfig) -> None:
    assert title(record(config)) == "adamw on laptop"


def test_figures_have_units_and_the_rate_its_interval(config: RunConfig) -> None:
    shown = figures(record(config, MEASURED))
    assert shown["peak memory"] == "4,864 MiB"
    assert shown["peak allocated by torch"] == "3,870 MiB"
    assert shown["throughput"] == "89.84 samples/s (95 %: 88.1 to 91.7)"
    assert shown["step time, median (95th percentile)"] == "44.2 ms (51 ms)"
    assert shown["computation"] == "29.6 TFLOP/s, 44.2% of the device's peak"


def test_figure_that_was_not_measured_is_a_dash_and_never_zero(config: RunConfig) -> None:
    shown = figures(record(config, steps=0))
    assert shown["peak memory"] == "-"
    assert shown["step time, median (95th percentile)"] == "-"
    assert not any(value.startswith("0") for value in shown.values())
    assert not {"peak allocated by torch", "computation", "optimizer state"} & set(shown)


def test_rate_that_was_not_measured_says_how_many_steps_there_were(config: RunConfig) -> None:
    short = record(config, {"warmup_steps": 3.0, "warmup_seconds": 1.0}, steps=5)
    assert figures(short)["throughput"] == "not measured (2 steps after warm-up)"


def test_share_of_an_unknown_peak_is_left_out(config: RunConfig) -> None:
    metrics = {name: value for name, value in MEASURED.items() if name != "mfu"}
    assert figures(record(config, metrics))["computation"] == "29.6 TFLOP/s"


def test_real_batch_is_shown_beside_the_one_asked_for(config: RunConfig) -> None:
    shown = figures(record(config, {"effective_batch": 3.0}))
    assert shown["effective batch"] == "3; asked for 4 (4 x 1)"
    assert figures(record(config, MEASURED))["effective batch"] == "4 (4 x 1)"


def test_optimizer_state_says_which_share_is_in_8_bits(config: RunConfig) -> None:
    training = config.training.model_copy(update={"optimizer": "bnb_adam8bit"})
    eight = config.model_copy(update={"training": training})
    states = effective({"uint8": 3 * MIB, "float32": MIB})
    shown = figures(record(eight, effective=states))
    assert shown["optimizer state"] == "4 MiB, 75% of it in 8 bits"
    assert figures(record(config, effective=states))["optimizer state"] == "4 MiB"


@pytest.mark.parametrize("outcome", list(Outcome))
def test_every_outcome_has_words(config: RunConfig, outcome: Outcome) -> None:
    assert verdict(record(config, outcome=outcome)).startswith("adamw on laptop ")


def test_verdict_of_a_failure_says_how_far_it_came_and_why(config: RunConfig) -> None:
    failed = record(
        config, outcome=Outcome.OUT_OF_MEMORY, message="CUDA out of memory", total_steps=64
    )
    assert verdict(failed) == (
        "adamw on laptop ran out of memory after 20 of 64 steps: CUDA out of memory"
    )


def test_verdict_of_a_completed_run_is_short(config: RunConfig) -> None:
    assert verdict(record(config, total_steps=20)) == "adamw on laptop completed"


def test_interrupted_run_is_told_from_a_failed_one(config: RunConfig) -> None:
    stopped = record(
        config, outcome=Outcome.FAILED, interrupted=True, message="SIGTERM", total_steps=64
    )
    assert verdict(stopped) == "adamw on laptop was interrupted after 20 of 64 steps"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("nvml_process", "training process (NVML)"),
        ("nvml_device", "device's rise"),
        ("process_uss", "it ran on the CPU, so there are no figures of a GPU"),
    ],
)
def test_remarks_say_where_the_peak_comes_from(config: RunConfig, source: Any, words: str) -> None:
    [remark] = remarks(record(config, memory_source=source))
    assert words in remark


def test_remarks_name_what_spoils_the_figures(config: RunConfig) -> None:
    others = (Process(pid=7, name="python", bytes=300 * MIB), Process(pid=8, name="x", bytes=None))
    device = Device(kind="cuda", name="NVIDIA H200", processes=others)
    told = list(remarks(record(config, MEASURED, device=device, warnings=("beware",))))
    assert told == [
        "beware",
        "Device: NVIDIA H200.",
        "Another process was on the device: python (7) with 300 MiB.",
        "Another process was on the device: x (8).",
        "The first 3 steps (1.25 s) are warm-up and not part of the throughput.",
    ]


def test_note_holds_verdict_figures_reason_and_remarks(config: RunConfig) -> None:
    text = note(record(config, MEASURED, warnings=("beware",)))
    lines = text.splitlines()
    assert lines[0] == (
        "**adamw on laptop completed.** Peak memory **4,864 MiB** at **89.84 samples/s**."
    )
    assert "| peak memory | 4,864 MiB |" in lines
    assert f"Why: {config.preset.why}" in lines
    assert "- beware" in lines


def test_note_of_a_run_without_figures_is_complete(config: RunConfig) -> None:
    assert "| peak memory | - |" in note(record(config, outcome=Outcome.FAILED, steps=0))
