"""Heartbeats: how a process knows that another one that it waits for still works.

While a process traces and plans, a thread writes a counter to the coordination service
every `BEAT_S`. A waiting process reads the counters of those that it waits for: a slow
process is waited for as long as its counter rises. One whose counter stands still for
`lost_after_s`, or that has not arrived for `arrive_within_s`, is an error.

Environment variables:
  RHINO_LOST_AFTER_S: seconds without a heartbeat; 30 if unset.
  RHINO_ARRIVE_WITHIN_S: seconds until a process must have begun to trace, once another
    waits for it; 300 if unset. (JAX itself reports a dead process after 100 s.)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from rhino_jax.errors import ProcessError
from rhino_jax.runtime.processes.service import Service, of_lost


BEAT_S = 1.0
"""Seconds between heartbeats: one short message to the coordination service."""

_KEY = "rhino_jax/alive/{}"


def lost_after_s() -> float:
    return _seconds("RHINO_LOST_AFTER_S", 30.0)


def arrive_within_s() -> float:
    return _seconds("RHINO_ARRIVE_WITHIN_S", 300.0)


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        return float(text) if text else default
    except ValueError:
        raise ProcessError(
            f"`{name}` must be a number of seconds.",
            where=f"environment variable {name}",
            numbers=f"got {text!r}",
            fix=f"unset it ({default:g} s), or write {name}=60.",
        ) from None


class Heartbeat:
    """The thread that sends this process's heartbeats.

    Args:
      service: service that receives them.
      key: key of the last one.
      text: number of a heartbeat → its text.
    """

    def __init__(self, service: Service, key: str, text: Callable[[int], str]) -> None:
        self._service, self._key, self._text = service, key, text
        self._is_over = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="rhino_jax signs of life", daemon=True
        )

    def start(self) -> None:
        """Send the first heartbeat, before anything else is done, then the others."""
        self._write(self._text(0))
        self._thread.start()

    def stop(self, last: str) -> None:
        """Send a last text."""
        self._is_over.set()
        self._thread.join(timeout=2 * BEAT_S)
        self._write(last)

    def _run(self) -> None:
        for count in itertools.count(1):
            if self._is_over.wait(BEAT_S):
                return
            self._write(self._text(count))

    def _write(self, text: str) -> None:
        # If the service is lost, a waiting call reports it.
        with contextlib.suppress(ProcessError):
            self._service.overwrite(self._key, text)


_visits = 0
_depth = 0


@contextlib.contextmanager
def at_work(client: Any, process: int) -> Iterator[None]:
    """Send heartbeats within this context; an error inside is reported to others.

    Nested contexts (a sharded function that calls another) are one.
    """
    global _visits, _depth
    if _depth:
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
        return
    _visits += 1
    service = Service(client, 2 * BEAT_S, "`rhino_jax`")
    visit, last = _visits, "done"
    key = _KEY.format(process)
    beat = Heartbeat(service, key, lambda count: f"{visit} at work {count}")
    beat.start()
    _depth = 1
    try:
        yield
    except BaseException as error:
        last = f"left {type(error).__name__}: {error}"[:1000]
        raise
    finally:
        _depth = 0
        beat.stop(f"{visit} {last}")


@dataclass(slots=True)
class ProcessWatch:
    """Monitors one process that this one waits for.

    Attributes:
      service: the service that receives its heartbeats.
      process: index of the process.
      what: name of the waiting API, for messages.
      doing: description of the wait, for messages, as "to plan".
    """

    service: Service
    process: int
    what: str
    doing: str
    _seen: str = ""
    _since: float = field(default_factory=time.monotonic)

    def look(self) -> None:
        """Raise if the process is lost.

        Raises:
          ProcessError: it has failed, has sent no heartbeat, or has not arrived.
        """
        now = time.monotonic()
        sign = self.service.find(_KEY.format(self.process)) or ""
        visit, _, state = sign.partition(" ")
        if state.startswith("left ") and int(visit) >= _visits:
            raise ProcessError(
                f"{self.what}: process {self.process} failed while this process waited"
                f" for it {self.doing}.",
                where=f"process {self.process}",
                numbers=state.removeprefix("left "),
                fix=f"see the output of process {self.process}.",
            )
        if sign != self._seen:
            self._seen, self._since = sign, now
        silent_s, is_here = now - self._since, state.startswith("at work")
        limit_s = lost_after_s() if is_here else arrive_within_s()
        if silent_s > limit_s:
            raise self._lost(silent_s, is_here)

    def _lost(self, silent_s: float, is_here: bool) -> ProcessError:
        if is_here:
            error = ProcessError(
                f"{self.what}: process {self.process} is lost: it has given no sign of"
                f" life while this process waited for it {self.doing}.",
                where=f"process {self.process}, waited for by process"
                f" {jax.process_index()}",
                numbers=f"silent for {silent_s:.0f} s; it writes every {BEAT_S:g} s,"
                f" and is given {lost_after_s():g} s",
                fix=f"see the output of process {self.process}: it was killed, or"
                " stopped. RHINO_LOST_AFTER_S gives it longer.",
            )
            return of_lost(error, self.process)
        return ProcessError(
            f"{self.what}: process {self.process} has not come to plan the same"
            " function.",
            where=f"process {self.process}, waited for by process"
            f" {jax.process_index()}",
            numbers=f"waited for {silent_s:.0f} s",
            fix="call the function in every process whose devices are in the mesh, in"
            " the same order; where one is that much later, RHINO_ARRIVE_WITHIN_S"
            " gives it longer.",
        )
