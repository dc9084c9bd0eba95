"""From a workload to a data set of token ids."""

from pathlib import Path
from typing import Any

import datasets
import numpy as np
from transformers import PretrainedConfig

from pipeline.config import Workload
from pipeline.datafiles import LABEL_COLUMNS, LOADERS, TEXT_COLUMNS
from pipeline.errors import UnsupportedError
from pipeline.worker.models import load_tokenizer

# The article draws ids from [100, 30000); BERT's first hundred are special tokens.
_FIRST_ID, _END_ID = 100, 30_000


def build_dataset(workload: Workload, config: PretrainedConfig) -> datasets.Dataset:
    """Return rows of `input_ids` and `labels`, each `seq_len` tokens long."""
    if workload.data == "random":
        return _random(workload, config.vocab_size)
    return _from_file(workload, config)


def _random(workload: Workload, vocab_size: int) -> datasets.Dataset:
    generator = np.random.default_rng(workload.seed)
    first = _FIRST_ID if vocab_size > _FIRST_ID else 0
    shape = (workload.samples, workload.seq_len)
    ids = generator.integers(first, min(vocab_size, _END_ID), shape, dtype=np.int64)
    if workload.task == "sequence-classification":
        top = 1 if workload.labels == "zeros" else 2
        labels = generator.integers(0, top, workload.samples, dtype=np.int64)
    else:
        labels = ids
    # From arrays, not lists: a hundred times faster for long data sets.
    return datasets.Dataset.from_dict({"input_ids": ids, "labels": labels}).with_format("torch")


def _from_file(workload: Workload, config: PretrainedConfig) -> datasets.Dataset:
    path = Path(workload.data)
    rows = datasets.load_dataset(LOADERS[path.suffix], data_files=str(path), split="train")
    rows = rows.select(range(min(len(rows), workload.samples)))
    text = _column(path, rows, TEXT_COLUMNS)
    encode = _encoder(workload, config)
    if workload.task == "sequence-classification":
        label = _column(path, rows, LABEL_COLUMNS)
        codes = {value: index for index, value in enumerate(sorted(set(rows[label])))}
        if len(codes) > (config.num_labels or 0):
            raise UnsupportedError(
                f"{path}: {len(codes)} different labels, the model tells {config.num_labels} apart"
            )

        def convert(row: dict[str, Any]) -> dict[str, Any]:
            return {**encode(str(row[text])), "labels": codes[row[label]]}
    else:

        def convert(row: dict[str, Any]) -> dict[str, Any]:
            encoded = encode(str(row[text]))
            return {**encoded, "labels": encoded["input_ids"]}

    return rows.map(convert, remove_columns=rows.column_names).with_format("torch")


def _column(path: Path, rows: datasets.Dataset, names: tuple[str, ...]) -> str:
    for name in names:
        if name in rows.column_names:
            return name
    raise UnsupportedError(
        f"{path}: has the columns {', '.join(rows.column_names)}; one of them has to be named "
        f"{' or '.join(names)}"
    )


def _encoder(workload: Workload, config: PretrainedConfig) -> Any:
    """Return a function from text to `input_ids` and `attention_mask`, padded to `seq_len`."""
    tokenizer = load_tokenizer(workload)
    if tokenizer is not None:
        return lambda text: tokenizer(
            text, truncation=True, padding="max_length", max_length=workload.seq_len
        )

    def utf8(text: str) -> dict[str, Any]:
        # A model that is only a configuration has no tokenizer, and its weights are random: bytes
        # cost the same memory and time as any other ids.
        ids = [byte % (config.vocab_size - 1) + 1 for byte in text.encode()[: workload.seq_len]]
        padding = workload.seq_len - len(ids)
        return {
            "input_ids": ids + [0] * padding,
            "attention_mask": [1] * len(ids) + [0] * padding,
        }

    return utf8
