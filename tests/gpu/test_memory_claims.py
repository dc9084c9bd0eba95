"""What the documentation claims of optimizations, on a real GPU: `python -m pytest tests/gpu`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from pipeline import nvml
from pipeline.launcher import Launched, Launcher
from pipeline.preflight import prepare
from pipeline.presets import resolve
from pipeline.record import MIB, Outcome, RunRecord

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not nvml.usable_gpus(), reason="no NVIDIA GPU is visible"),
]
Train = Callable[..., Launched]


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    done: dict[tuple[str, frozenset[tuple[str, Any]]], Launched] = {}
    with Launcher() as launcher:
        launcher.warm()

        def measured(preset: str, **settings: Any) -> Launched:
            key = (preset, frozenset(settings.items()))
            if key not in done:
                few = {"max_steps": 12, "seed": 1} | settings
                config = prepare(resolve(preset, "bert-base", few))
                done[key] = launcher.launch(config, lambda event: None)
            assert done[key].record.outcome is Outcome.COMPLETED, done[key].record.message
            return done[key]

        yield measured


def part(launched: Launched, name: str) -> float:
    return launched.record.metrics[f"ledger/{name}_mib"]


def losses(launched: Launched) -> list[float]:
    return [event.values["loss"] for event in launched.recorder.logged if "loss" in event.values]


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {},
    "bf16": {},
    "fp16": {},
    "adafactor": {},
    "gradient_checkpointing": {},
    "accumulation": {},
    "adam8bit": {},
    "pure_bf16+adamw8bit": {},
    "expandable_segments": {},
}


@pytest.mark.parametrize("preset", PRESETS)
def test_parts_sum_to_the_peak(train: Train, preset: str) -> None:
    record: RunRecord = train(preset).record
    assert record.ledger
    assert record.ledger.phase
    parts = record.ledger.model_dump(exclude={"phase"})
    assert min(parts.values()) >= 0
    assert sum(parts.values()) / MIB == pytest.approx(record.metrics["peak_memory_mib"], abs=1e-6)


def test_adamw_keeps_two_numbers_per_weight(train: Train) -> None:
    launched = train("adamw")
    assert part(launched, "optimizer") == pytest.approx(2 * part(launched, "weights"), rel=0.01)


def test_bf16_halves_activations_and_keeps_weights(train: Train) -> None:
    one, other = train("adamw", micro_batch=16), train("bf16", micro_batch=16)
    assert part(other, "activations") < 0.75 * part(one, "activations")
    assert part(other, "weights") == part(one, "weights")


def test_checkpointing_saves_activations_alone(train: Train) -> None:
    one, other = train("adamw"), train("gradient_checkpointing")
    assert part(other, "activations") < 0.7 * part(one, "activations")
    assert part(other, "optimizer") == part(one, "optimizer")


def test_accumulation_keeps_gradients_alive_through_the_forward_pass(train: Train) -> None:
    one, other = train("adamw", micro_batch=1), train("accumulation")
    risen = other.record.metrics["peak_allocated_mib"] - one.record.metrics["peak_allocated_mib"]
    assert risen == pytest.approx(part(one, "weights"), rel=0.2)


def test_8_bit_adam_keeps_a_quarter_and_its_scales(train: Train) -> None:
    full, quantized = train("adamw"), train("adam8bit")
    assert 0.25 < part(quantized, "optimizer") / part(full, "optimizer") < 0.27


def test_losses_agree_where_the_numbers_should(train: Train) -> None:
    plain = losses(train("adamw", micro_batch=4))
    assert plain
    for preset in ("gradient_checkpointing", "expandable_segments"):
        assert losses(train(preset, micro_batch=4)) == pytest.approx(plain, abs=2e-3)
    assert losses(train("bf16", micro_batch=4)) == pytest.approx(plain, abs=3e-2)


def test_a_run_repeats_within_a_few_blocks_of_the_allocator(train: Train) -> None:
    first, again = train("adamw"), train("adamw", stall_timeout=901)
    assert again.record.metrics["peak_memory_mib"] == pytest.approx(
        first.record.metrics["peak_memory_mib"], abs=40
    )


def test_history_is_kept_for_torchs_viewer(train: Train) -> None:
    import pickle

    kept = train("adamw", snapshot=True, max_steps=4).recorder.files["memory_snapshot.pickle"]
    snapshot = pickle.loads(kept)
    assert any(event["action"] == "alloc" for event in snapshot["device_traces"][0])
