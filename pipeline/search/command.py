"""One search = one MLflow run whose children are its trials."""

import json
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from pipeline.artifacts import config_yaml
from pipeline.config import Label, RunConfig
from pipeline.errors import ConfigError, Interrupted
from pipeline.handover import hand_over
from pipeline.run import Runner, runner
from pipeline.search.answer import Answer, Row, answer, line, sentences, trials_csv
from pipeline.search.figure import write_html, write_png
from pipeline.search.jobs import Entry, Job
from pipeline.search.loop import Limits, Search, StoppedError, Trained, training
from pipeline.search.prepare import Prepared
from pipeline.search.study import Study, open_study
from pipeline.stores import beside
from pipeline.tracking import parent_run, where_to_look
from pipeline.writer import RunWriter, fetch, summary_of


class Searched(NamedTuple):
    """What a search came to, and what ended it early, if anything did."""

    answer: Answer
    unlogged: Sequence[str]
    interrupted: bool = False
    stopped_by: str | None = None
    """The error of a training, not about memory or speed."""


def search(
    prepared: Prepared, study: str | None, storage: str | None, console: Console
) -> Searched:
    """Search; everything goes to MLflow and to the study. Raises TrackingError, ConfigError."""
    logging.getLogger("mlflow.system_metrics").setLevel(logging.WARNING)  # four lines a trial
    name = study or f"search-{time.strftime('%Y%m%d-%H%M%S')}"
    with runner(console if console.is_terminal else Console(quiet=True)) as trainings:
        mlflow_uri = trainings.client.tracking_uri
        url = storage or beside(mlflow_uri, "optuna.db")
        if url == mlflow_uri:
            raise ConfigError(f"storage={url}: that is MLflow's own; use another file or database")
        opened = open_study(url, name, prepared.identity, prepared.candidates)
        work = _Work(prepared, opened, trainings, console)
        work.say(f"study {name} in {url}")
        try:
            with (
                parent_run(trainings.client, f"search {name}", _params(prepared, name)) as writer,
                work.handed_in(writer),
            ):
                work.run()
        except Interrupted:
            return Searched(work.answer(), work.unlogged, interrupted=True)
        except StoppedError as error:
            return Searched(work.answer(), work.unlogged, stopped_by=str(error))
        return Searched(work.answer(), work.unlogged)


def _params(prepared: Prepared, name: str) -> dict[str, Any]:
    asked = {f"search.{key}": value for key, value in prepared.asked._asdict().items()}
    return asked | {"search.study": name, **prepared.plan.start.applied(prepared.start).dotted()}


class _Work:
    """Ties a study to the MLflow runs of its trials."""

    def __init__(
        self, prepared: Prepared, study: Study, trainings: Runner, console: Console
    ) -> None:
        self._prepared = prepared
        self._study = study
        self._trainings = trainings
        self._console = console
        self.unlogged: list[str] = []
        """What of trials and answer is not in MLflow, and where it lies instead."""

    def say(self, text: str) -> None:
        """Tell the user."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def run(self) -> None:
        """Search until there is an answer, or a limit."""
        prepared, asked = self._prepared, self._prepared.asked
        deadline = time.monotonic() + asked.timeout if asked.timeout else None
        search = Search(prepared.start, prepared.plan, self._study, self._measure, self._show)
        search.run(Limits(asked.trials, deadline))

    def answer(self) -> Answer:
        """Return what the study says."""
        prepared = self._prepared
        floor, entries = prepared.asked.min_throughput, self._study.entries()
        return answer(self._study.name, floor, prepared.plan, prepared.candidates, entries)

    def _measure(self, config: RunConfig, *, name: str, tags: dict[str, str]) -> Trained:
        ran = self._trainings.run(config, name=name, tags=tags)
        self.unlogged += ran.unlogged
        launched = ran.launched
        return Trained(launched.record, ran.run_id, launched.recorder.finished is None)

    def _show(self, entry: Entry) -> None:
        found = self.answer()
        row = next(row for row in found.rows if row.trial == entry.number)
        self.say(line(row, found.best))

    @contextmanager
    def handed_in(self, writer: RunWriter) -> Iterator[None]:
        """Tell and keep what was found by the end of the block, also if that comes early."""
        try:
            yield
        except (Interrupted, StoppedError):
            self._hand_in(writer)
            raise
        self._hand_in(writer)

    def _hand_in(self, writer: RunWriter) -> None:
        found = self.answer()
        for sentence in sentences(found):
            self.say(sentence)
        rows = found.rows
        self._study.remember(
            winner=found.best.configuration if found.best else None,
            complete=found.complete,
            inferred={r.configuration: [r.verdict, r.follows_from] for r in rows if not r.run_id},
        )
        write, log = partial(self._write_files, found), partial(self._log, writer, found)
        self.unlogged += hand_over(write, log, writer.run_id)
        self.say(f"see {where_to_look(writer.run_id, writer.experiment_id)}")

    def _log(self, writer: RunWriter, found: Answer, folder: Path | None) -> None:
        counts = {"measured": found.measured, "inferred": found.inferred, "failed": found.failed}
        metrics = {f"trials/{name}": float(count) for name, count in counts.items()}
        if found.best:
            own = summary_of(self._trainings.client, found.best.run_id)
            metrics |= {f"best/{name}": value for name, value in own.items()}
        writer.summary(metrics, time.time())
        writer.note("\n\n".join(sentences(found)))
        if folder:
            writer.artifacts(folder)

    def _write_files(self, found: Answer, folder: Path) -> None:
        (folder / "trials.csv").write_text(trials_csv(found.rows), encoding="utf-8")
        if found.best:
            (folder / "best.yaml").write_text(self._best_yaml(found, found.best), encoding="utf-8")
            if found.confirmed:
                name = "training_arguments.json"
                fetch(self._trainings.client, found.best.run_id, name, folder)
        write_html(found, folder / "search.html")
        write_png(found, folder / "search.png")

    def _best_yaml(self, found: Answer, best: Row) -> str:
        prepared = self._prepared
        known = [prepared.plan.start, *prepared.candidates]
        candidate = next(one for one in known if one.key == best.configuration)
        job = Job("confirm", candidate)
        config = training(prepared.start, job, prepared.plan.floor, None)
        label = Label(
            name="best",
            summary=f"{best.configuration}, found by the search {found.study}",
            why=" ".join(sentences(found)),
        )
        return config_yaml(config.model_copy(update={"preset": label}))


def as_json(found: Answer) -> str:
    """Return the answer as one JSON document."""
    return json.dumps(found.model_dump(mode="json"), indent=2)
