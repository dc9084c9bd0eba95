"""Say what a record holds, in words and small tables. Pure: records in, text out."""

from collections.abc import Iterator, Mapping

from pipeline.record import MIB, Ledger, Outcome, RunRecord

ABSENT = "-"
_SOURCES = {
    "nvml_process": "the driver's figure for the training process (NVML)",
    "nvml_device": "the device's rise since the start (NVML), less what other processes took",
    "process_uss": "the training process's private memory above its start: it ran on the CPU, "
    "so there are no figures of a GPU",
}
_VERDICTS = {
    Outcome.COMPLETED: "completed",
    Outcome.OUT_OF_MEMORY: "ran out of memory",
    Outcome.UNSUPPORTED: "is not supported on this machine",
    Outcome.TIMEOUT: "was ended for time",
    Outcome.FAILED: "failed",
}


_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in the optimizer step",
}


def title(record: RunRecord) -> str:
    """Return the run in a phrase."""
    return f"{record.config.preset.name} on {record.config.workload_name}"


def verdict(record: RunRecord) -> str:
    """Return how the run ended, in a sentence without full stop."""
    ending = "was interrupted" if record.interrupted else _VERDICTS[record.outcome]
    steps = f" after {record.steps} of {record.total_steps} steps" if record.total_steps else ""
    reason = f": {record.message}" if record.message and not record.interrupted else ""
    whole = record.outcome is Outcome.COMPLETED
    return f"{title(record)} {ending}{'' if whole else steps}{reason}"


def rows(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Yield the figures that people read first, with their units."""
    metrics = record.metrics
    yield "peak memory", _mib(metrics.get("peak_memory_mib"))
    if "predicted/peak_memory_mib" in metrics:
        yield "peak memory, predicted", _foreseen(metrics)
    if "peak_allocated_mib" in metrics:
        yield "peak allocated by torch", _mib(metrics.get("peak_allocated_mib"))
        yield "peak reserved by torch", _mib(metrics.get("peak_reserved_mib"))
    if record.ledger:
        yield "what the peak holds", _parts(record.ledger)
    yield "throughput", _speed(record)
    yield "step time, median (95th percentile)", _step_time(record)
    if "tflops" in metrics:
        share = f", {metrics['mfu']:.1%} of the device's peak" if "mfu" in metrics else ""
        yield "computation", f"{metrics['tflops']:.3g} TFLOP/s{share}"
    if record.effective is not None:
        yield "optimizer state", _optimizer(record)
    yield "effective batch", _batch(record)


def note(record: RunRecord) -> str:
    """Return the run's note: Markdown, shown on its page in the MLflow UI."""
    config = record.config
    lines = [
        f"**{verdict(record)}.**{_headline(record)}",  # all that the UI shows of a folded note
        "",
        *([f"_{config.preset.summary}_", ""] if config.preset.summary else []),
        "| figure | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows(record)),
        "",
    ]
    if config.preset.why:
        lines += [f"Why: {config.preset.why}", ""]
    lines += [f"- {remark}" for remark in remarks(record)]
    return "\n".join(lines)


def _headline(record: RunRecord) -> str:
    metrics = record.metrics
    if "peak_memory_mib" not in metrics:
        return ""
    speed = metrics.get("samples_per_second")
    pace = f" at **{speed:.4g} samples/s**" if speed else ""
    return f" Peak memory **{_mib(metrics['peak_memory_mib'])}**{pace}."


def remarks(record: RunRecord) -> Iterator[str]:
    """Yield what a reader of the figures should know about them."""
    if record.memory_source:
        yield f"Peak memory is {_SOURCES[record.memory_source]}."
    yield from record.warnings
    if record.device:
        yield f"Device: {record.device.name}."
        for other in record.device.processes:
            held = f" with {other.bytes / MIB:.0f} MiB" if other.bytes else ""
            yield f"Another process was on the device: {other.name} ({other.pid}){held}."
    metrics = record.metrics
    if "warmup_steps" in metrics:
        yield (
            f"The first {metrics['warmup_steps']:.0f} steps ({metrics['warmup_seconds']:.2f} s) "
            "are warm-up and not part of the throughput."
        )


def _mib(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.0f} MiB"


def _foreseen(metrics: Mapping[str, float]) -> str:
    error = metrics.get("predicted/error_percent")
    off = "" if error is None else f" ({error:+.1f} %)"
    return f"{_mib(metrics['predicted/peak_memory_mib'])}{off}"


def _parts(ledger: Ledger) -> str:
    parts = ledger.model_dump(exclude={"phase"})
    told = ", ".join(f"{part} {count / MIB:,.0f}" for part, count in parts.items() if count)
    return f"{told} MiB" + (f" ({_PHASES[ledger.phase]})" if ledger.phase else "")


def _speed(record: RunRecord) -> str:
    metrics = record.metrics
    if "samples_per_second" not in metrics:
        timed = max(record.steps - int(metrics.get("warmup_steps", record.steps)), 0)
        return f"not measured ({timed} steps after warm-up)"
    low, high = metrics["samples_per_second_low"], metrics["samples_per_second_high"]
    return f"{metrics['samples_per_second']:.4g} samples/s (95 %: {low:.4g} to {high:.4g})"


def _step_time(record: RunRecord) -> str:
    metrics = record.metrics
    if "step_time_p50_ms" not in metrics:
        return ABSENT
    return f"{metrics['step_time_p50_ms']:.4g} ms ({metrics['step_time_p95_ms']:.4g} ms)"


def _optimizer(record: RunRecord) -> str:
    assert record.effective is not None
    share = record.effective.eight_bit_share
    asked = "8bit" in record.config.training.optimizer
    eight = f", {share:.0%} of it in 8 bits" if asked and share is not None else ""
    return f"{record.effective.optimizer_bytes / MIB:,.0f} MiB{eight}"


def _batch(record: RunRecord) -> str:
    training = record.config.training
    asked = f"{training.effective_batch} ({training.micro_batch} x {training.accumulation})"
    real = record.metrics.get("effective_batch")
    return asked if real in (None, training.effective_batch) else f"{real:g}; asked for {asked}"
