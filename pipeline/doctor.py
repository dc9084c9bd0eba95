"""What this machine has and lacks, in a table."""

import itertools
import platform
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import psutil

from pipeline import nvml

_NEEDED = ("torch", "transformers", "accelerate", "datasets", "mlflow", "nvidia-ml-py")
_OPTIONAL = {
    "bitsandbytes": "8-bit and paged optimizers",
    "torchao": "precision=fp8, adamw_torch_8bit, adamw_torch_4bit",
    "flash-attn": "attention=flash_attention_2",
}


class Finding(NamedTuple):
    """What was looked at, what was found, and whether that is all right."""

    what: str
    found: str
    ok: bool


def examine() -> Iterator[Finding]:
    """Yield what this machine has and lacks."""
    return itertools.starmap(Finding, _look())


def _look() -> Iterator[tuple[str, str, bool]]:
    yield "Python", platform.python_version(), True
    yield "memory", f"{psutil.virtual_memory().total / 1024**3:.0f} GiB", True
    for package in _NEEDED:
        found = _version(package)
        yield package, found or "missing: pip install -e .", found is not None
    for package, use in _OPTIONAL.items():
        found = _version(package)
        missing = f"not installed, needed for {use}: pip install {package}"
        yield package, found or missing, True
    driver, gpus = nvml.driver_version(), nvml.usable_gpus()
    yield "NVIDIA driver", driver or "none, so trainings run on the CPU", True
    if driver:
        yield "GPUs", ", ".join(gpus) or "none visible (CUDA_VISIBLE_DEVICES)", bool(gpus)
        built = not (_version("torch") or "").endswith("+cpu")
        yield "torch's CUDA", "yes" if built else "this torch is a CPU build", built
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    yield "C++ compiler", compiler or "none, needed for compile on a CPU", True


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
