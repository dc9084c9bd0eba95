"""From a workload to a model and its tokenizer."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)

from pipeline.config import Workload
from pipeline.errors import UnsupportedError
from pipeline.paths import shipped

_CLASSES: dict[str, Any] = {
    "sequence-classification": AutoModelForSequenceClassification,
    "masked-lm": AutoModelForMaskedLM,
    "causal-lm": AutoModelForCausalLM,
}


def model_config(workload: Workload) -> PretrainedConfig:
    """Return the model's configuration: from a shipped or own JSON file, a folder or the hub."""
    path = shipped("models", workload.model)
    path = path if path.is_file() else Path(workload.model)
    if path.is_file():
        values = json.loads(path.read_text())
        config = AutoConfig.for_model(values.pop("model_type"), **values)
    else:
        config = AutoConfig.from_pretrained(workload.model)
    longest = getattr(config, "max_position_embeddings", None)
    if longest and workload.seq_len > longest:
        raise UnsupportedError(
            f"seq_len={workload.seq_len}: the model {workload.model} has {longest} positions"
        )
    if getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # causal models need one to find the last token of a sample
    return config


def build_model(workload: Workload, attention: str) -> PreTrainedModel:
    """Return the model on torch's current default device, in float32.

    Random weights are drawn on that device; the caller has seeded.
    """
    loader = _CLASSES[workload.task]
    try:
        if workload.init == "pretrained" and torch.get_default_device().type != "meta":
            source = Path(workload.model)
            model: PreTrainedModel = loader.from_pretrained(
                source if source.is_dir() else workload.model,
                attn_implementation=attention,
                dtype=torch.float32,
            )
            return model
        config = model_config(workload)
        model = loader.from_config(config, attn_implementation=attention, dtype=torch.float32)
        return model
    except ImportError as error:
        raise UnsupportedError(f"attention={attention}: {error}") from error


def load_tokenizer(workload: Workload) -> Any | None:
    """Return the model's own tokenizer; None for a model that is only a configuration."""
    path = Path(workload.model)
    if shipped("models", workload.model).is_file() or path.is_file():
        return None
    return AutoTokenizer.from_pretrained(workload.model)
