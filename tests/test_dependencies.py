"""What is declared, what is pinned and what `mlflow run` installs agree, and its commands exist."""

import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
ENTRY_POINTS = yaml.safe_load((ROOT / "MLproject").read_text())["entry_points"]


def requirements(lines: list[str]) -> dict[str, Requirement]:
    """Key each requirement by its canonical name."""
    parsed = [Requirement(line) for line in lines]
    assert parsed
    return {canonicalize_name(requirement.name): requirement for requirement in parsed}


def exact(requirement: Requirement) -> Version:
    [specifier] = requirement.specifier
    assert specifier.operator == "==", requirement
    return Version(specifier.version)


@pytest.fixture(scope="module")
def project() -> dict[str, list[str]]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"direct": table["dependencies"], "dev": table["optional-dependencies"]["dev"]}


@pytest.fixture(scope="module")
def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = requirements([line for line in lines if not line.startswith("#")])
    return {name: exact(requirement) for name, requirement in pinned.items()}


@pytest.fixture(scope="module")
def conda_pip() -> list[str]:
    dependencies = yaml.safe_load((ROOT / "conda.yaml").read_text())["dependencies"]
    [pip] = [entry["pip"] for entry in dependencies if isinstance(entry, dict)]
    assert pip[0] == "-c constraints.txt"
    return list(pip[1:])


def test_conda_installs_the_direct_dependencies_as_pinned(
    project: dict[str, list[str]], pins: dict[str, Version], conda_pip: list[str]
) -> None:
    installed = {name: exact(entry) for name, entry in requirements(conda_pip).items()}
    assert installed == {name: pins[name] for name in requirements(project["direct"])}


@pytest.mark.parametrize("group", ["direct", "dev"])
def test_pins_lie_inside_the_declared_ranges(
    group: str, project: dict[str, list[str]], pins: dict[str, Version]
) -> None:
    outside = {
        name: str(pins.get(name))
        for name, declared in requirements(project[group]).items()
        if name not in pins or pins[name] not in declared.specifier
    }
    assert outside == {}


def test_pins_suit_every_build_of_torch(pins: dict[str, Version]) -> None:
    assert pins["torch"].local is None
    assert [name for name in pins if name == "triton" or name.startswith(("cuda-", "nvidia-"))] == [
        "nvidia-ml-py"
    ]


def test_nvml_comes_from_the_maintained_package(
    project: dict[str, list[str]], pins: dict[str, Version]
) -> None:
    assert "nvidia-ml-py" in requirements(project["direct"])
    assert "pynvml" not in pins


@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_entry_point_runs_a_command_that_exists(name: str) -> None:
    assert set(ENTRY_POINTS[name]) == {"command"}, "defaults live in the typed models"
    python, *arguments = shlex.split(ENTRY_POINTS[name]["command"])
    assert (python, arguments[:2], len(arguments)) == ("python", ["-m", "pipeline"], 3)
    help_text = subprocess.run(
        [sys.executable, *arguments, "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert help_text.returncode == 0, help_text.stderr
