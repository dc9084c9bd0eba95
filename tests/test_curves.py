"""Curves have few points, the peak is one of them, and a failing server loses none."""

import math
import random
import threading
from collections.abc import Iterator

import pytest

from pipeline.curves import Curves, CurveSender, Point
from pipeline.record import MIB, Built, Logged, MemorySample, Samples, StepMark, Steps

BEGAN_AT = 1_700_000_000.0
PERIOD_SECONDS = 0.008
MOST_READINGS = 40_000
HOUR = 3600.0


def training(
    seconds: float, steps: int, *, start: float = 2.0, first_step: float = 0.0
) -> Iterator[Samples | Steps]:
    """Simulate a training: readings every 8 ms (fewer in a long one), and its steps between."""
    period = max(PERIOD_SECONDS, seconds / MOST_READINGS)
    pace = (seconds - start - first_step) / steps
    done, rows = 0, []
    for index in range(int(seconds / period)):
        now = index * period
        rows.append(MemorySample(now, (1000 + index % 97) * MIB, device=index))
        if len(rows) == 12:
            yield Samples.model_construct(rows=tuple(rows))
            rows = []
        while done < steps and start + first_step + (done + 1) * pace <= now:
            ended = start + first_step + (done + 1) * pace
            mark = StepMark(done + 1, ended - pace, ended, 4, done * MIB)
            yield Steps.model_construct(rows=(mark,))
            done += 1
    yield Samples.model_construct(rows=tuple(rows))


def curves_of(seconds: float, steps: int, **more: float) -> dict[str, list[Point]]:
    curves = Curves(BEGAN_AT)
    curves.points(Built(total_steps=steps, asked_batch=4, arguments={}))
    found = [point for event in training(seconds, steps, **more) for point in curves.points(event)]
    by_key: dict[str, list[Point]] = {}
    for point in found + curves.rest():
        by_key.setdefault(point.key, []).append(point)
    return by_key


@pytest.mark.parametrize(
    ("seconds", "steps"),
    [(5, 16), (20, 128), (60, 128), (600, 5000), (HOUR, 400), (24 * HOUR, 100_000)],
)
def test_memory_curve_has_enough_points_and_not_too_many(seconds: float, steps: int) -> None:
    points = curves_of(seconds, steps)["memory/process_mib"]
    assert min(150, seconds * 10) <= len(points) <= 525


@pytest.mark.parametrize("more", [{"start": 300.0}, {"first_step": 300.0}])
def test_long_start_costs_few_points_more(more: dict[str, float]) -> None:
    points = curves_of(2 * HOUR, 5000, **more)["memory/process_mib"]
    assert 150 <= len(points) <= 600


def test_steps_after_a_long_compilation_are_drawn_in_detail() -> None:
    points = curves_of(60, 2000, first_step=44)["memory/process_mib"]
    assert sum(point.step > 46_500 for point in points) >= 40


def test_unknown_length_still_gives_a_bounded_curve() -> None:
    curves = Curves(BEGAN_AT)
    found = [p for event in training(600, 1) if isinstance(event, Samples)
             for p in curves.points(event)]  # fmt: skip
    assert len([p for p in found if p.key == "memory/process_mib"]) <= 560


@pytest.mark.parametrize("seed", range(10))
def test_highest_reading_is_always_among_the_points(seed: int) -> None:
    chance = random.Random(seed)
    peak_at = chance.choice([0, 1, 2499, chance.randrange(2500)])
    curves, found = Curves(BEGAN_AT), []
    for index in range(2500):
        height = 5000 * MIB if index == peak_at else chance.randrange(4000 * MIB)
        row = MemorySample(index * PERIOD_SECONDS, height)
        found += curves.points(Samples(rows=(row,)))
    found += curves.rest()
    highest = max(found, key=lambda point: point.value)
    assert highest.value == 5000
    assert highest.step == round(peak_at * PERIOD_SECONDS * 1e3)


def test_point_keeps_the_time_at_which_it_was_read() -> None:
    curves = Curves(BEGAN_AT)
    rows = tuple(MemorySample(t, b) for t, b in [(1.0, 5), (1.02, 9), (1.04, 7), (1.5, 1)])
    [point, *_] = curves.points(Samples(rows=rows))
    assert (point.step, point.timestamp_ms) == (1020, round((BEGAN_AT + 1.02) * 1e3))
    assert point.value == 9 / MIB


def test_points_of_a_curve_are_in_order() -> None:
    moments = [point.step for point in curves_of(60, 128)["memory/process_mib"]]
    assert moments == sorted(set(moments))


def test_figure_that_is_not_measured_has_no_curve() -> None:
    keys = set(curves_of(5, 16))
    assert {"memory/process_mib", "memory/device_mib"} <= keys
    assert not {"memory/allocated_mib", "memory/reserved_mib"} & keys


def test_figure_that_is_read_less_often_has_its_own_peak() -> None:
    curves = Curves(BEGAN_AT)
    rows = [MemorySample(i / 100, 1, allocated=(i if i % 4 == 0 else None)) for i in range(401)]
    found = curves.points(Samples(rows=tuple(rows))) + curves.rest()
    allocated = [point for point in found if point.key == "memory/allocated_mib"]
    assert max(point.value for point in allocated) == 400 / MIB


def test_few_steps_have_a_point_each() -> None:
    points = curves_of(20, 128)["step/time_ms"]
    assert [point.step for point in points] == list(range(1, len(points) + 1))
    assert len(points) >= 127


@pytest.mark.parametrize("steps", [501, 5000, 100_000])
def test_many_steps_are_thinned(steps: int) -> None:
    points = curves_of(600, steps)["step/time_ms"]
    assert 250 <= len(points) <= 501


def test_thinned_steps_show_their_mean_pace_and_their_highest_peak() -> None:
    curves = Curves(BEGAN_AT)
    curves.points(Built(total_steps=1000, asked_batch=4, arguments={}))
    rows = (
        StepMark(1, 0.0, 1.0, 4, 7 * MIB),
        StepMark(2, 1.5, 4.0, 4, 5 * MIB),
        StepMark(3, 4.0, 5.0, 4, 5 * MIB),
        StepMark(4, 5.0, 6.0, 2, 6 * MIB),
    )
    found = [(p.key, p.value, p.step) for p in curves.points(Steps(rows=rows))]
    assert found == [
        ("step/time_ms", 2000, 2),
        ("step/samples_per_second", 2, 2),
        ("step/peak_allocated_mib", 7, 2),
        ("step/time_ms", 1000, 4),
        ("step/samples_per_second", 3, 4),
        ("step/peak_allocated_mib", 6, 4),
    ]


def test_steps_held_back_are_told_at_the_end() -> None:
    curves = Curves(BEGAN_AT)
    curves.points(Built(total_steps=5000, asked_batch=4, arguments={}))
    assert curves.points(Steps(rows=(StepMark(1, 0.0, 1.0, 4), StepMark(2, 1.0, 2.0, 4)))) == []
    assert ("step/samples_per_second", 4) in [(p.key, p.value) for p in curves.rest()]
    assert curves.rest() == []


def test_steps_of_unknown_size_have_times_and_no_rate() -> None:
    points = Curves(BEGAN_AT).points(Steps(rows=(StepMark(1, 0.0, 1.0, None),)))
    assert [point.key for point in points] == ["step/time_ms"]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_loss_that_is_not_finite_is_never_sent(loss: float) -> None:
    assert Curves(BEGAN_AT).points(Logged(step=10, values={"loss": loss})) == []


def test_loss_has_a_point_at_its_step() -> None:
    [point] = Curves(BEGAN_AT).points(Logged(step=10, values={"loss": 0.7, "grad_norm": 1.0}))
    assert (point.key, point.value, point.step) == ("step/loss", 0.7, 10)


# Sending


class Server:
    """Takes points; refuses the first `failures` calls."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.batches: list[list[Point]] = []
        self.refused = threading.Event()
        self.accepted = threading.Event()

    def __call__(self, points: list[Point]) -> None:
        if self.failures:
            self.failures -= 1
            self.refused.set()
            raise ConnectionError("gone")
        self.batches.append(points)
        self.accepted.set()

    def steps(self) -> list[int]:
        return [point.step for batch in self.batches for point in batch]


def loss(step: int) -> Logged:
    return Logged(step=step, values={"loss": 0.5})


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send every 10 ms: nobody waits seconds for a test."""
    monkeypatch.setattr("pipeline.curves._SEND_EVERY_SECONDS", 0.01)


def test_close_sends_what_is_left_in_one_batch() -> None:
    server = Server()
    sender = CurveSender(server, BEGAN_AT)
    for step in (1, 2, 3):
        sender.handle(loss(step))
    sender.handle(Samples(rows=(MemorySample(0.5, 7 * MIB),)))
    sender.close()
    assert len(server.batches) == 1
    assert server.steps() == [1, 2, 3, 500]
    assert (sender.unsent, sender.error) == (0, None)


@pytest.mark.usefixtures("hasty")
def test_points_are_sent_while_the_training_runs() -> None:
    server = Server()
    sender = CurveSender(server, BEGAN_AT)
    sender.handle(loss(1))
    assert server.accepted.wait(5)
    sender.close()
    assert server.steps() == [1]


@pytest.mark.usefixtures("hasty")
def test_points_of_a_failed_send_are_sent_again_once_and_in_order() -> None:
    server = Server()

    def failing_once(points: list[Point]) -> None:
        if not server.refused.is_set():
            sender.handle(loss(2))  # the training goes on meanwhile
            server.refused.set()
            raise ConnectionError("gone")
        server(points)

    sender = CurveSender(failing_once, BEGAN_AT)
    sender.handle(loss(1))
    assert server.accepted.wait(5)
    sender.close()
    assert server.steps() == [1, 2]
    assert (sender.unsent, sender.error) == (0, None)


def test_points_that_never_got_through_are_counted_and_the_error_kept() -> None:
    sender = CurveSender(Server(failures=100), BEGAN_AT)
    sender.handle(loss(1))
    sender.handle(loss(2))
    sender.close()
    assert sender.unsent == 2
    assert isinstance(sender.error, ConnectionError)


def test_handling_an_event_never_waits_for_the_server() -> None:
    free, entered = threading.Event(), threading.Event()

    def slow(points: list[Point]) -> None:
        entered.set()
        assert free.wait(10)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.curves._SEND_EVERY_SECONDS", 0.01)
        sender = CurveSender(slow, BEGAN_AT)
        sender.handle(loss(1))
        assert entered.wait(5)
        sender.handle(loss(2))  # returns, although the server has not answered
        assert sender.unsent == 1
        free.set()
        sender.close()
