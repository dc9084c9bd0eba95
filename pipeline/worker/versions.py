"""Which software a training ran on."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from pipeline import nvml

_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "bitsandbytes", "torchao")


def versions() -> dict[str, str]:
    """Return the versions that a figure depends on; what is not installed is absent."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    driver = nvml.driver_version()
    return found | ({"cuda": str(torch.version.cuda), "driver": driver} if driver else {})
