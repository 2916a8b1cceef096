"""Exit soon after another process is lost, with this process's own exit status.

At exit JAX waits for all processes: where one is lost, until its heartbeat has been
missing for 100 s, and then it aborts (SIGABRT). A process that knows of a loss skips
that, as there is nothing to wait for. Process 0, which holds the coordination service,
exits last, since JAX ends all others with it.

A process that fails with an error of its own while the others wait for it in a
collective of one program does not wait either: its exit is how they learn of it.

Threads blocked inside of XLA return as other processes exit; a thread that returns
while Python finalizes aborts the process. So where the exit status is known (an
uncaught error, or `sys.exit`), the process exits without finalization.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
from typing import Any, NoReturn

import jax

from rhino_jax._compat import coordination_client, end_without_others
from rhino_jax.errors import ProcessError
from rhino_jax.runtime.processes.service import Service


PATIENCE_S = 4.0
"""Seconds that process 0 gives the others to exit.

They learn of a loss from the coordination service within `meeting.POLL_S`.
"""

_KEY = "rhino_jax/ended/{}"
_POLL_S = 0.1

_lost: set[int] = set()
_status: list[Any] = []
_is_ending: list[bool] = []
_is_watched: list[bool] = []


def of_lost(error: ProcessError, process: int) -> ProcessError:
    """Mark an error as that of a lost process, for which exit does not wait.

    The exit status is that of the program: 1 where it does not catch the error.
    """
    watch_exit()
    _lost.add(process)
    error.lost = process
    return error


def watch_exit() -> None:
    """Let this process exit without waiting for others, should it fail."""
    if not _is_watched:
        _is_watched.append(True)
        # Handlers run in reverse order: this one before JAX's.
        atexit.register(_end)
        _see_exit()


def _see_exit() -> None:
    """Record the status that `sys.exit` is called with."""
    call = sys.exit

    def exit_with(status: Any = None, /) -> NoReturn:
        _status[:] = [status]
        call(status)

    sys.exit = exit_with


def _exit_status() -> int | None:
    """Return the exit status, or None where only Python's finalization knows it."""
    if getattr(sys, "last_value", None) is not None:
        return 1
    if not _status:
        return None
    (status,) = _status
    if status is None or isinstance(status, int):
        return int(status or 0) & 0xFF
    return 1


def _end() -> None:
    if _is_ending or not (_lost or _exit_status()):
        return
    _is_ending.append(True)
    client = coordination_client()
    if client is not None:
        with contextlib.suppress(ProcessError, RuntimeError):
            _tell(Service(client, 1.0, "`rhino_jax`"))
    end_without_others()
    status = _exit_status()
    if status is None:
        return
    atexit._run_exitfuncs()  # the user's; this one is running
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(status)


def _tell(service: Service) -> None:
    me = jax.process_index()
    service.put(_KEY.format(me), b"ended")
    if me != 0 or not _lost:
        return
    left = {*range(jax.process_count())} - {me} - _lost
    until = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < until:
        left = {p for p in left if not service.find(_KEY.format(p))}
        time.sleep(_POLL_S)
