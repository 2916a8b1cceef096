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
      client: client of the service that receives them.
      key: format of their keys.
      text: number of a heartbeat → its text.
    """

    def __init__(self, client: Any, key: str, text: Callable[[int], str]) -> None:
        self._service = Service(client, 2 * BEAT_S, "`rhino_jax`")
        self._key, self._text = key.format(jax.process_index()), text
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
_is_at_work = False


@contextlib.contextmanager
def at_work(client: Any) -> Iterator[None]:
    """Send heartbeats within this context; an error inside is reported to others.

    Nested contexts (a sharded function that calls another) are one.
    """
    global _visits, _is_at_work
    if _is_at_work:
        yield
        return
    _visits += 1
    visit, last = _visits, "done"
    beat = Heartbeat(client, _KEY, lambda count: f"{visit} at work {count}")
    beat.start()
    _is_at_work = True
    try:
        yield
    except BaseException as error:
        last = f"left {type(error).__name__}: {error}"[:1000]
        raise
    finally:
        _is_at_work = False
        beat.stop(f"{visit} {last}")


class HeartbeatWatch:
    """Reads the heartbeats of the processes that this one waits for.

    Args:
      service: the service that receives them.
      what: name of the waiting API, for messages.
      key: format of their keys.
      point: the point that they have to come to, as "step 2".
    """

    def __init__(
        self,
        service: Service,
        what: str,
        key: str = _KEY,
        point: str = "the planning of the same function",
    ) -> None:
        self._service, self._what, self._key = service, what, key
        self.start(point)

    def start(self, point: str) -> None:
        """Begin to wait: time counts from the first look at each process."""
        self._point = point
        self._seen: dict[int, tuple[str, float, float]] = {}

    def find(self, process: int) -> str:
        """Return the last heartbeat of a process; empty: there is none."""
        return self._service.find(self._key.format(process)) or ""

    def look(
        self,
        process: int,
        sign: str,
        is_beating: bool,
        is_here: bool,
        doing: str,
        at: str = "",
    ) -> None:
        """Raise if a process is lost, or has not arrived.

        Args:
          process: its index.
          sign: its last heartbeat.
          is_beating: whether it should send more.
          is_here: whether it has come to the point that this process waits for.
          doing: what this process waits for, as "to plan".
          at: the point that it is at, for messages.
        Raises:
          ProcessError: it has sent no heartbeat, or has not arrived.
        """
        now = time.monotonic()
        before, since, here = self._seen.get(process, (sign, now, now))
        since, here = since if sign == before else now, now if is_here else here
        self._seen[process] = sign, since, here
        if is_beating and now - since > lost_after_s():
            raise self.lost(process, doing, f"silent for {now - since:.0f} s")
        if now - here > arrive_within_s():
            raise ProcessError(
                f"{self._what}: process {process} has not come to {self._point}.",
                where=f"process {process}, waited for by process"
                f" {jax.process_index()} {doing}",
                numbers=f"waited for {now - here:.0f} s{at}",
                fix="call the function in every process whose devices are in the mesh,"
                " in the same order; where one is that much later,"
                " RHINO_ARRIVE_WITHIN_S gives it longer.",
            )

    def look_at_planner(self, process: int, doing: str) -> None:
        """Raise if a process that traces and plans has failed, or as `look`."""
        sign = self.find(process)
        visit, _, state = sign.partition(" ")
        if state.startswith("left ") and int(visit) >= _visits:
            raise ProcessError(
                f"{self._what}: process {process} failed while this process waited for"
                f" it {doing}.",
                where=f"process {process}",
                numbers=state.removeprefix("left "),
                fix=f"see the output of process {process}.",
            )
        is_here = state.startswith("at work")
        self.look(process, sign, is_here, is_here, doing)

    def lost(
        self, process: int, doing: str, numbers: str, given_s: float | None = None
    ) -> ProcessError:
        """Return the error for a lost process.

        Args:
          process: its index.
          doing: what this process waits for.
          numbers: details of the loss.
          given_s: seconds without a heartbeat; None: `lost_after_s()`.
        """
        given_s = lost_after_s() if given_s is None else given_s
        error = ProcessError(
            f"{self._what}: process {process} is lost: process {jax.process_index()}"
            f" waited for it {doing}.",
            where=f"process {process}, in {self._point}",
            numbers=f"{numbers}; it writes every {BEAT_S:g} s, and is given"
            f" {given_s:g} s",
            fix=f"see the output of process {process}: it was killed, stopped, or ended"
            " early. Restart all processes from the last checkpoint;"
            " RHINO_LOST_AFTER_S gives a slow one longer.",
        )
        return of_lost(error, process)
