"""Read settings back from the objects that were built, and compare them with what was asked."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from pipeline.config import RunConfig, Training
from pipeline.errors import NotInEffectError
from pipeline.record import Effective
from pipeline.worker.ledger import tensors

# Below this, 8-bit optimizers keep a tensor's state in 32 bits (bitsandbytes: min_8bit_size).
_MIN_8BIT_ELEMENTS = 4096
_AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}


class AutocastProbe:
    """Sees in which number format a layer really computes."""

    def __init__(self, layer: nn.Module) -> None:
        self.dtype: str | None = None
        self._hook = layer.register_forward_hook(self._look)

    @classmethod
    def of(cls, model: nn.Module) -> "AutocastProbe | None":
        """Return a probe in the model's first linear layer; None for a model that has none."""
        linear = (module for module in model.modules() if isinstance(module, nn.Linear))
        layer = next(linear, None)
        return cls(layer) if layer is not None else None

    def _look(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        kind = output.device.type
        if torch.is_autocast_enabled(kind):
            self.dtype = _name(torch.get_autocast_dtype(kind))
        self._hook.remove()


def installed_autocast(model: nn.Module) -> str | None:
    """Return the number format of the autocast that is wrapped around the model's forward.

    For a compiled model, whose graph a hook would break. It is what accelerate really put around
    the function that runs, not its setting; the computation inside is not looked at.
    """
    function = getattr(model, "_orig_mod", model).forward
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            context = cell.cell_contents
            if isinstance(context, torch.autocast):
                return _name(context.fast_dtype) if context._enabled else None
        function = getattr(function, "__wrapped__", None)
    return None


def compiled_frames() -> int:
    """Return how many functions torch.compile has compiled in this process so far."""
    return int(torch._dynamo.utils.counters["frames"]["ok"])


def read_back(
    model: nn.Module,
    optimizer: Any,
    args: TrainingArguments,
    autocast_dtype: str | None,
    frames_before: int = 0,
) -> Effective:
    """Return the settings that model, optimizer and arguments show after a step.

    `frames_before` is what `compiled_frames` said when the training began.
    """
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps it
    parameters = list(model.parameters())
    return Effective(
        parameter_dtype=_name(max(parameters, key=lambda p: p.numel()).dtype),
        autocast_dtype=autocast_dtype,
        tf32=torch.backends.cuda.matmul.fp32_precision == "tf32",
        optimizer=_describe(inner),
        optimizer_state_dtypes=_bytes_by_dtype(inner.state.values()),
        checkpointed_layers=sum(
            bool(getattr(module, "gradient_checkpointing", False))
            for module in model.modules()
            if isinstance(module, GradientCheckpointingLayer)
        ),
        attention=str(getattr(getattr(model, "config", None), "_attn_implementation", "unknown")),
        compiled=compiled_frames() > frames_before,
        float8_layers=sum(type(module).__name__.startswith("Float8") for module in model.modules()),
        micro_batch=args.train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        parameters=sum(parameter.numel() for parameter in parameters),
    )


def check(config: RunConfig, effective: Effective, model: nn.Module) -> list[str]:
    """Raise where a setting did not take effect; return what is right but surprising."""
    asked = config.training
    problems = [
        f"{field}={wanted!r} was asked for, but the built training shows {found!r}"
        for field, wanted, found in _comparisons(asked, effective)
        if wanted != found
    ]
    warnings = []
    if effective.optimizer_bytes and "8bit" in asked.optimizer and not effective.eight_bit_share:
        message = f"optimizer={asked.optimizer}: no byte of its state is kept in 8 bits"
        if _has_large_layers(model):
            problems.append(message)
        else:
            warnings.append(
                f"{message}, since every layer of this model has fewer than {_MIN_8BIT_ELEMENTS} "
                "elements and small tensors stay at 32 bits"
            )
    if problems:
        raise NotInEffectError("; ".join(problems))
    return warnings


def _comparisons(asked: Training, effective: Effective) -> Iterator[tuple[str, Any, Any]]:
    yield "micro_batch", asked.micro_batch, effective.micro_batch
    yield "accumulation", asked.accumulation, effective.accumulation
    yield "attention", asked.attention, effective.attention
    yield "compile", asked.compile, effective.compiled
    yield "gradient_checkpointing", asked.gradient_checkpointing, effective.checkpointed_layers > 0
    yield "precision", _expected_autocast(asked), effective.autocast_dtype
    yield "precision (float8 layers)", asked.precision == "fp8", effective.float8_layers > 0
    weights = "bfloat16" if asked.precision == "pure_bf16" else "float32"
    yield "precision (weights)", weights, effective.parameter_dtype
    yield "precision (tf32)", asked.precision == "tf32", effective.tf32
    owner = _optimizer_owner(asked.optimizer)
    if owner:
        found = effective.optimizer
        yield "optimizer", owner, found[: len(owner)] if owner.endswith(".") else found


def _expected_autocast(asked: Training) -> str | None:
    # Accelerate computes fp8 layers inside a bf16 autocast.
    return _AUTOCAST.get("bf16" if asked.precision == "fp8" else asked.precision)


def _optimizer_owner(name: str) -> str | None:
    """Return what the optimizer has to be described as, or the package that it has to be of.

    A package ends in a dot. None: any name may do.
    """
    if name in ("adamw_torch", "adamw_torch_fused"):
        return "torch.optim.adamw.AdamW" + (" (fused)" if name.endswith("fused") else "")
    if name == "bnb_adam8bit":
        return "bitsandbytes.optim.adam.Adam8bit"
    if name == "adafactor":
        return "transformers.optimization.Adafactor"
    bitsandbytes = ("bnb", "adamw_8bit", "lion", "ademamix", "paged")
    return "bitsandbytes." if any(part in name for part in bitsandbytes) else None


def _describe(optimizer: torch.optim.Optimizer) -> str:
    kind = type(optimizer)
    fused = " (fused)" if optimizer.defaults.get("fused") else ""
    return f"{kind.__module__}.{kind.__qualname__}{fused}"


def _has_large_layers(model: nn.Module) -> bool:
    """Whether any layer that 8-bit optimizers treat is large enough (embeddings are exempt)."""
    return any(
        parameter.numel() >= _MIN_8BIT_ELEMENTS
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    )


def _bytes_by_dtype(states: Iterable[Any]) -> dict[str, int]:
    """Return the bytes of all tensors in these states by dtype; shared storage counts once."""
    seen: set[int] = set()
    counts: Counter[str] = Counter()
    for tensor in tensors(states):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            counts[_name(tensor.dtype)] += storage.nbytes()
    return dict(counts)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
