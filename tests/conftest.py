"""What tests of several modules need."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture
def postgresql() -> Iterator[str]:
    """Run a PostgreSQL of this test's own; skip where there is none or no driver for it."""
    pytest.importorskip("psycopg", reason="psycopg is not installed: pip install psycopg[binary]")
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        pytest.skip("no PostgreSQL: apt-get install postgresql")
    is_root = os.geteuid() == 0
    if is_root and shutil.which("runuser") is None:
        pytest.skip("PostgreSQL does not run as root, and runuser is not there")
    # pytest's own folders are closed to other users, and too long a path for a socket.
    with tempfile.TemporaryDirectory(prefix="postgresql-") as folder:
        if is_root:
            shutil.chown(folder, "postgres")
        start = ["runuser", "-u", "postgres", "--"] if is_root else []

        def run(program: str, *words: str) -> None:
            path = found[-1].parent / program
            command = [*start, str(path), "-D", f"{folder}/data", *words]
            subprocess.run(command, check=True, cwd="/", stdout=subprocess.DEVNULL)

        run("initdb", "-U", "test", "-A", "trust")
        options = f"-c listen_addresses='' -k {folder}"
        run("pg_ctl", "-w", "-o", options, "-l", f"{folder}/log", "start")
        yield f"postgresql+psycopg://test@/postgres?host={folder}"
        run("pg_ctl", "-w", "-m", "immediate", "stop")
