"""What this machine can run, asked before a model is built."""

import importlib
import os
import shutil
from importlib.util import find_spec

import torch

from pipeline.combinations import contradictions
from pipeline.config import RunConfig, Training
from pipeline.errors import UnsupportedError

# Which package an optimizer needs, by the beginning of its name; the first match counts.
_OPTIMIZER_PACKAGES = {
    "bnb_": "bitsandbytes",
    "adamw_bnb": "bitsandbytes",
    "adamw_8bit": "bitsandbytes",
    "ademamix": "bitsandbytes",
    "lion": "bitsandbytes",
    "paged_": "bitsandbytes",
    "rmsprop_bnb": "bitsandbytes",
    "adamw_torch_4bit": "torchao",
    "adamw_torch_8bit": "torchao",
    "galore": "galore_torch",
    "lomo": "lomo_optim",
    "adalomo": "lomo_optim",
    "apollo": "apollo_torch",
    "stable_adamw": "optimi",
    "schedule_free": "schedulefree",
}
_PIP_NAMES = {
    "galore_torch": "galore-torch",
    "lomo_optim": "lomo-optim",
    "apollo_torch": "apollo-torch",
    "optimi": "torch-optimi",
    "flash_attn": "flash-attn",
}
# The compute capability from which on a number format is built into the hardware.
_CAPABILITIES = {"tf32": (8, 0), "bf16": (8, 0), "pure_bf16": (8, 0), "fp16": (5, 3), "fp8": (8, 9)}
_COMPILERS = ("c++", "g++", "clang++")


def require(config: RunConfig) -> None:
    """Raise UnsupportedError, with everything that is missing, unless this machine can run it."""
    training, device = config.training, config.measurement.device
    missing = [
        *_device(device),
        *contradictions(training, device),
        *([] if device == "cpu" else _precision(training)),
        *_optimizer(training.optimizer),
        *_attention(training),
        *(_only_on_gpus(config) if device == "cpu" else []),
    ]
    if missing:
        raise UnsupportedError("; ".join(missing))


def missing_packages(training: Training) -> list[str]:
    """Return what the optimizer needs and is not there; a prediction needs no more than that."""
    return _optimizer(training.optimizer)


def _device(device: str) -> list[str]:
    if device == "cpu" or torch.cuda.is_available():
        return []
    build = "" if torch.version.cuda else f" (torch {torch.__version__} is built without CUDA)"
    return [f"device={device} needs a CUDA GPU and none can be used{build}"]


def _precision(training: Training) -> list[str]:
    precision = training.precision
    missing = _package("torchao", "precision=fp8") if precision == "fp8" else []
    needed = _CAPABILITIES.get(precision)
    if needed is None or not torch.cuda.is_available():
        return missing
    found = torch.cuda.get_device_capability()
    if found >= needed:
        return missing
    usable = [name for name, capability in _CAPABILITIES.items() if found >= capability]
    return [
        *missing,
        f"precision={precision} needs compute capability {needed[0]}.{needed[1]} and "
        f"{torch.cuda.get_device_name()} has {found[0]}.{found[1]}, "
        f"where precision can be {', '.join(['fp32', *usable])}",
    ]


def _optimizer(name: str) -> list[str]:
    package = next((p for start, p in _OPTIMIZER_PACKAGES.items() if name.startswith(start)), None)
    return _package(package, f"optimizer={name}") if package else []


def _attention(training: Training) -> list[str]:
    if training.attention != "flash_attention_2":
        return []
    return _package("flash_attn", "attention=flash_attention_2")


def _only_on_gpus(config: RunConfig) -> list[str]:
    """Return the settings that would do nothing on a CPU, or fail there later."""
    training, limit = config.training, config.measurement.memory_limit_mib
    problems = []
    if limit is not None:
        problems.append(f"memory_limit_mib={limit} limits GPU memory: needs a CUDA GPU")
    compilers = (*os.environ.get("CXX", "").split()[:1], *_COMPILERS)
    if training.compile and not any(map(shutil.which, compilers)):
        problems.append("compile=true needs a C++ compiler on a CPU: install g++, or set CXX")
    return problems


def _package(name: str, setting: str) -> list[str]:
    """Return what is missing for this package: it has to be there and to load."""
    pip = _PIP_NAMES.get(name, name)
    if find_spec(name) is None:
        return [f"{setting} needs the package {pip}: pip install {pip}"]
    try:
        importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        return [f"{setting} needs the package {pip}, which does not load here: {error}"]
    return []
