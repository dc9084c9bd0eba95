"""Floating-point operations: those that a training step needs, and those that a device offers."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from pipeline.config import Precision, Workload
from pipeline.worker.models import build_model

# Dense peak in TFLOP/s: fp16 and bf16 with fp32 accumulation, tf32, fp32 outside tensor cores,
# fp8; half of what a document gives with sparsity. GeForce cards run fp16 with fp32 accumulation at
# half of the fp16 rate; that is what training uses. A part of a name decides, the longest match
# wins. From NVIDIA's documents:
# H200, A10, L4, L40S, T4: the data sheet "NVIDIA <product> Tensor Core GPU" (L40S: "NVIDIA L40S").
# V100: data sheet "NVIDIA V100 Tensor Core GPU", which has a column for each form factor.
# H100: white paper "NVIDIA H100 Tensor Core GPU Architecture".
# A100: white paper "NVIDIA A100 Tensor Core GPU Architecture".
# RTX 3080, 3090: white paper "NVIDIA Ampere GA102 GPU Architecture".
# RTX 4090: white paper "NVIDIA Ada GPU Architecture".
_PEAKS_TFLOPS: dict[str, tuple[float | None, float | None, float, float | None]] = {
    "H200": (989.4, 494.7, 66.9, 1978.9),
    "H100 80GB HBM3": (989.4, 494.7, 66.9, 1978.9),
    "H100 PCIe": (756.4, 378.2, 51.2, 1512.9),
    "A100": (312.0, 156.0, 19.5, None),
    "A10": (125.0, 62.5, 31.2, None),
    "L4": (121.0, 60.0, 30.3, 242.5),
    "L40S": (362.1, 183.2, 91.6, 733.0),
    "V100 SXM2": (125.0, None, 15.7, None),
    "V100 PCIE": (112.0, None, 14.0, None),
    "T4": (65.0, None, 8.1, None),
    "RTX 3080": (59.5, 29.8, 29.8, None),
    "RTX 3090": (71.0, 35.6, 35.6, None),
    "RTX 4090": (165.2, 82.6, 82.6, 330.3),
}
# Words that make another product of a name in the table.
_VARIANTS = {"Ti", "SUPER", "Laptop", "Max", "D", "NVL"}


def peak_flops(device_name: str, precision: Precision) -> float | None:
    """Return the device's peak in FLOP/s for matrix products of this precision, where known."""
    words = device_name.replace("-", " ").split()
    matches = [key for key in _PEAKS_TFLOPS if f" {key} " in f" {' '.join(words)} "]
    # AMD made processors that are called A10 as well.
    if not matches or words[0] == "CPU" or _VARIANTS.intersection(words):
        return None
    half, tf32, full, fp8 = _PEAKS_TFLOPS[max(matches, key=len)]
    peak = {"fp32": full, "tf32": tf32, "fp8": fp8}.get(precision, half)
    return None if peak is None else peak * 1e12


def flops_per_sample(workload: Workload) -> float:
    """Count the operations of one sample's forward and backward pass.

    The real model runs once without data or memory (PyTorch's meta device) under PyTorch's own
    counter, with eager attention, whose matrix products it sees. Recomputed activations do not
    count: the figure is what the training needs, not what a preset makes of it.

    Raises what the model raises there: some look at values of tensors on their way (GPT-2,
    DeBERTa), and a tensor on the meta device has none.
    """
    with torch.device("meta"):
        model = build_model(workload, attention="eager")
        ids = torch.zeros(1, workload.seq_len, dtype=torch.long)
        labels = torch.zeros(1, dtype=torch.long) if workload.task == _CLASSIFY else ids
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=labels).loss.backward()
    return float(counter.get_total_flops())


_CLASSIFY = "sequence-classification"
