"""The first moments of a worker process, before torch can be touched.

The parent imports this module to name the function it wants run, so nothing slow is imported here.
"""

import ctypes
import multiprocessing.forkserver
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from pipeline.cards import Card

_PR_SET_PDEATHSIG = 1


def nothing() -> None:
    """Return at once: the first worker that ends tells that the fork server has its imports."""


def worker(
    config_json: str,
    environment: Mapping[str, str],
    connection: Connection,
    log_path: str,
    requested: float,
) -> None:
    """Train and measure what the configuration says; events go through `connection`."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to decide
    _redirect_output(log_path)
    os.environ.update(environment)
    from pipeline.worker.entry import main  # already there in a child of the fork server

    main(config_json, connection, requested)


def predictor(configs: Sequence[str], card: Card, log_path: str, connection: Connection) -> None:
    """Send a prediction for each configuration through `connection`."""
    _die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _redirect_output(log_path)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # nothing of this may touch a GPU
    from pipeline.worker.estimate import main

    main(configs, card, connection)


def _die_with_parent() -> None:
    """Have the kernel end this process when the fork server ends, which ends with the command.

    The fork server ends once nobody holds its "alive" pipe, and gives each child a copy of it: as
    long as the worker kept that one, a command that is killed would leave both running.
    """
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
        # The data loader's own processes would wait for ever for a server that has no pipe to us.
        multiprocessing.set_start_method("fork", force=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _redirect_output(path: str) -> None:
    """Send output to a file: standard output of the command is for its own words or its JSON."""
    with open(path, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
