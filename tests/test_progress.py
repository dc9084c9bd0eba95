"""People see step, throughput, memory and time left: plain lines where there is no terminal."""

import io

from rich.console import Console

from pipeline.progress import Progress
from pipeline.record import MIB, Built, MemorySample, Samples, StepMark, Steps


def shown(terminal: bool = False) -> tuple[Progress, io.StringIO]:
    output = io.StringIO()
    return Progress(Console(file=output, force_terminal=terminal, width=100)), output


def after_ten_steps() -> Progress:
    progress, _ = shown()
    progress.handle(Built(total_steps=30, asked_batch=4, arguments={}))
    progress.handle(Steps(rows=tuple(StepMark(n, n - 1.0, float(n), 4) for n in range(1, 11))))
    return progress


def test_line_tells_step_rate_and_time_left() -> None:
    assert after_ten_steps().line() == "step 10/30  4 samples/s  20 s left"


def test_line_tells_memory_now_and_at_its_peak() -> None:
    progress = after_ten_steps()
    progress.handle(Samples(rows=(MemorySample(1.0, 300 * MIB), MemorySample(2.0, 200 * MIB))))
    assert "200 MiB (peak 300)" in progress.line()


def test_line_before_the_first_step_tells_memory_alone() -> None:
    progress, _ = shown()
    progress.handle(Samples(rows=(MemorySample(1.0, 300 * MIB),)))
    assert progress.line() == "300 MiB (peak 300)"


def test_rate_that_cannot_be_counted_is_left_out() -> None:
    progress, _ = shown()
    progress.handle(Steps(rows=tuple(StepMark(n, n - 1.0, float(n), None) for n in (1, 2))))
    assert progress.line() == "step 2/?"


def test_output_that_is_no_terminal_gets_plain_lines() -> None:
    progress, output = shown()
    with progress:
        progress.handle(Built(total_steps=30, asked_batch=4, arguments={}))
    assert output.getvalue() == "training: 30 steps\n"
