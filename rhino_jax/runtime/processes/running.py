"""Coordinate processes that run one plan: heartbeats, reported errors, and waits.

Calls that depend on other processes are made in a thread of their own, since JAX's
waits cannot be interrupted. Meanwhile this process checks whether another one has
reported an error, and whether those that it waits for still send heartbeats. One that
sends none for `RHINO_LOST_AFTER_S` is lost; one that has not reached this step within
`RHINO_ARRIVE_WITHIN_S` is an error as well.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax

from rhino_jax.errors import ProcessError, RhinoError
from rhino_jax.runtime.processes.meeting import POLL_S
from rhino_jax.runtime.processes.service import Service, first_line, watch_exit
from rhino_jax.runtime.processes.signs import (
    BEAT_S,
    Heartbeat,
    HeartbeatWatch,
    lost_after_s,
)


BARRIER_MS = 7 * 24 * 3_600_000
"""Timeout of JAX's barriers in milliseconds: long after this process's own timeouts."""

MISSED_BEATS = 3
"""Heartbeats that a lost process has missed when a collective fails for its loss."""

_KEY = "rhino_jax/running/{}"

LEFT = "left"


_points: dict[int, str] = {}
"""Client of the coordination service → this process's point in what runs, which its
heartbeats tell while it runs."""


class _Waiter:
    """A thread that makes blocking calls, one after another, which may never return."""

    def __init__(self) -> None:
        self._calls = queue.SimpleQueue[tuple[Callable[[], Any], futures.Future[Any]]]()
        threading.Thread(target=self._run, name="rhino_jax waits", daemon=True).start()

    def _run(self) -> None:
        while True:
            call, end = self._calls.get()
            try:
                end.set_result(call())
            except Exception as error:
                end.set_exception(error)
            del call, end

    def start(self, call: Callable[[], Any]) -> futures.Future[Any]:
        end = futures.Future[Any]()
        self._calls.put((call, end))
        return end


class Running:
    """Communication of the processes of one plan while they run it.

    Args:
      client: client of JAX's coordination service.
      processes: indices of the processes that run it.
      what: name of the calling API, for messages.
      prefix: prefix of keys, equal in all of them and unique to the plan.
    """

    def __init__(
        self, client: Any, processes: Sequence[int], what: str, prefix: str
    ) -> None:
        self._client, self._service = client, Service(client, lost_after_s(), what)
        self.processes, self.what, self.me = tuple(processes), what, jax.process_index()
        self._prefix, self._failures = prefix, 0
        self.step = 0  # number of the current step, from 1
        self.watch = HeartbeatWatch(self._service, what, _KEY)
        self._waiter: _Waiter | None = None

    def begin(self) -> None:
        """Start the next step."""
        self.step += 1
        client = id(self._client)
        is_first = client not in _points
        _points[client] = f"{self._prefix} {self.step}"
        if is_first:
            beat = Heartbeat(
                self._client, _KEY, lambda count: f"{count} {_points[client]}"
            )
            beat.start()
            atexit.register(beat.stop, LEFT)
        self.watch.start(f"step {self.step}")

    def wait(self, call: Callable[[], Any], on: Sequence[int], doing: str) -> None:
        """Make a call that returns when others have done their part.

        Args:
          call: the blocking call.
          on: processes that take part in it.
          doing: what this process waits for, as "for `forward_0_of_group_0`".
        Raises:
          ProcessError: one of them is lost, or another process reported an error.
        """
        waiter = self._waiter or _Waiter()
        # A waiter whose call never returns is abandoned.
        self._waiter, end = None, waiter.start(call)
        while not futures.wait([end], POLL_S).done:
            self._look(on, doing)
        self._waiter = waiter
        end.result()

    @contextlib.contextmanager
    def step_of_one_program(self) -> Iterator[None]:
        """Run a step of one program with all processes within this context.

        Its collectives fail at once where the connection to another process ends.

        Raises:
          ProcessError: instead of JAX's error, where a process is lost.
        """
        self.begin()
        watch_exit()
        try:
            yield
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            # Errors during dispatch are ValueErrors (JAX 0.10.2).
            is_status = re.match(r"[A-Z_]+: ", str(error))
            process = self._missing() if is_status else None
            if process is None:
                raise
            text, given_s = first_line(error), MISSED_BEATS * BEAT_S
            raise self.watch.lost(process, "in a collective", text, given_s) from error

    def _missing(self) -> int | None:
        """Return a process that sends no heartbeats, else one that exited, or None."""
        before = {p: self.watch.find(p) for p in self.processes if p != self.me}
        time.sleep(MISSED_BEATS * BEAT_S)
        after = {p: self.watch.find(p) for p in before}
        left = [p for p, sign in after.items() if sign == LEFT]
        silent = [p for p, sign in after.items() if sign == before[p] != LEFT]
        return next(iter(silent + left), None)

    def meet(self, doing: str, on: Sequence[int] | None = None) -> None:
        """Wait until all processes are here.

        Args:
          doing: what this process waits for.
          on: processes that meet; None: all.
        Raises:
          ProcessError: as for `wait`.
        """
        on = self.processes if on is None else on
        name = f"{self._prefix}/{self._failures}/{' '.join(map(str, on))}"

        def call() -> None:
            self._client.wait_at_barrier(name, BARRIER_MS, list(on))

        self.wait(call, on, doing)

    def failed(self, error: ProcessError) -> None:
        """Report an error to the others, unless one was reported before.

        Barriers of later steps have other names, so that they do not release waits of
        this one.
        """
        self._failures += 1
        with contextlib.suppress(ProcessError):
            self._service.report(f"{self._prefix}/{self.step}", error)

    def told(self) -> RhinoError | None:
        """Return the error that another process reported, in this or the last step."""
        for step in (self.step, self.step - 1):
            found = self._service.reported(f"{self._prefix}/{step}")
            if found is not None and found[0] != self.me:
                return found[1]
        return None

    def reported_within(self, seconds: float) -> RhinoError | None:
        """Wait up to some seconds for an error that another process reported."""
        until = time.monotonic() + seconds
        while (error := self.told()) is None and time.monotonic() < until:
            time.sleep(0.1 * seconds)
        return error

    def _look(self, on: Sequence[int], doing: str) -> None:
        error = self.told()
        if error is not None:
            raise error
        for process in on:
            if process == self.me:
                continue
            sign = self.watch.find(process)
            count, _, point = sign.partition(" ")
            if count == LEFT:
                raise self.watch.lost(process, doing, "it ended")
            prefix, _, step = point.partition(" ")
            is_same = prefix == self._prefix
            is_here = is_same and int(step) >= self.step
            at = f"; it is at {f'step {step}' if is_same else 'something else'}"
            self.watch.look(process, sign, bool(sign), is_here, doing, at)
