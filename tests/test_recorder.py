"""Events become a record whose figures say what was measured, and nothing else."""

import math
from collections.abc import Iterable, Sequence

import pytest

from pipeline.config import RunConfig
from pipeline.record import (
    MIB,
    Built,
    Device,
    Effective,
    Event,
    Finished,
    Logged,
    MemorySample,
    Outcome,
    Proven,
    RunRecord,
    Samples,
    Started,
    StepMark,
    Steps,
    Warned,
)
from pipeline.recorder import Recorder

GPU = Device(kind="cuda", name="NVIDIA H200", uuid="GPU-1")
STARTED = Started(
    device=GPU, memory_source="nvml_process", versions={"torch": "2.13.0"}, clock=100.0
)
EFFECTIVE = Effective(
    parameter_dtype="float32",
    autocast_dtype=None,
    tf32=False,
    optimizer="torch.optim.adamw.AdamW (fused)",
    optimizer_state_dtypes={"float32": 3 * MIB, "uint8": MIB},
    checkpointed_layers=0,
    attention="eager",
    compiled=False,
    micro_batch=4,
    accumulation=1,
    parameters=1000,
)


def recorded(*events: Event, warmup_steps: int = 3, seq_len: int | None = None) -> Recorder:
    recorder = Recorder(warmup_steps, seq_len)
    for event in events:
        recorder.handle(event)
    return recorder


def built(asked_batch: int = 4, total_steps: int = 10) -> Built:
    return Built(total_steps=total_steps, asked_batch=asked_batch, arguments={})


def steps(
    seconds: Iterable[float], samples: int | None = 4, wait: float = 0.0, begin: float = 0.0
) -> Steps:
    """Return steps of these lengths; before each, the training waits for its data."""
    rows, now = [], begin
    for number, length in enumerate(seconds, 1):
        now += wait
        rows.append(StepMark(number, now, now + length, samples))
        now += length
    return Steps(rows=tuple(rows))


def losses(values: Sequence[float]) -> list[Logged]:
    return [Logged(step=10 * i, values={"loss": value}) for i, value in enumerate(values, 1)]


def of(recorder: Recorder, config: RunConfig) -> RunRecord:
    return recorder.record(config, Outcome.COMPLETED, "")


# Throughput


def test_rate_is_counted_samples_over_timed_seconds() -> None:
    counts = [10, 10, 10, 24, 24, 12, 24, 24]
    rows = [StepMark(i, i, i + 1.0, count) for i, count in enumerate(counts)]
    metrics = recorded(Steps(rows=tuple(rows))).metrics()
    assert metrics["samples_per_second"] == pytest.approx(108 / 5)


def test_tokens_follow_from_samples_and_their_length() -> None:
    metrics = recorded(steps([0.5] * 10), seq_len=128).metrics()
    assert metrics["tokens_per_second"] == pytest.approx(8 * 128)


def test_real_batch_is_shown_beside_a_warning_that_names_both(config: RunConfig) -> None:
    recorder = recorded(built(asked_batch=32), steps([0.1] * 10, samples=10))
    assert recorder.metrics()["effective_batch"] == 10
    [warning] = of(recorder, config).warnings
    assert "32 samples a step were asked for, 10 went through" in warning


def test_last_batch_of_an_epoch_that_is_short_is_no_reason_to_warn(config: RunConfig) -> None:
    rows = [StepMark(i, i, i + 1.0, 2 if i % 5 == 4 else 4) for i in range(20)]
    recorder = recorded(built(asked_batch=4), Steps(rows=tuple(rows)))
    assert of(recorder, config).warnings == ()


def test_steps_of_unknown_size_give_times_and_no_rate() -> None:
    metrics = recorded(steps([0.1] * 10, samples=None)).metrics()
    assert metrics["step_time_p50_ms"] == pytest.approx(100)
    assert not [name for name in metrics if "per_second" in name or name == "effective_batch"]


def test_start_up_is_left_out_of_the_rate_and_told_apart() -> None:
    metrics = recorded(steps([44.0, 1.0, 0.5] + [0.25] * 20), warmup_steps=3).metrics()
    assert metrics["samples_per_second"] == pytest.approx(16)
    assert metrics["first_step_seconds"] == pytest.approx(44)
    assert (metrics["warmup_steps"], metrics["warmup_seconds"]) == pytest.approx((3, 45.5))


def test_compilation_in_a_late_step_is_left_out_of_the_rate() -> None:
    seconds = [0.25] * 4 + [44.0] + [0.25 + 0.001 * (i % 3) for i in range(40)]
    metrics = recorded(steps(seconds), warmup_steps=1).metrics()
    assert metrics["warmup_steps"] == 5
    assert metrics["samples_per_second"] == pytest.approx(16, rel=0.01)


def test_rate_agrees_between_a_short_and_a_long_training() -> None:
    start = [5.0, 1.0, 0.3]
    short = recorded(steps(start + [0.1] * 7)).metrics()
    long = recorded(steps(start + [0.1] * 97)).metrics()
    assert short["samples_per_second"] == pytest.approx(long["samples_per_second"])


def test_too_few_steps_after_warm_up_give_no_rate() -> None:
    metrics = recorded(steps([0.1] * 6)).metrics()
    assert metrics["first_step_seconds"] == pytest.approx(0.1)
    assert not {"samples_per_second", "step_time_p50_ms", "tflops"} & set(metrics)


def test_waiting_for_data_counts_in_the_rate_and_apart_from_the_step() -> None:
    metrics = recorded(steps([0.1] * 20, wait=0.3)).metrics()
    assert metrics["step_time_p50_ms"] == pytest.approx(100)
    assert metrics["data_wait_p50_ms"] == pytest.approx(300)
    assert metrics["samples_per_second"] == pytest.approx(10)


def test_start_up_lasts_from_the_request_to_the_first_step() -> None:
    started = STARTED.model_copy(update={"clock": 100.0, "requested": 98.5})
    metrics = recorded(started, steps([0.5] * 3, begin=2.0)).metrics()
    assert metrics["startup_seconds"] == pytest.approx(1.5 + 2.5)


def test_start_up_of_a_training_that_nobody_requested_is_unknown() -> None:
    assert "startup_seconds" not in recorded(STARTED, steps([0.5] * 3)).metrics()


def test_operations_are_those_of_the_samples_that_went_through() -> None:
    done = Finished(outcome=Outcome.COMPLETED, flops_per_sample=1e12, peak_flops=100e12)
    metrics = recorded(steps([0.1] * 10), done).metrics()
    assert (metrics["tflops"], metrics["mfu"]) == pytest.approx((40, 0.4))


def test_share_of_an_unknown_peak_is_absent() -> None:
    done = Finished(outcome=Outcome.COMPLETED, flops_per_sample=1e12)
    metrics = recorded(steps([0.1] * 10), done).metrics()
    assert "tflops" in metrics
    assert "mfu" not in metrics


# Memory


def test_peak_is_the_highest_reading_and_not_the_last() -> None:
    rows = tuple(MemorySample(i, value * MIB) for i, value in enumerate([10, 30, 20]))
    recorder = recorded(Samples(rows=rows))
    assert recorder.metrics()["peak_memory_mib"] == 30
    assert recorder.peak == rows[1]


def test_readings_without_a_process_figure_give_no_peak() -> None:
    recorder = recorded(Samples(rows=(MemorySample(0, None), MemorySample(1, None))))
    assert recorder.peak is None
    assert recorder.metrics() == {}


def test_allocator_peaks_are_those_of_the_whole_training() -> None:
    done = Finished(
        outcome=Outcome.COMPLETED,
        peak_allocated_bytes=9 * MIB,
        peak_reserved_bytes=12 * MIB,
        end_device_bytes=700 * MIB,
    )
    metrics = recorded(Steps(rows=(StepMark(1, 0, 1, 4, 7 * MIB),)), done).metrics()
    assert metrics["peak_allocated_mib"] == 9
    assert metrics["peak_reserved_mib"] == 12
    assert metrics["device_memory_end_mib"] == 700


def test_allocator_peak_of_a_training_cut_short_comes_from_its_steps() -> None:
    rows = (StepMark(1, 0, 1, 4, 7 * MIB), StepMark(2, 1, 2, 4, 5 * MIB))
    assert recorded(Steps(rows=rows)).metrics()["peak_allocated_mib"] == 7


def test_optimizer_state_is_shown_with_its_8_bit_share() -> None:
    metrics = recorded(Proven(effective=EFFECTIVE)).metrics()
    assert (metrics["optimizer_state_mib"], metrics["optimizer_8bit_share"]) == (4, 0.25)


def test_what_was_not_measured_is_absent() -> None:
    done = Finished(outcome=Outcome.COMPLETED)
    metrics = recorded(STARTED, built(), steps([0.1] * 10), done).metrics()
    assert not [name for name in metrics if "mib" in name or name in ("tflops", "train_loss")]


def test_nothing_measured_gives_no_figures() -> None:
    assert recorded().metrics() == {}


def test_source_of_the_peak_is_what_the_whole_curve_showed(config: RunConfig) -> None:
    done = Finished(outcome=Outcome.COMPLETED, memory_source="nvml_device")
    assert of(recorded(STARTED), config).memory_source == "nvml_process"
    assert of(recorded(STARTED, done), config).memory_source == "nvml_device"


# Divergence


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_marks_the_run_diverged(config: RunConfig, bad: float) -> None:
    record = of(recorded(*losses([0.7, bad, 0.6])), config)
    assert record.diverged
    assert any(warning.startswith("diverged") for warning in record.warnings)


def test_training_too_short_to_log_a_loss_can_diverge(config: RunConfig) -> None:
    done = Finished(outcome=Outcome.COMPLETED, metrics={"train_loss": math.nan})
    assert of(recorded(steps([0.1] * 5), done), config).diverged


def test_finite_losses_are_no_divergence(config: RunConfig) -> None:
    done = Finished(outcome=Outcome.COMPLETED, metrics={"train_loss": 0.65})
    record = of(recorded(*losses([0.7, 0.6]), done), config)
    assert not record.diverged
    assert record.warnings == ()


def test_gradient_norm_that_overflows_is_no_divergence(config: RunConfig) -> None:
    # The loss scale of fp16 skips such a step; that is how it works.
    logged = Logged(step=1, values={"loss": 0.7, "grad_norm": math.inf})
    assert not of(recorded(logged), config).diverged


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_figure_that_is_not_finite_is_absent(bad: float) -> None:
    done = Finished(
        outcome=Outcome.COMPLETED, metrics={"train_loss": bad, "train_runtime": 2.0, "epoch": 1.0}
    )
    assert recorded(done).metrics() == {"train_runtime": 2.0}


# The record


def test_record_holds_what_each_event_told(config: RunConfig) -> None:
    recorder = recorded(
        STARTED,
        Warned(message="beware"),
        built(total_steps=20),
        steps([0.1] * 10),
        Proven(effective=EFFECTIVE),
    )
    record = recorder.record(config, Outcome.TIMEOUT, "too slow")
    assert (record.outcome, record.message) == (Outcome.TIMEOUT, "too slow")
    assert (record.steps, record.total_steps) == (10, 20)
    assert (record.device, record.versions) == (GPU, {"torch": "2.13.0"})
    assert (record.effective, record.warnings) == (EFFECTIVE, ("beware",))
    assert record.started_at <= record.ended_at


def test_record_of_a_training_that_never_began_is_complete(config: RunConfig) -> None:
    record = recorded().record(config, Outcome.FAILED, "killed", interrupted=True)
    assert record.interrupted
    assert (record.steps, record.total_steps, record.device, record.metrics) == (0, None, None, {})


@pytest.mark.parametrize(
    "events",
    [
        [],
        [STARTED],
        [STARTED, built(), steps([0.1] * 2)],
        [STARTED, built(), steps([0.1] * 10), Proven(effective=EFFECTIVE), *losses([math.nan])],
    ],
)
def test_partial_record_survives_json(config: RunConfig, events: list[Event]) -> None:
    record = recorded(*events).record(config, Outcome.OUT_OF_MEMORY, "CUDA out of memory")
    assert RunRecord.model_validate_json(record.model_dump_json()) == record


def test_unknown_field_of_a_record_is_refused(config: RunConfig) -> None:
    values = of(recorded(), config).model_dump() | {"peak": 1}
    with pytest.raises(ValueError, match="peak"):
        RunRecord.model_validate(values)
