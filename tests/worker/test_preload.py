"""The fork server must be able to fork: nothing it imports may initialise CUDA."""

import subprocess
import sys
from pathlib import Path

import pytest

_PROJECT = Path(__file__).parents[2]
_SCRIPT = """
import pipeline.worker.preload, sys, gc
print([n for n in ("bitsandbytes", "torchao", "peft", "mlflow", "optuna") if sys.modules.get(n)])
print("transformers.trainer" in sys.modules, gc.get_freeze_count() > 100_000)
import torchao
print(torchao.__name__)
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Packages as they lie on many machines: importing peft imports bitsandbytes."""
    for name, text in {"peft": "import bitsandbytes", "torchao": "", "bitsandbytes": ""}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    return tmp_path


def test_preload_imports_nothing_that_initialises_cuda(installed: Path) -> None:
    found = subprocess.run(
        [sys.executable, "-c", _SCRIPT],
        env={"PYTHONPATH": f"{installed}:{_PROJECT}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.splitlines() == ["[]", "True True", "torchao"]
