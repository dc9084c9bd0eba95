"""A shared tracking server: params, curves and files go through it, whatever lies behind it."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = ["--seq_len", "16", "--samples", "32", "--device", "cpu", "--workload", "laptop"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(params=["sqlite", "postgresql"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Start `mlflow server` with proxied artifacts; return its address."""
    store = f"sqlite:///{tmp_path}/mlflow.db"
    if request.param == "postgresql":
        store = request.getfixturevalue("postgresql")
    port = free_port()
    command = [
        *(sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)),
        *("--backend-store-uri", store, "--artifacts-destination", str(tmp_path / "artifacts")),
        *("--workers", "1"),
    ]
    process = subprocess.Popen(command, cwd=tmp_path)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    try:
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5)
            except OSError:
                time.sleep(0.3)
            else:
                break
        yield url
    finally:
        process.terminate()
        process.wait(timeout=30)


def test_comparison_goes_through_a_server(server: str, tiny_model: str, tmp_path: Path) -> None:
    # Another test's experiment is none of this server's.
    own = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    environment = own | {"MLFLOW_TRACKING_URI": server, "PYTHONPATH": str(ROOT)}
    words = ["--presets", "adamw,adafactor", "--repeats", "1", "--model", tiny_model, *TINY]
    command = [sys.executable, "-m", "pipeline", "compare", *words]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert f"see {server}/#/experiments/0/runs/" in ran.stderr
    assert "workflowType=machine_learning" in ran.stderr
    client = MlflowClient(server)
    runs = client.search_runs(["0"])
    [parent] = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    files = {file.path for file in client.list_artifacts(parent.info.run_id)}
    assert {"comparison.csv", "comparison.html", "comparison.md", "comparison.png"} <= files
    for run in runs:
        assert run.info.status == "FINISHED"
        if run is not parent:
            assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
            assert client.get_metric_history(run.info.run_id, "memory/process_mib")
            kept = {file.path for file in client.list_artifacts(run.info.run_id)}
            assert {"record.json", "memory.parquet", "memory.png"} <= kept
