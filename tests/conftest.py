"""What tests of several modules need."""

import json

import pytest

from pipeline.config import RunConfig
from pipeline.presets import resolve


@pytest.fixture
def config() -> RunConfig:
    return resolve("adamw", "laptop", {"device": "cpu"})


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a configuration of a two-layer BERT, whose layers are small."""
    path = tmp_path_factory.mktemp("models") / "tiny.json"
    values = {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 200,
        "max_position_embeddings": 32,
    }
    path.write_text(json.dumps(values))
    return str(path)
