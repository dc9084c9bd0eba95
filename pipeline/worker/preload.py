"""What the fork server imports once, so that each worker starts with it.

No import here may initialise CUDA: a forked process cannot use a context of its parent.
bitsandbytes and torchao do that when they are imported, so workers import them where they are used.
The Trainer imports peft where that is installed, which imports bitsandbytes; no training here uses
peft, so it stays hidden.
"""

import gc
import importlib
import sys

_HIDDEN = ("peft", "torchao")
_IMPORTED = (
    "accelerate",
    "datasets",
    "transformers.modeling_utils",
    "transformers.models.bert.modeling_bert",
    "transformers.trainer",
    "pipeline.worker.entry",
    "pipeline.worker.estimate",
)

for _name in _HIDDEN:
    sys.modules[_name] = None  # type: ignore[assignment]
for _name in _IMPORTED:
    importlib.import_module(_name)
del sys.modules["torchao"]
# What was concluded from its absence must not last: optimizers and fp8 need it.
importlib.import_module("transformers.utils.import_utils").is_torchao_available.cache_clear()
# The Trainer collects garbage before it trains, which takes 0.3 s over all that was imported here,
# and copies the pages that it touches.
gc.collect()
gc.freeze()
