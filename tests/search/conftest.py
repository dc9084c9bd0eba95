"""A study in a file, and a training that is a formula instead."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig
from pipeline.presets import resolve
from pipeline.record import Outcome, RunRecord
from pipeline.search.jobs import Entry
from pipeline.search.judge import Measured
from pipeline.search.loop import Search, Trained
from pipeline.search.prepare import Asked, Prepared, prepare
from pipeline.search.space import Candidate
from pipeline.search.study import Study, open_study

Formula = Callable[[Candidate], Measured]


class Bench:
    """Searches on one storage with formulas; keeps which configurations were measured."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/optuna.db"
        self.start = resolve("adamw", "laptop", {"device": "cpu", "micro_batch": "4"})
        self.configs: list[RunConfig] = []
        self.names: list[str] = []
        self.entries: list[Entry] = []

    def prepared(self, throughput: str = "90%", **asked: Any) -> Prepared:
        words = Asked(min_throughput=throughput, effective_batch="8")._replace(**asked)
        return prepare(words, self.start)

    def study(self, prepared: Prepared, name: str = "s") -> Study:
        return open_study(self.url, name, prepared.identity, prepared.candidates)

    def search(self, prepared: Prepared, formula: Formula, name: str = "s") -> tuple[Search, Study]:
        study = self.study(prepared, name)

        def measure(config: RunConfig, *, name: str, tags: dict[str, str]) -> Trained:
            self.configs.append(config)
            self.names.append(name.partition(" ")[2])
            training = config.training
            result = formula(Candidate(training.micro_batch, training.accumulation))
            return trained(config, result, len(self.configs))

        search = Search(prepared.start, prepared.plan, study, measure, self.entries.append)
        return search, study


def trained(config: RunConfig, result: Measured, number: int) -> Trained:
    figures = {
        "peak_memory_mib": result.memory_mib,
        "samples_per_second": result.speed,
        "samples_per_second_low": result.speed_low,
        "samples_per_second_high": result.speed_high,
    }
    record = RunRecord(
        config=config,
        outcome=result.outcome,
        message=result.message,
        started_at=100.0,
        ended_at=102.0,
        steps=result.steps,
        metrics={key: value for key, value in figures.items() if value is not None},
    )
    return Trained(record, f"run-{number}", is_crash=result.outcome is Outcome.FAILED)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)
