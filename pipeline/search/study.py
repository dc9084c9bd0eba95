"""The Optuna study: what was measured outlives every process, and several share the work.

Each job is an Optuna trial. It is claimed by creating it RUNNING, its job included, in one
transaction, so that two processes never do the same; the later of two equal claims steps back.
"""

import json
import logging
import re
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.exceptions import DuplicatedStudyError, ExperimentalWarning, UpdateFinishedTrialError
from optuna.storages import BaseStorage, RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from pipeline import processes
from pipeline.errors import ConfigError, TrackingError
from pipeline.search.jobs import Entry, Job
from pipeline.search.judge import Measured, shortfall
from pipeline.search.space import Candidate

_HEARTBEAT_SECONDS = 20
NOTHING_MIB = 1e9
"""The value of a trial that never got as far as a memory figure: Optuna learns from finite ones."""


class Claim(NamedTuple):
    """A job that this process has taken on."""

    number: int
    job: Job
    trial: Trial


class Study:
    """A study of one space, open in this process."""

    def __init__(self, study: optuna.Study, candidates: Sequence[Candidate]) -> None:
        self.name = study.study_name
        self._study = study
        self._storage = study._storage
        self._distributions = distributions(candidates)
        self._candidates = set(candidates)

    def entries(self) -> list[Entry]:
        """Return all jobs that somebody does or has done, the oldest first."""
        found = []
        for trial in self._study.get_trials(deepcopy=False):
            if trial.state is TrialState.RUNNING:
                found.append(Entry(trial.number, _job(trial), None))
            elif trial.state is TrialState.COMPLETE:
                result = Measured.model_validate_json(trial.user_attrs["measured"])
                found.append(Entry(trial.number, _job(trial), result))
        return found

    @contextmanager
    def claimed(self, job: Job) -> Iterator[Claim | None]:
        """Take on a job for the block; None if another process was faster.

        A job that the block does not finish counts as never begun.
        """
        with ExitStack() as stack:
            # An interrupt in between would leave a trial that nobody ends.
            with processes.interrupts_put_off():
                same, mine = self._added(job)
                stack.callback(self._fail, mine.number)
            if same[0].number == mine.number:
                stack.enter_context(self._beating(mine._trial_id))
                yield Claim(mine.number, job, Trial(self._study, mine._trial_id))
            else:
                yield None

    def _added(self, job: Job) -> tuple[list[FrozenTrial], FrozenTrial]:
        """Add a trial that runs; return all that are of this job, in order, and ours."""
        candidate, own = job.candidate, processes.identity()
        varied = job.role == "trial" and candidate in self._candidates
        self._study.add_trial(
            create_trial(
                state=TrialState.RUNNING,
                params=parameters(candidate, self._distributions) if varied else {},
                distributions=dict(self._distributions) if varied else {},
                user_attrs={
                    "key": job.key,
                    "job": json.dumps([job.role, candidate, job.repeat]),
                    "host": socket.gethostname(),
                    "process": own,
                },
            )
        )
        running, done = TrialState.RUNNING, TrialState.COMPLETE
        trials = self._study.get_trials(deepcopy=False, states=(running, done))
        same = [trial for trial in trials if trial.user_attrs["key"] == job.key]
        return same, next(t for t in reversed(same) if t.user_attrs["process"] == own)

    def _fail(self, number: int) -> None:
        with suppress(UpdateFinishedTrialError):
            self._study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def finish(self, claim: Claim, result: Measured, floor: float) -> None:
        """Record what a job showed."""
        claim.trial.set_user_attr("run_id", result.run_id)
        claim.trial.set_user_attr("measured", result.model_dump_json())
        claim.trial.set_constraint("samples_per_second", shortfall(result, floor))
        self._study.tell(claim.trial, result.memory_mib or NOTHING_MIB)

    def free_stale(self) -> list[int]:
        """Fail the trials whose process is gone, so that their jobs are done anew."""
        freed, here = [], socket.gethostname()
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            own = trial.user_attrs.get("host") == here
            if own and not processes.is_alive(trial.user_attrs["process"]):
                self._fail(trial.number)
                freed.append(trial.number)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self._study)  # those of other machines
        return freed

    def remember(self, **words: Any) -> None:
        """Keep the answer with the study, for whoever opens it by other means."""
        for name, value in words.items():
            self._study.set_user_attr(name, value)

    @contextmanager
    def _beating(self, trial_id: int) -> Iterator[None]:
        """Tell the storage now and then that the trial's process lives."""
        storage, done = self._storage, threading.Event()
        if not isinstance(storage, RDBStorage):
            yield
            return
        storage.record_heartbeat(trial_id)

        def beat() -> None:
            while not done.wait(_HEARTBEAT_SECONDS):
                with suppress(Exception):  # the next one may go through
                    storage.record_heartbeat(trial_id)

        thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _job(trial: FrozenTrial) -> Job:
    role, (size, count, options), repeat = json.loads(trial.user_attrs["job"])
    return Job(role, Candidate(size, count, tuple(map(tuple, options))), repeat)


def distributions(candidates: Sequence[Candidate]) -> dict[str, BaseDistribution]:
    """Return the space as Optuna sees it: the choices of each setting."""
    pairs = dict.fromkeys((c.micro_batch, c.accumulation) for c in candidates)
    sizes = sorted({size for size, _ in pairs})
    choices: dict[str, list[Any]] = (
        {"micro_batch": sizes}
        if len(sizes) == len(pairs)
        else {"batch": [f"{size}x{count}" for size, count in pairs]}
    )
    for candidate in candidates:
        for name, value in candidate.options:
            known = choices.setdefault(name, [])
            if value not in known:
                known.append(value)
    return {name: CategoricalDistribution(values) for name, values in choices.items()}


def parameters(candidate: Candidate, space: Mapping[str, BaseDistribution]) -> dict[str, Any]:
    """Return a candidate as Optuna sees it."""
    batch: Any = candidate.micro_batch
    name = "micro_batch"
    if name not in space:
        name, batch = "batch", f"{candidate.micro_batch}x{candidate.accumulation}"
    return {name: batch} | dict(candidate.options)


def open_study(
    url: str, name: str, identity: Mapping[str, Any], candidates: Sequence[Candidate]
) -> Study:
    """Return the study of this name, new or gone on with.

    Raises ConfigError where it is a study of something else, TrackingError where the storage
    cannot be used.
    """
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = _storage(url)
    own = json.loads(json.dumps(identity))
    try:
        study = optuna.create_study(storage=storage, study_name=name, direction="minimize")
        study.set_user_attr("identity", own)
    except DuplicatedStudyError:
        study = optuna.load_study(storage=storage, study_name=name)
        there = _identity_of(study)
        problems = differences(there, own)
        if problems:
            head = f"study={name}: holds trials of something else, use another study name"
            raise ConfigError(head, *(f"study={name}: {problem}" for problem in problems)) from None
    found = Study(study, candidates)
    found.free_stale()
    return found


def _identity_of(study: optuna.Study) -> Mapping[str, Any]:
    """Return what the study is of; the process that made it may be about to say so."""
    for _ in range(20):
        found = study.user_attrs.get("identity")
        if found is not None:
            return dict(found)
        threading.Event().wait(0.1)
    return {}


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Return in words what two identities do not have in common."""
    absent = "not set"
    return [
        f"{key} is {there.get(key, absent)} there and {here.get(key, absent)} here"
        for key in dict.fromkeys([*there, *here])
        if there.get(key, absent) != here.get(key, absent)
    ]


def _storage(url: str) -> BaseStorage:
    shown = re.sub(r"(//[^:/@]*):[^@]*@", r"\1:***@", url)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    wait = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    try:
        if url.startswith("redis"):
            return optuna.storages.get_storage(url)
        with warnings.catch_warnings(), processes.one_at_a_time(url):
            warnings.simplefilter("ignore", ExperimentalWarning)
            return RDBStorage(url, engine_kwargs=wait, heartbeat_interval=_HEARTBEAT_SECONDS)
    except Exception as error:  # each database driver has errors of its own
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        wanted = "expected an Optuna storage such as sqlite:///optuna.db"
        raise TrackingError(f"storage={shown}: cannot be used: {reason}; {wanted}") from error
