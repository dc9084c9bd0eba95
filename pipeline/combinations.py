"""Settings that do not go together, whatever is installed: known before anything is started."""

from collections.abc import Iterator

from pipeline.config import Training

CPU_PRECISIONS = ("fp32", "bf16", "pure_bf16")
_SIXTEEN_BITS = ("bf16", "fp16", "pure_bf16")


def contradictions(training: Training, device: str) -> Iterator[str]:
    """Yield why these settings cannot be had together on this kind of device."""
    precision, flash = training.precision, training.attention == "flash_attention_2"
    if device == "cpu":
        if precision not in CPU_PRECISIONS:
            yield (
                f"precision={precision} needs a CUDA GPU and this training runs on the CPU, "
                f"where precision can be {', '.join(CPU_PRECISIONS)}"
            )
        if flash:
            yield "attention=flash_attention_2 needs a CUDA GPU; sdpa and eager work here"
        if training.alloc_conf:
            yield f"alloc_conf={training.alloc_conf} sets CUDA's allocator: needs a CUDA GPU"
        if training.optimizer.startswith("paged_"):
            yield f"optimizer={training.optimizer} pages GPU memory: needs a CUDA GPU"
    elif flash and precision not in _SIXTEEN_BITS:
        yield f"attention=flash_attention_2 computes in bf16 or fp16, not {precision}"
