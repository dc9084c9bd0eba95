"""What this machine cannot run is told before a model is built, with what would help."""

import importlib
import importlib.util
from typing import Any

import pytest
import torch

from pipeline.config import RunConfig
from pipeline.errors import UnsupportedError
from pipeline.presets import resolve
from pipeline.worker.support import require


def asked(**settings: Any) -> RunConfig:
    return resolve("adamw", "laptop", {"device": "cpu"} | settings)


def missing(**settings: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        require(asked(**settings))
    return str(caught.value)


def without(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    """Pretend that these packages are not installed and all others are."""
    monkeypatch.setattr(
        "pipeline.worker.support.find_spec",
        lambda name: None if name in packages else importlib.util.find_spec("json"),
    )
    monkeypatch.setattr(importlib, "import_module", lambda name: object())


def card(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """Pretend that torch sees this GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)


# On the CPU


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_format_that_the_cpu_has_is_supported(precision: str) -> None:
    require(asked(precision=precision))


@pytest.mark.parametrize("precision", ["fp16", "tf32", "fp8"])
def test_format_that_the_cpu_lacks_says_what_it_needs_and_what_works(precision: str) -> None:
    message = missing(precision=precision)
    assert f"precision={precision} needs a CUDA GPU" in message
    assert "fp32, bf16, pure_bf16" in message


def test_flash_attention_on_the_cpu_says_which_kernels_work() -> None:
    assert "sdpa and eager work here" in missing(attention="flash_attention_2")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alloc_conf", "expandable_segments:True"),
        ("optimizer", "paged_adamw_8bit"),
        ("memory_limit_mib", 4000),
    ],
)
def test_setting_that_does_nothing_on_the_cpu_is_unsupported_there(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    without(monkeypatch)
    message = missing(**{name: value})
    assert message.startswith(f"{name}={value}")
    assert message.endswith("needs a CUDA GPU")
    card(monkeypatch, "NVIDIA A100", (8, 0))
    require(asked(device="cuda", **{name: value}))


def test_compiling_on_the_cpu_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    there: set[str] = set()
    monkeypatch.setattr("shutil.which", lambda name: name if name in there else None)
    monkeypatch.setenv("CXX", "my-own -O2")
    assert "compile=true needs a C++ compiler" in missing(compile=True)
    there.add("my-own")
    require(asked(compile=True))
    monkeypatch.delenv("CXX")
    there |= {"clang++"}
    require(asked(compile=True))


def test_missing_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "device=cuda needs a CUDA GPU and none can be used" in missing(device="cuda")


# On a GPU


def test_format_that_an_older_gpu_lacks_says_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, "Tesla T4", (7, 5))
    message = missing(device="cuda", precision="bf16")
    assert "needs compute capability 8.0 and Tesla T4 has 7.5" in message
    assert message.endswith("precision can be fp32, fp16")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "pure_bf16", "fp16"])
def test_format_that_the_gpu_has_is_supported(
    monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    card(monkeypatch, "NVIDIA A100", (8, 0))
    require(asked(device="cuda", precision=precision))


def test_fp8_needs_hardware_and_package(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, "NVIDIA A100", (8, 0))
    without(monkeypatch, "torchao")
    message = missing(device="cuda", precision="fp8")
    assert "pip install torchao" in message
    assert "compute capability 8.9" in message


def test_flash_attention_needs_a_short_format(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, "NVIDIA A100", (8, 0))
    without(monkeypatch)
    message = missing(device="cuda", attention="flash_attention_2")
    assert "computes in bf16 or fp16, not fp32" in message
    require(asked(device="cuda", attention="flash_attention_2", precision="bf16"))


# Packages


@pytest.mark.parametrize(
    ("optimizer", "package", "pip"),
    [
        ("bnb_adam8bit", "bitsandbytes", "bitsandbytes"),
        ("adamw_bnb_8bit", "bitsandbytes", "bitsandbytes"),
        ("adamw_8bit", "bitsandbytes", "bitsandbytes"),
        ("paged_adamw_8bit", "bitsandbytes", "bitsandbytes"),
        ("lion_8bit", "bitsandbytes", "bitsandbytes"),
        ("ademamix", "bitsandbytes", "bitsandbytes"),
        ("rmsprop_bnb", "bitsandbytes", "bitsandbytes"),
        ("adamw_torch_8bit", "torchao", "torchao"),
        ("galore_adamw", "galore_torch", "galore-torch"),
        ("lomo", "lomo_optim", "lomo-optim"),
        ("adalomo", "lomo_optim", "lomo-optim"),
        ("apollo_adamw", "apollo_torch", "apollo-torch"),
        ("stable_adamw", "optimi", "torch-optimi"),
        ("schedule_free_adamw", "schedulefree", "schedulefree"),
    ],
)
def test_optimizer_without_its_package_names_the_command_that_helps(
    monkeypatch: pytest.MonkeyPatch, optimizer: str, package: str, pip: str
) -> None:
    without(monkeypatch, package)
    card(monkeypatch, "NVIDIA A100", (8, 0))
    assert missing(optimizer=optimizer, device="cuda") == (
        f"optimizer={optimizer} needs the package {pip}: pip install {pip}"
    )


@pytest.mark.parametrize(
    "optimizer", ["adamw_torch", "adamw_torch_fused", "adafactor", "adagrad", "rmsprop", "sgd"]
)
def test_optimizer_of_torch_or_transformers_needs_no_package(
    monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    without(monkeypatch, "bitsandbytes", "torchao")
    require(asked(optimizer=optimizer))


def test_package_that_does_not_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise OSError("libcudart.so not found")

    without(monkeypatch)
    monkeypatch.setattr(importlib, "import_module", broken)
    message = missing(optimizer="adamw_bnb_8bit")
    assert "bitsandbytes, which does not load here: libcudart.so not found" in message


def test_all_that_is_missing_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "bitsandbytes", "flash_attn")
    message = missing(precision="fp16", optimizer="adamw_bnb_8bit", attention="flash_attention_2")
    told = ["precision=fp16", "pip install bitsandbytes", "pip install flash-attn"]
    assert [words for words in told if words not in message] == []
