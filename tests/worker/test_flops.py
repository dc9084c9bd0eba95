"""Operations agree with the formula of the literature; peaks belong to the card they name."""

import json
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from pipeline.config import Precision, Workload
from pipeline.worker.flops import flops_per_sample, peak_flops
from pipeline.worker.models import build_model


@pytest.mark.parametrize("seq_len", [128, 512])
def test_operations_of_bert_are_those_of_the_formula(seq_len: int) -> None:
    workload = Workload(model="bert-base", seq_len=seq_len)
    with torch.device("meta"):
        model = build_model(workload, attention="eager")
    embeddings = sum(
        parameter.numel()
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    )
    weights = sum(parameter.numel() for parameter in model.parameters()) - embeddings
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    attention = 3 * layers * 2 * (2 * seq_len * seq_len * hidden)
    assert flops_per_sample(workload) == pytest.approx(6 * weights * seq_len + attention, rel=0.1)


@pytest.mark.parametrize("task", ["sequence-classification", "masked-lm"])
def test_operations_are_counted_for_every_task(tiny_model: str, task: str) -> None:
    workload = Workload.model_validate({"model": tiny_model, "seq_len": 16, "task": task})
    assert flops_per_sample(workload) > 0


def test_head_over_the_vocabulary_costs_operations(tiny_model: str) -> None:
    classify = Workload(model=tiny_model, seq_len=16)
    assert flops_per_sample(classify.model_copy(update={"task": "masked-lm"})) > flops_per_sample(
        classify
    )


def test_model_that_looks_at_its_values_is_not_flops_per_sample(tmp_path: Path) -> None:
    path = tmp_path / "gpt2.json"
    values = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 200}
    path.write_text(json.dumps(values))
    with pytest.raises(RuntimeError, match="meta"):
        flops_per_sample(Workload(model=str(path), task="causal-lm", seq_len=16))


def test_counting_a_large_model_takes_no_memory_for_it() -> None:
    process = psutil.Process()
    before = process.memory_info().rss
    flops_per_sample(Workload(model="bert-large", seq_len=16))
    assert process.memory_info().rss - before < 300e6  # its weights alone are 1300e6


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA H200", "bf16", 989.4),
        ("NVIDIA H200", "pure_bf16", 989.4),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA H200", "tf32", 494.7),
        ("NVIDIA H200", "fp32", 66.9),
        ("NVIDIA H200", "fp8", 1978.9),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40S", "bf16", 362.1),
        ("Tesla T4", "fp16", 65.0),
        ("Tesla V100-SXM2-16GB", "fp32", 15.7),
        ("Tesla V100-SXM2-32GB", "fp16", 125.0),
        ("Tesla V100-PCIE-16GB", "fp16", 112.0),
        ("NVIDIA GeForce RTX 3080", "fp16", 59.5),
    ],
)
def test_peak_is_that_of_card_and_format(name: str, precision: Precision, tflops: float) -> None:
    assert peak_flops(name, precision) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "CPU Intel(R) Xeon(R)",
        "CPU AMD A10-7850K Radeon R7",
        "Tesla V100-FHHL-16GB",
        "NVIDIA L40",
        "NVIDIA H2000",
        "NVIDIA A1000",
        "NVIDIA H200 NVL",
        "NVIDIA GeForce RTX 3080 Ti",
        "NVIDIA GeForce RTX 3080 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "",
    ],
)
def test_peak_of_a_card_that_is_not_in_the_table_is_unknown(name: str) -> None:
    assert peak_flops(name, "bf16") is None


@pytest.mark.parametrize(
    ("name", "precision"), [("Tesla T4", "tf32"), ("NVIDIA A100-SXM4-80GB", "fp8")]
)
def test_format_that_the_card_lacks_has_no_peak(name: str, precision: Precision) -> None:
    assert peak_flops(name, precision) is None
