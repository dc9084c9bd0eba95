"""What the fork server imports once, so that each worker starts with it.

No import here may initialise CUDA: a forked process cannot use a context of its parent.
bitsandbytes and torchao do that when they are imported, so workers import them where they are used.
The Trainer imports peft where that is installed, which imports bitsandbytes; no training here uses
peft, so it stays hidden.
"""

# ruff: noqa: E402

import signal
import sys

# The server ignores Ctrl-C once it serves; while it imports, it would die of it with a traceback.
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.modules["peft"] = None  # type: ignore[assignment]
sys.modules["torchao"] = None  # type: ignore[assignment]

import accelerate
import datasets
import transformers
import transformers.modeling_utils
import transformers.models.bert.modeling_bert
import transformers.trainer
from transformers.utils.import_utils import is_torchao_available

import pipeline.worker.entry

del sys.modules["torchao"]
is_torchao_available.cache_clear()

__all__ = ["accelerate", "datasets", "pipeline", "transformers"]
