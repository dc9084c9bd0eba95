"""Where the files that ship with the project lie."""

from pathlib import Path

PARAMS = Path(__file__).resolve().parents[1] / "params"


def shipped(kind: str, name: str) -> Path:
    """Return where `params/KIND/NAME` lies, whether it exists or not."""
    return PARAMS / kind / f"{name}{'.json' if kind == 'models' else '.yaml'}"


def names(kind: str) -> list[str]:
    """Return the names of the files that ship in `params/KIND`."""
    return sorted(path.stem for path in (PARAMS / kind).iterdir())


def is_file(name: str) -> bool:
    """Return whether there is such a file; a name that none can have is none."""
    try:
        return Path(name).is_file()
    except OSError:
        return False
