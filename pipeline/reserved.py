"""Which TrainingArguments are ours to set, and which there are at all."""

import ast
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.layers import did_you_mean

# Arguments of the Trainer that a setting of ours decides, or that would break the measurement.
_OURS = {
    "per_device_train_batch_size": "set micro_batch",
    "gradient_accumulation_steps": "set accumulation",
    "gradient_checkpointing": "set gradient_checkpointing as a setting of its own",
    "activation_checkpointing": "set gradient_checkpointing as a setting of its own",
    "num_train_epochs": "set epochs",
    "max_steps": "set max_steps as a setting of its own",
    "seed": "set seed as a setting of its own",
    "learning_rate": "set learning_rate as a setting of its own",
    "max_grad_norm": "set max_grad_norm as a setting of its own",
    "optim": "set optimizer",
    "bf16": "set precision",
    "fp16": "set precision",
    "tf32": "set precision",
    "torch_compile": "set compile",
    "use_cpu": "set device",
    "output_dir": "nothing is kept but the measurement",
    "report_to": "the run is logged by this project, under the names that its README lists; a "
    "second logger would write the same names again",
    "auto_find_batch_size": "it changes the micro-batch behind the measurement's back",
    "disable_tqdm": "progress is shown by this project",
    "logging_nan_inf_filter": "it would hide a loss that is not finite",
    "logging_strategy": "the losses are logged every logging_steps",
}


def check_training_arguments(
    values: Mapping[str, Any], place: str, report: Callable[[str], None]
) -> None:
    """Report each argument that is ours, or that transformers does not know."""
    known = _known_arguments() if values else frozenset()
    for key in values:
        subject = f"{place}: training_arguments: {key}"
        if key in _OURS:
            report(f"{subject}: not allowed: {_OURS[key]}")
        elif known and key not in known:
            hint = did_you_mean(str(key), sorted(known))
            report(f"{subject}: transformers.TrainingArguments has no such field{hint}")


def where_it_belongs(key: str) -> str | None:
    """Return what to do with an argument of the Trainer that is given as a setting of its own."""
    if key in _OURS:
        return _OURS[key]
    return "set it in training_arguments" if key in _known_arguments() else None


@cache
def _known_arguments() -> frozenset[str]:
    """Return the fields of transformers.TrainingArguments, read from its source.

    Importing it would import torch, which takes seconds and has no place in this process.
    """
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return frozenset()
    source = Path(package.origin).with_name("training_args.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments":
            return frozenset(
                field.target.id
                for field in node.body
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            )
    return frozenset()
