"""Predictions: how far they are from what was measured, and what they say of what they cannot."""

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest
from estimate_error import REFERENCE, compare

from pipeline.cards import CARDS, card_called, card_of
from pipeline.config import RunConfig
from pipeline.errors import ConfigError
from pipeline.estimate import predict
from pipeline.launcher import Launcher
from pipeline.prediction import NoPrediction, Prediction
from pipeline.presets import resolve
from pipeline.record import MIB


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with Launcher() as launcher:
        launcher.warm()
        yield launcher


def small(preset: str, **settings: object) -> RunConfig:
    base = {"device": "cuda", "model": "bert-small", "seq_len": 128}
    return resolve(preset, "bert-base", base | settings)


def predicted(launcher: Launcher, *configs: RunConfig, card: str = "h200") -> list[Prediction]:
    found = predict(launcher, configs, CARDS[card])
    known = [each for each in found if isinstance(each, Prediction)]
    assert len(known) == len(found), found
    return known


def test_predictions_of_the_reference_are_near_what_was_measured(tmp_path: Path) -> None:
    """Every third row, for the time it takes: `benchmarks/estimate_error.py` shows all of them."""
    heading, *lines = REFERENCE.read_text(encoding="utf-8").splitlines(keepends=True)
    some = tmp_path / "some.csv"
    some.write_text(heading + "".join(lines[::3]), encoding="utf-8")
    rows = list(compare(some))
    assert len(rows) == 9
    allocated = [abs(row.allocated_percent) for row in rows]
    assert mean(allocated) <= 0.5
    assert max(allocated) <= 1
    assert mean(abs(row.process_percent) for row in rows) <= 1


def test_parts_are_those_of_the_objects(launcher: Launcher) -> None:
    [prediction] = predicted(launcher, small("adamw", accumulation=2))
    parameters = 11_170_818  # of BERT-small with a head for two labels
    ledger = prediction.ledger
    # Each tensor's size is rounded up, and a block keeps what is left of it up to 1 MiB.
    assert 4 * parameters <= ledger.weights <= 4 * parameters * 1.05
    assert 8 * parameters <= ledger.optimizer <= 8 * parameters * 1.05
    assert ledger.context == 742 * MIB


def test_accumulation_keeps_the_gradients_during_the_next_forward_pass(launcher: Launcher) -> None:
    once, twice, often = predicted(
        launcher, *(small("bf16", micro_batch=8, accumulation=n) for n in (1, 2, 16))
    )
    gradients = 4 * 11_170_818 / MIB
    assert 0.5 * gradients < twice.peak_allocated_mib - once.peak_allocated_mib < 1.2 * gradients
    assert often.peak_allocated_mib == pytest.approx(twice.peak_allocated_mib, rel=0.01)


def test_configurations_together_are_predicted_as_one_by_one(launcher: Launcher) -> None:
    configs = [small("adamw8bit"), small("adamw"), small("adamw", optimizer="bnb_adam8bit")]
    together = predicted(launcher, *configs)
    assert together == [predicted(launcher, config)[0] for config in configs]
    states = [each.ledger.optimizer for each in together]
    assert states[2] < states[0] < states[1]  # the Trainer's keeps embeddings at 32 bits


def test_eager_attention_keeps_the_scores_and_fused_does_not(launcher: Launcher) -> None:
    eager, fused = predicted(
        launcher, *(small("bf16", attention=name, micro_batch=16) for name in ("eager", "sdpa"))
    )
    scores = 4 * 16 * 4 * 128 * 128  # layers x samples x heads x tokens x tokens
    # Softmax in 32 bits, its copy in 16, the dropout's mask in 8 and its result in 16.
    assert eager.ledger.activations - fused.ledger.activations > 6 * scores


def test_checkpointing_and_fewer_bits_take_less(launcher: Launcher) -> None:
    plain, checkpointed, pure = predicted(
        launcher,
        small("adamw", micro_batch=32),
        small("gradient_checkpointing", micro_batch=32),
        small("pure_bf16", micro_batch=32),
    )
    assert checkpointed.ledger.activations < 0.6 * plain.ledger.activations
    assert pure.ledger.optimizer == pytest.approx(plain.ledger.optimizer / 2, rel=0.1)


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 500},
        {
            "model_type": "llama",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 500,
        },
        {
            "model_type": "modernbert",
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "vocab_size": 500,
            "pad_token_id": 0,
        },
    ],
    ids=lambda values: values["model_type"],
)
def test_other_models_can_be_predicted(
    values: dict[str, object], launcher: Launcher, tmp_path: Path
) -> None:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(values))
    task = "masked-lm" if values["model_type"] == "modernbert" else "causal-lm"
    configs = [
        small(preset, model=str(path), task=task)
        for preset in ("adamw", "bf16+gradient_checkpointing+adafactor")
    ]
    assert all(each.ledger.weights > 0 for each in predicted(launcher, *configs))


def test_what_is_left_out_is_said(launcher: Launcher) -> None:
    config = small("torch_compile", optimizer="paged_adamw_8bit")
    [prediction] = predicted(launcher, config)
    assert [words.partition(":")[0] for words in prediction.not_covered] == [
        "torch.compile",
        "paged optimizer",
    ]


def test_missing_package_is_named(launcher: Launcher) -> None:
    [found] = predict(launcher, [small("adamw", optimizer="lomo")], CARDS["h200"])
    assert found == NoPrediction(
        reason="optimizer=lomo needs the package lomo-optim: pip install lomo-optim"
    )


def test_card_decides_what_fits(launcher: Launcher) -> None:
    config = resolve("adamw", "bert-base", {"device": "cuda", "micro_batch": 64})
    for card, fits in {"h200": True, "rtx3080": False}.items():
        [prediction] = predicted(launcher, config, card=card)
        assert prediction.fits is fits
        document = prediction.document()
        parts = sum(document["ledger"].values())
        assert parts == pytest.approx(document["peak_memory_mib"], abs=0.01)


def test_memory_limit_counts_like_a_smaller_card(launcher: Launcher) -> None:
    [prediction] = predicted(launcher, small("adamw", memory_limit_mib=800))
    assert not prediction.fits


def test_unknown_card_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="device='foo': expected one of h200, h100"):
        card_called("foo")


@pytest.mark.parametrize(
    ("name", "gib", "card"),
    [
        ("NVIDIA H200", 140, "h200"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80"),
        ("NVIDIA GeForce RTX 3080", 10, "rtx3080"),
        ("NVIDIA GeForce RTX 3080 Ti", 10, None),
        ("NVIDIA B300", 288, None),
    ],
)
def test_card_is_known_by_the_drivers_name(name: str, gib: int, card: str | None) -> None:
    found = card_of(name, gib * 1024**3)
    assert (found and found.name) == card
