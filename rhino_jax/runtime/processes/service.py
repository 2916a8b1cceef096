"""JAX's coordination service: a key-value store that all processes share.

Process 0 runs it. Where that process is stopped, JAX's own calls block for ever: here
each has a timeout after which the service counts as lost.

A process exits soon after another one is lost, with its own exit status. At exit JAX
waits for all processes: where one is lost, until its heartbeat has been missing for 100
s, and then it aborts (SIGABRT). A process that knows of a loss skips that, as there is
nothing to wait for. Process 0, which holds the coordination service, exits last, since
JAX ends all others with it.

A process that fails with an error of its own while the others wait for it in a
collective of one program does not wait either: its exit is how they learn of it.

Threads blocked inside of XLA return as other processes exit; a thread that returns
while Python finalizes aborts the process. So where the exit status is known (an
uncaught error, or `sys.exit`), the process exits without finalization.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NoReturn

import jax

from rhino_jax import errors
from rhino_jax._compat import coordination_client, end_without_others
from rhino_jax.errors import ProcessError, RhinoError


class Service:
    """The coordination service as a client of one process sees it.

    Args:
      client: JAX's client of the service.
      patience_s: seconds that a call may take beyond its requested wait.
      what: name of the calling API, for messages.
    """

    def __init__(self, client: Any, patience_s: float, what: str) -> None:
        self._client, self._patience_s, self._what = client, patience_s, what

    def put(self, key: str, data: bytes) -> None:
        """Set a key, unless it is set already."""
        self._call(self._client.key_value_set_bytes, key, data)

    def overwrite(self, key: str, text: str) -> None:
        """Set a key, whether it is set or not."""
        self._call(self._client.key_value_set, key, text, True)

    def get(self, key: str, wait_s: float) -> bytes | None:
        """Return the value of a key, waiting for it to be set; None after `wait_s`."""
        wait_ms = max(1, round(1000 * wait_s))
        found: bytes | None = self._call(
            self._client.blocking_key_value_get_bytes, key, wait_ms, wait_s=wait_s
        )
        return found

    def find(self, key: str) -> str | None:
        """Return the current value of a key, or None."""
        found: str | None = self._call(self._client.key_value_try_get, key)
        return found

    def delete(self, key: str) -> None:
        """Delete a key, or all keys with a prefix that ends in a slash."""
        self._call(self._client.key_value_delete, key)

    def report(self, prefix: str, error: RhinoError) -> None:
        """Set an error for others to raise, unless one is set; see `reported`."""
        said = {name: getattr(error, name) for name in _PARTS}
        said |= {"kind": type(error).__name__, "lost": getattr(error, "lost", None)}
        said |= {"process": jax.process_index()}
        self.put(f"{prefix}/error", json.dumps(said).encode())

    def reported(self, prefix: str) -> tuple[int, RhinoError] | None:
        """Return the process that reported an error, and the error; or None."""
        text = self.find(f"{prefix}/error")
        if text is None:
            return None
        said = json.loads(text)
        kind, lost = getattr(errors, said["kind"], ProcessError), said["lost"]
        error: RhinoError = kind(**{name: said[name] for name in _PARTS})
        if lost is not None and isinstance(error, ProcessError):
            of_lost(error, lost)
        return said["process"], error

    def _call(self, method: Callable[..., Any], *args: Any, wait_s: float = 0.0) -> Any:
        """Call the client with a timeout; None where a key is not set, or is already.

        Raises:
          ProcessError: the call fails, or takes too long.
        """
        answer = Future[Any]()

        def run() -> None:
            try:
                answer.set_result(method(*args))
            except Exception as error:
                if str(error).startswith("UNAVAILABLE"):
                    # JAX aborts this process at once: too soon to raise anything.
                    os.write(2, f"{self._gone(first_line(error))}\n".encode())
                answer.set_exception(error)

        threading.Thread(target=run, name="rhino_jax asks", daemon=True).start()
        try:
            return answer.result(wait_s + self._patience_s)
        except TimeoutError:
            raise self._gone(f"no answer for {self._patience_s:g} s") from None
        except jax.errors.JaxRuntimeError as error:
            if str(error).startswith(_NOTHING_NEW):
                return None
            raise self._gone(first_line(error)) from error

    def _gone(self, numbers: str) -> ProcessError:
        return ProcessError(
            f"{self._what}: process 0 is lost: JAX's coordination service, which it"
            " holds, does not answer.",
            where="process 0",
            numbers=numbers,
            fix="see the output of process 0: it was killed, stopped, or ended early."
            " RHINO_LOST_AFTER_S gives it longer.",
        )


_NOTHING_NEW = "ALREADY_EXISTS", "DEADLINE_EXCEEDED", "NOT_FOUND"
"""Errors of calls that changed nothing, or found nothing."""

_PARTS = "what", "where", "numbers", "fix"


def first_line(error: Exception) -> str:
    """Return the beginning of an error's text, for messages."""
    return str(error).splitlines()[0][:300]


PATIENCE_S = 4.0
"""Seconds that process 0 gives the others to exit.

They learn of a loss from the coordination service within `meeting.POLL_S`.
"""

_KEY = "rhino_jax/ended/{}"
_POLL_S = 0.1

_lost: set[int] = set()
_status: list[Any] = []
_is_ending: list[bool] = []


def of_lost(error: ProcessError, process: int) -> ProcessError:
    """Mark an error as that of a lost process, for which exit does not wait.

    The exit status is that of the program: 1 where it does not catch the error.
    """
    watch_exit()
    _lost.add(process)
    error.lost = process
    return error


@functools.cache
def watch_exit() -> None:
    """Let this process exit without waiting for others, should it fail."""
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
