"""Predict the memory of trainings, in a process of their own: no GPU is needed or touched."""

import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline import nvml
from pipeline.cards import CARDS, DEFAULT_CARD, Card, card_called, card_of
from pipeline.config import RunConfig
from pipeline.launcher import Launcher
from pipeline.prediction import NoPrediction, Prediction
from pipeline.worker import start

_TIMEOUT_SECONDS = 180  # the largest models that one card trains need a third of this


def which_card(asked: str) -> tuple[Card, str]:
    """Return the card that is asked for, and why it is this one where that was left open.

    `auto` and `cuda` mean the GPU of this machine, where it is one of the table's. Raises
    ConfigError.
    """
    if not asked.startswith(("auto", "cuda")):
        return card_called(asked), ""
    here = next(filter(None, (card_of(name, None) for name in nvml.usable_gpus())), None)
    if here is not None:
        return here, f"device={here.name}, the GPU of this machine"
    others = ", ".join(name for name in CARDS if name != DEFAULT_CARD)
    return CARDS[DEFAULT_CARD], f"device={DEFAULT_CARD}; others are {others}"


def predict(
    launcher: Launcher, configs: Sequence[RunConfig], card: Card
) -> list[Prediction | NoPrediction]:
    """Return a prediction for each configuration, in their order.

    Those that differ in accumulation and allocator alone cost as much as one of them; others run
    side by side, as many as there are processors, each in a process of its own: packages remember
    settings of optimizers that are gone.
    """
    alike: dict[str, list[int]] = {}
    for index, config in enumerate(configs):
        alike.setdefault(_key(config), []).append(index)
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        asked = {
            tuple(indices): pool.submit(_ask, launcher, [configs[i] for i in indices], card)
            for indices in alike.values()
        }
        found = {
            index: prediction
            for indices, future in asked.items()
            for index, prediction in zip(indices, future.result(), strict=True)
        }
    finally:
        pool.shutdown(cancel_futures=True)
    return [found[index] for index in range(len(configs))]


def _key(config: RunConfig) -> str:
    """Return what is the same for configurations that share a rehearsal."""
    training = config.training.model_copy(update={"accumulation": 1, "alloc_conf": None})
    return training.model_dump_json() + config.workload.model_dump_json()


def _ask(
    launcher: Launcher, configs: Sequence[RunConfig], card: Card
) -> list[Prediction | NoPrediction]:
    with tempfile.TemporaryDirectory(prefix="pipeline-") as folder:
        log = Path(folder) / "worker.log"
        log.touch()  # a worker may end before it has a word to write
        texts = [config.model_dump_json() for config in configs]
        try:
            answer: list[Prediction | NoPrediction] = launcher.ask(
                start.predictor, texts, card, str(log), timeout_seconds=_TIMEOUT_SECONDS
            )
        except (EOFError, TimeoutError) as error:
            last = (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]
            late = isinstance(error, TimeoutError)
            why = f"took more than {_TIMEOUT_SECONDS} s" if late else f"ended: {last}"
            failed = NoPrediction(reason=f"the process of the prediction {why}")
            return [failed] * len(configs)
    return answer
