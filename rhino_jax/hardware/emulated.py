"""Emulated devices: CPU devices of one process, which share its threads.

XLA:CPU runs the ready work of all devices' programs on one thread pool, with as many
threads as the machine has cores, or as there are devices. Batched LAPACK calls (jaxlib
before 0.11.2) and FFTs submit parts of their work to that pool and block until these
are done; if every thread of the pool blocks like this (after a collective that ends on
all devices at once), no thread is left to run the parts, and the program deadlocks. No
compiler option keeps such calls off the pool: a larger pool avoids the deadlock.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rhino_jax._compat import at_cpu_client, num_emulated_devices
from rhino_jax.hardware.compile_only import environment


THREADS_PER_DEVICE = 8
"""Threads of the pool for each device of an emulated mesh.

One device has at most four workers in its executor and one collective at a time
(`xla/backends/cpu/runtime/thunk.h`), so that fewer than these wait at once. Measured
on two cores, eight devices: matmuls take a quarter more CPU time and no more wall time
than with a pool of eight. XLA caps the pool at 256.
"""

STALLED_AFTER_S = 10.0
"""Seconds without CPU time after which a call is reported; XLA's own report of a
collective that waits comes after 20."""

_IDLE_SHARE = 0.02
"""Share of one core that an idle process may use, as for a notebook's messages."""


def widen_pool() -> None:
    """Make JAX start its CPU devices with a thread pool that is too large to deadlock.

    A size that the user set (PJRT_NPROC, NPROC) is respected. Does nothing if JAX has
    already created its CPU devices.
    """
    at_cpu_client(lambda: environment(_settings()))


def _settings() -> Mapping[str, str]:
    count = num_emulated_devices()
    return {"PJRT_NPROC": str(THREADS_PER_DEVICE * count)} if count > 1 else {}


class _Call:
    """A call that the watchdog observes.

    Attributes:
      describe: returns the text that names the call.
      was_seen: whether it was already running at the watchdog's last check.
      was_told: whether it has been reported.
    """

    __slots__ = ("describe", "was_seen", "was_told")

    def __init__(self, describe: Callable[[], str]) -> None:
        self.describe, self.was_seen, self.was_told = describe, False, False


class Watchdog:
    """Reports calls during which the process uses no CPU time.

    Args:
      after_s: seconds between two checks.
      report: called with the text of a report; None: print to standard error.
    """

    def __init__(
        self,
        after_s: float = STALLED_AFTER_S,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.after_s, self._report = after_s, report or _to_stderr
        self._calls: set[_Call] = set()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, describe: Callable[[], str]) -> Iterator[None]:
        """Watch a call; costs only a thread that checks every few seconds.

        Args:
          describe: returns the call's name and current activity; called only for a
            report.
        """
        if self._thread is None or not self._thread.is_alive():  # as after a fork
            self._thread = threading.Thread(
                target=self._run, name="rhino_jax watchdog", daemon=True
            )
            self._thread.start()
        call = _Call(describe)
        self._calls.add(call)
        try:
            yield
        finally:
            self._calls.discard(call)

    def _run(self) -> None:
        before_s = time.process_time()
        while True:
            time.sleep(self.after_s)
            now_s = time.process_time()
            self._look(now_s - before_s)
            before_s = now_s

    def _look(self, cpu_s: float) -> None:
        is_idle = cpu_s < _IDLE_SHARE * self.after_s
        for call in list(self._calls):
            if is_idle and call.was_seen and not call.was_told:
                call.was_told = True
                self._report(_stalled(call.describe(), self.after_s, cpu_s))
            call.was_seen = True


def _stalled(what: str, after_s: float, cpu_s: float) -> str:
    threads = num_emulated_devices() * THREADS_PER_DEVICE
    return (
        f"RhinoWarning: {what} makes no progress on emulated devices.\n"
        f"  numbers: {cpu_s:.2f} s of CPU time in the last {after_s:g} s\n"
        "  fix: if it calls the host, look there. Else threads of XLA:CPU may wait for"
        " one another: import rhino_jax before JAX starts its devices, or set"
        f" PJRT_NPROC={threads} in the environment, which gives them more threads;"
        " interrupt this process, which will not go on by itself.\n"
    )


def _to_stderr(text: str) -> None:
    print(text, end="", file=sys.stderr, flush=True)


WATCHDOG = Watchdog()
"""The watchdog of all calls of this process."""
