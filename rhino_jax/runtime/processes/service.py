"""JAX's coordination service: a key-value store that all processes share.

Process 0 holds it. Where that process is stopped, JAX's own calls block for ever: here
each has a timeout after which the service counts as lost.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax

from rhino_jax.errors import ProcessError


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
        with contextlib.suppress(_AlreadyThere):
            self._call(self._client.key_value_set_bytes, key, data)

    def overwrite(self, key: str, text: str) -> None:
        """Set a key, whether it is set or not."""
        self._call(self._client.key_value_set, key, text, True)

    def get(self, key: str, wait_s: float) -> bytes | None:
        """Return the value of a key, waiting for it to be set; None after `wait_s`."""
        wait_ms = max(1, round(1000 * wait_s))
        found = self._call(
            self._client.blocking_key_value_get_bytes, key, wait_ms, wait_s=wait_s
        )
        return None if found is None else bytes(found)

    def find(self, key: str) -> str | None:
        """Return the current value of a key, or None."""
        found = self._call(self._client.key_value_try_get, key)
        return None if found is None else str(found)

    def delete(self, key: str) -> None:
        """Delete a key, or all keys with a prefix that ends in a slash."""
        self._call(self._client.key_value_delete, key)

    def _call(self, method: Callable[..., Any], *args: Any, wait_s: float = 0.0) -> Any:
        """Call the client with a timeout; None where it finds nothing.

        Raises:
          ProcessError: the call fails, or takes too long.
        """
        answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((method(*args), None))
            except Exception as error:
                if str(error).startswith("UNAVAILABLE"):
                    # JAX aborts this process at once: too soon to raise anything.
                    told = self._gone(str(error).splitlines()[0][:300])
                    os.write(2, f"{told}\n".encode())
                answers.put((None, error))

        threading.Thread(target=run, name="rhino_jax asks", daemon=True).start()
        try:
            found, error = answers.get(timeout=wait_s + self._patience_s)
        except queue.Empty:
            raise self._gone(f"no answer for {self._patience_s:g} s") from None
        if error is None:
            return found
        if not isinstance(error, jax.errors.JaxRuntimeError):
            raise error
        text = str(error)
        if text.startswith(("DEADLINE_EXCEEDED", "NOT_FOUND")):
            return None
        if text.startswith("ALREADY_EXISTS"):
            raise _AlreadyThere from None
        raise self._gone(text.splitlines()[0][:300]) from error

    def _gone(self, numbers: str) -> ProcessError:
        return ProcessError(
            f"{self._what}: process 0 is lost: JAX's coordination service, which it"
            " holds, does not answer.",
            where="process 0",
            numbers=numbers,
            fix="see the output of process 0: it was killed, stopped, or ended early."
            " RHINO_LOST_AFTER_S gives it longer.",
        )


class _AlreadyThere(Exception):
    """The key is set already."""
