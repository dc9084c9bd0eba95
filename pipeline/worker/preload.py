"""What the fork server imports once, so that each worker starts with it.

No import here may initialise CUDA: a forked process cannot use a context of its parent.
bitsandbytes does that at import, so the worker imports it, where it is used.
"""

import accelerate
import datasets
import transformers
import transformers.modeling_utils
import transformers.models.bert.modeling_bert
import transformers.trainer

import pipeline.worker.entry

__all__ = ["accelerate", "datasets", "pipeline", "transformers"]
