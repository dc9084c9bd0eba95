"""What had been predicted, beside what was measured: each run on a GPU shows how far off it was."""

from pipeline.cards import Card, card_of
from pipeline.config import RunConfig
from pipeline.estimate import predict
from pipeline.launcher import Launcher
from pipeline.prediction import NoPrediction, Prediction
from pipeline.record import Outcome, RunRecord

PREDICTED, ERROR = "predicted/peak_memory_mib", "predicted/error_percent"
_TELLING = (Outcome.COMPLETED, Outcome.OUT_OF_MEMORY)


class Foresight:
    """Predicts trainings after they ran, when nothing is left to disturb; repeats cost nothing."""

    def __init__(self, launcher: Launcher) -> None:
        self._launcher = launcher
        self._known: dict[tuple[str, str], Prediction | NoPrediction] = {}

    def beside(self, record: RunRecord) -> RunRecord:
        """Return the record with the prediction's figures, or with the reason why there are none.

        The prediction sees the configuration and the card, nothing of what was measured. Of a
        training on a CPU, or one that ended for another reason than memory, it says nothing.
        """
        device = record.device
        if device is None or device.kind != "cuda" or record.outcome not in _TELLING:
            return record
        card = card_of(device.name, device.total_bytes)
        if card is None:
            return _warned(record, f"{device.name} is not among the cards that it knows")
        prediction = self._of(record.config, card)
        if isinstance(prediction, NoPrediction):
            return _warned(record, prediction.reason)
        figures = {PREDICTED: prediction.peak_memory_mib}
        measured = record.metrics.get("peak_memory_mib")
        if measured and record.outcome is Outcome.COMPLETED:
            figures[ERROR] = (prediction.peak_memory_mib / measured - 1) * 100
        return record.model_copy(update={"metrics": {**record.metrics, **figures}})

    def _of(self, config: RunConfig, card: Card) -> Prediction | NoPrediction:
        settings = {"workload", "training", "measurement"}
        key = config.model_dump_json(include=settings), card.name
        if key not in self._known:
            [self._known[key]] = predict(self._launcher, [config], card)
        return self._known[key]


def _warned(record: RunRecord, reason: str) -> RunRecord:
    warning = f"no prediction of the peak: {reason}"
    return record.model_copy(update={"warnings": (*record.warnings, warning)})
