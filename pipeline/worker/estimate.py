"""The worker of a prediction: configurations in, predictions out."""

import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection

from pipeline.cards import Card
from pipeline.config import RunConfig, Training
from pipeline.errors import PipelineError
from pipeline.prediction import NoPrediction, Prediction
from pipeline.record import MIB
from pipeline.worker.rehearsal import rehearse
from pipeline.worker.replay import replay
from pipeline.worker.support import missing_packages
from pipeline.worker.trace import Tracer

_HALF = ("bf16", "fp16", "fp8", "pure_bf16")


def main(configs: Sequence[str], card: Card, connection: Connection) -> None:
    """Send a prediction for each configuration, in their order."""
    connection.send(predict([RunConfig.model_validate_json(text) for text in configs], card))
    connection.close()


def predict(configs: Sequence[RunConfig], card: Card) -> list[Prediction | NoPrediction]:
    """Predict configurations that differ in accumulation and allocator alone.

    They share a rehearsal: that of the one which accumulates most shows all parts of a step.
    """
    rehearsed = _rehearsed(max(configs, key=lambda config: config.training.accumulation), card)
    if isinstance(rehearsed, NoPrediction):
        return [rehearsed] * len(configs)
    return [_prediction(config, rehearsed, card) for config in configs]


def _rehearsed(config: RunConfig, card: Card) -> Tracer | NoPrediction:
    missing = missing_packages(config.training)
    if missing:
        return NoPrediction(reason="; ".join(missing))
    try:
        return rehearse(config, card)
    except PipelineError as error:
        return NoPrediction(reason=str(error))
    except Exception as error:
        # Whatever a model or an optimizer does that tensors without data cannot do.
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        return NoPrediction(
            reason=f"the training cannot be played without data: {type(error).__name__}: {first}"
        )


def _prediction(config: RunConfig, rehearsed: Tracer, card: Card) -> Prediction:
    training = config.training
    ledger = replay(
        rehearsed,
        training.accumulation,
        expandable="expandable_segments:True" in (training.alloc_conf or ""),
        context=int(card.context_mib(half=training.precision in _HALF) * MIB),
    )
    usable = min(card.usable_mib, config.measurement.memory_limit_mib or card.usable_mib)
    return Prediction(
        card=card.name, usable_mib=usable, ledger=ledger, not_covered=tuple(_not_covered(training))
    )


def _not_covered(training: Training) -> list[str]:
    """Say in plain words what the figures do not know of."""
    alloc_conf = (training.alloc_conf or "").replace("expandable_segments:True", "").strip(",")
    told = {
        "torch.compile: predicted is the training without it; compiled it keeps other "
        "intermediates, mostly fewer": training.compile,
        "fp8: predicted is bf16; torchao's scaled copies of weights and inputs are left out": (
            training.precision == "fp8"
        ),
        "flash_attention_2: predicted with PyTorch's own flash kernel": (
            training.attention == "flash_attention_2"
        ),
        "paged optimizer: its state is counted as if it stayed on the card": (
            training.optimizer.startswith("paged_")
        ),
        f"alloc_conf: {alloc_conf} is left out": bool(alloc_conf),
        f"training_arguments: {', '.join(training.training_arguments)}: applied as they are, their "
        "effect on CUDA's kernels is not known": bool(training.training_arguments),
    }
    return [words for words, applies in told.items() if applies]
