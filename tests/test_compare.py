"""In which order rows are trained, and what is left of a comparison that does not go well."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from pipeline import compare as module
from pipeline.compare import compare
from pipeline.config import RunConfig
from pipeline.errors import Interrupted
from pipeline.launcher import Launched
from pipeline.presets import Ladder, resolve
from pipeline.record import Outcome, RunRecord
from pipeline.recorder import Recorder
from pipeline.run import Ran

LADDER = Ladder("mine", ["adamw", "bf16"])


class FakeTrainings:
    """As Runner; `ends` tells how the training of that number ends, if not well."""

    client = None

    def __init__(self, ends: Mapping[int, Outcome | type[BaseException]]) -> None:
        self.ends = ends
        self.seen: list[tuple[str, Mapping[str, str]]] = []

    def run(self, config: RunConfig, name: str, tags: Mapping[str, str]) -> Ran:
        end = self.ends.get(len(self.seen), Outcome.COMPLETED)
        self.seen.append((name, tags))
        if not isinstance(end, Outcome):
            raise end("a signal")
        record = RunRecord(
            config=config, outcome=end, interrupted=end is Outcome.FAILED, started_at=0.0,
            ended_at=1.0, metrics={"peak_memory_mib": 100.0},
        )  # fmt: skip
        return Ran(f"run-{len(self.seen)}", "0", Launched(record, Recorder(1), ""), [])


class FakeParent:
    """As the RunWriter of a parent run; remembers what was written."""

    run_id, experiment_id = "parent", "0"

    def __init__(self) -> None:
        self.tags: dict[str, str] = {}
        self.text = ""
        self.files: list[str] = []
        self.ended_by: BaseException | None = None

    def tag(self, tags: Mapping[str, str]) -> None:
        self.tags |= tags

    def note(self, markdown: str) -> None:
        self.text = markdown

    def summary(self, metrics: Mapping[str, float], ended_at: float) -> None:
        pass

    def artifacts(self, folder: Path) -> None:
        self.files = sorted(path.name for path in folder.iterdir())


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> FakeParent:
    fake = FakeParent()

    @contextmanager
    def parent_run(*_: object) -> Iterator[FakeParent]:
        try:
            yield fake
        except BaseException as error:
            fake.ended_by = error
            raise

    monkeypatch.setattr(module, "parent_run", parent_run)
    return fake


def trained(
    monkeypatch: pytest.MonkeyPatch,
    ends: Mapping[int, Outcome | type[BaseException]] | None = None,
    repeats: int = 2,
) -> tuple[FakeTrainings, module.Compared]:
    fake = FakeTrainings(ends or {})

    @contextmanager
    def runner(_: Console) -> Iterator[FakeTrainings]:
        yield fake

    monkeypatch.setattr(module, "runner", runner)
    configs = [resolve(name, "laptop", {"device": "cpu"}) for name in LADDER.presets]
    return fake, compare(LADDER, configs, repeats, Console(quiet=True))


def test_repeats_are_interleaved_and_named(
    monkeypatch: pytest.MonkeyPatch, parent: FakeParent
) -> None:
    fake, done = trained(monkeypatch)
    assert [name for name, _ in fake.seen] == [
        "adamw (1 of 2)", "bf16 (1 of 2)", "adamw (2 of 2)", "bf16 (2 of 2)",
    ]  # fmt: skip
    assert fake.seen[-1][1] == {"compare.row": "bf16", "compare.repeat": "2"}
    assert [row.repeats for row in done.comparison.rows] == [2, 2]
    assert parent.tags["outcome"] == "completed"
    assert {f"comparison.{kind}" for kind in ("csv", "html", "md", "png")} <= set(parent.files)


def test_child_that_runs_out_of_memory_is_a_row(
    monkeypatch: pytest.MonkeyPatch, parent: FakeParent
) -> None:
    fake, done = trained(monkeypatch, {1: Outcome.OUT_OF_MEMORY}, repeats=1)
    assert len(fake.seen) == 2
    assert done.comparison.rows[1].trouble == "out of memory"
    assert not done.comparison.interrupted
    assert parent.ended_by is None


@pytest.mark.parametrize("end", [Outcome.FAILED, Interrupted])
def test_interrupt_ends_it_with_what_is_known(
    monkeypatch: pytest.MonkeyPatch, parent: FakeParent, end: Outcome | type[BaseException]
) -> None:
    fake, done = trained(monkeypatch, {2: end})
    assert len(fake.seen) == 3
    assert done.comparison.interrupted
    assert done.comparison.rows[1].repeats == 1
    assert isinstance(parent.ended_by, Interrupted)
    assert "Interrupted" in parent.text
    assert "comparison.html" in parent.files
