"""What a search may vary: batches, and the settings that a file in params/spaces lists."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import ValidationError

from pipeline.combinations import contradictions
from pipeline.config import Label, RunConfig, Training, Workload
from pipeline.errors import ConfigError
from pipeline.layers import Problems, did_you_mean, read_layer

_WORDS = ("name", "summary")
_BATCH = ("micro_batch", "accumulation", "training_arguments")


class Candidate(NamedTuple):
    """One configuration of a space."""

    micro_batch: int
    accumulation: int
    options: tuple[tuple[str, Any], ...] = ()
    """The other settings that the space varies, in its order."""

    @property
    def key(self) -> str:
        """What names it in a study, in words that people read."""
        words = filter(None, map(_word, self.options))
        return " ".join([f"{self.micro_batch}x{self.accumulation}", *words])

    @property
    def effective_batch(self) -> int:
        """Samples per optimizer step."""
        return self.micro_batch * self.accumulation

    def applied(self, start: RunConfig) -> RunConfig:
        """Return the training that this candidate stands for."""
        own = {"micro_batch": self.micro_batch, "accumulation": self.accumulation}
        values = start.training.model_dump() | own | dict(self.options)
        rows = max(start.workload.samples, self.effective_batch)
        workload = start.workload.model_dump() | {"samples": rows}
        random = start.workload.data == "random"  # made to order: there is always a whole batch
        return start.model_copy(
            update={
                "preset": Label(name=self.key, summary=f"{start.preset.name}, but {self.key}"),
                "training": Training.model_validate(values),
                "workload": Workload.model_validate(workload) if random else start.workload,
            }
        )


def _word(option: tuple[str, Any]) -> str:
    """Return a setting as people say it: what is off goes without saying, a name by itself."""
    name, value = option
    if value is None or value is False:
        return ""
    if value is True:
        return name
    return value if isinstance(value, str) else f"{name}={value}"


def read_space(name: str) -> Mapping[str, Sequence[Any]]:
    """Return the values of each setting that a space varies. Raises ConfigError."""
    problems = Problems()
    layer = read_layer("spaces", name, problems)
    dimensions = {
        str(key): _values(layer.place, str(key), listed, problems)
        for key, listed in layer.values.items()
        if key not in _WORDS
    }
    problems.raise_any()
    return dimensions


def _values(place: str, key: str, listed: Any, problems: Problems) -> list[Any]:
    allowed = [name for name in Training.model_fields if name not in _BATCH]
    if key not in allowed:
        near = did_you_mean(key, allowed)
        batch = "; the batch is set by effective_batch and micro_batches" if key in _BATCH else near
        problems.add(f"{place}: {key}: expected one of {', '.join(allowed)}{batch}")
        return []
    if not isinstance(listed, list) or not listed:
        problems.add(f"{place}: {key}={listed!r}: expected a list of values")
        return []
    values = []
    for value in listed:
        try:
            values.append(getattr(Training.model_validate({key: value}), key))
        except ValidationError as error:
            problems.add(f"{place}: {key}={value!r}: {error.errors()[0]['msg']}")
    return list(dict.fromkeys(values))


def batches(
    start: Training, effective: Sequence[int], micro_batches: Sequence[int]
) -> list[tuple[int, int]]:
    """Return every pair of micro-batch and accumulation, the smallest micro-batch first.

    Without an effective batch the micro-batches that are asked for go with the start's
    accumulation. Raises ConfigError where one of them is no part of any effective batch.
    """
    if micro_batches and not effective:
        return [(size, start.accumulation) for size in sorted(set(micro_batches))]
    effective = effective or [start.effective_batch]
    whole = ", ".join(map(str, effective))
    for size in micro_batches:
        if all(batch % size for batch in effective):
            raise ConfigError(f"micro_batches: {size} does not divide effective_batch={whole}")
    pairs = {
        (size, batch // size)
        for batch in effective
        for size in micro_batches or range(1, batch + 1)
        if batch % size == 0
    }
    return sorted(pairs)


def candidates(
    start: RunConfig, pairs: Sequence[tuple[int, int]], dimensions: Mapping[str, Sequence[Any]]
) -> list[Candidate]:
    """Return all configurations of a space, without those whose settings contradict each other."""
    return list(_sound(start, pairs, dimensions))


def _sound(
    start: RunConfig, pairs: Sequence[tuple[int, int]], dimensions: Mapping[str, Sequence[Any]]
) -> Iterator[Candidate]:
    device = start.measurement.device
    for values in itertools.product(*dimensions.values()):
        options = tuple(zip(dimensions, values, strict=True))
        training = Training.model_validate(start.training.model_dump() | dict(options))
        if not any(contradictions(training, device)):
            yield from (Candidate(size, count, options) for size, count in pairs)


def start_of(start: RunConfig, effective: Sequence[int], dimensions: Sequence[str]) -> Candidate:
    """Return the starting preset as a candidate, with the effective batch where there is one."""
    training = start.training
    size, count = training.micro_batch, training.accumulation
    if len(effective) == 1:
        [whole] = effective
        size = max(part for part in range(1, whole + 1) if whole % part == 0 and part <= size)
        count = whole // size
    return Candidate(size, count, tuple((name, getattr(training, name)) for name in dimensions))


def numbers(name: str, text: str | None) -> list[int]:
    """Return whole numbers: `32`, `1,2,4`, or a range `8..64`, which doubles from its low end."""
    if not text:
        return []
    try:
        low, dots, high = text.partition("..")
        if dots:
            doubled = itertools.takewhile(
                lambda value: value <= int(high), (int(low) * 2**n for n in itertools.count())
            )
            found = list(doubled) if int(low) > 0 else []
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigError(f"{name}={text!r}: expected whole numbers above 0: 32, 8,16,32 or 8..64")
    return found
