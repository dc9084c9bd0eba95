"""Hand what was measured over to MLflow, and keep it on disk where that fails."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


def hand_over(
    write: Callable[[Path], None], log: Callable[[Path | None], None], run_id: str
) -> list[str]:
    """Write files into a folder, log them, and return what went wrong; nothing is raised.

    `log` gets None where there is no folder. What it does not take lies in `unlogged/RUN_ID`.
    """
    unlogged: list[str] = []
    folder = None
    with ExitStack() as stack:
        with noting(unlogged, "the files could not all be written: "):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeline-")))
            write(folder)
        with noting(unlogged):
            log(folder)
        if unlogged and folder:
            with noting(unlogged, "they could not be kept either: "):
                kept = _keep(folder, run_id)
                unlogged.append(f"record, curve and figure are in {kept.resolve()}")
    return unlogged


@contextmanager
def noting(problems: list[str], what: str = "") -> Iterator[None]:
    """Note what the block raises: a measurement is not lost with a full disk or a figure."""
    try:
        yield
    except Exception as error:
        problems.append(f"{what}{str(error) or type(error).__name__}")


def _keep(folder: Path, run_id: str) -> Path:
    """Copy the files to where they outlive the command: here, or where everybody may write."""
    kept = Path("unlogged") / run_id
    try:
        return Path(shutil.copytree(folder, kept, dirs_exist_ok=True))
    except OSError:
        kept = Path(tempfile.mkdtemp(prefix="unlogged-"))
        return Path(shutil.copytree(folder, kept, dirs_exist_ok=True))
