"""Opening an MLflow store: what is wrong is told at once and in a line, not after minutes."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from pipeline import processes

_SQLITE = "sqlite:///"
# MLflow reads these whenever it asks a server. One that is gone should cost seconds, not minutes;
# standard output is for the record: where the run is to be seen is said by `where_to_look`.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


@contextmanager
def opening(uri: str) -> Iterator[None]:
    """Have MLflow open this store in the block: alone, without tracebacks, and if it can be.

    Raises OSError or sqlite3.Error where the file of a local store cannot be used.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # The first command makes the tables of a local store.
    with processes.one_at_a_time(uri), _quiet_mlflow():
        if uri.startswith(_SQLITE):
            _check_file(uri.removeprefix(_SQLITE).partition("?")[0])
        yield


def beside(uri: str, name: str) -> str:
    """Return an sqlite store of this name in the folder of a local store, or in this one."""
    path = uri.removeprefix(_SQLITE).partition("?")[0] if uri.startswith(_SQLITE) else ""
    return f"{_SQLITE}{Path(path).with_name(name) if path else name}"


def _check_file(path: str) -> None:
    """Raise where this is no file of sqlite's that can be written: MLflow would try ten times."""
    if path in ("", ":memory:"):
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)  # as MLflow does
    with closing(sqlite3.connect(path, timeout=0)) as store:
        try:
            store.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error):  # another command writes to it, so it can be opened
                raise


@contextmanager
def _quiet_mlflow() -> Iterator[None]:
    """Have MLflow keep its warnings to itself: the error that it raises is told."""
    logger = logging.getLogger("mlflow")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(before)
