"""Processes that answer tasks: the one way in which this package starts Python.

A worker imports one function, and calls it on every task that its parent sends. Tasks
and answers are pickled plain data: neither the user's function nor their script is
imported there. A worker ends in one of these ways, each an exception of the parent:

    TaskFailed      the function raised: the error's type, message and traceback
    WorkerEnded     the process ended before it answered, as a compiler that aborts
    WorkerTimeout   the time was over; the process is killed, with those it started
    WorkerStopped   the parent asked it to stop; likewise
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


KEPT_AT = "RHINO_STDERR_FILE"
"""Environment variable: file that receives the standard error which the worker captures
(`utils.stderr`), should a compiler abort the process before it is forwarded."""

LAST_LINES = 5
"""Number of lines of a dead worker's output that an error quotes."""

_FATAL = re.compile(r"F\d{4} |.*Check failed")
"""How XLA begins the line on which it aborts."""

_POLL_S = 0.1
"""How often a worker with a limit is looked at, in seconds."""


class TaskFailed(Exception):
    """An error that the function raised in the worker.

    Attributes:
      kind: name of the error's type.
      message: its message.
      trace: its traceback, as text.
    """

    def __init__(self, kind: str, message: str, trace: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind, self.message, self.trace = kind, message, trace
        self.add_note(trace)


class WorkerEnded(Exception):
    """A worker ended before it answered: exit status and last output.

    Attributes:
      code: exit status; the signal's number, negative, where one killed it.
    """

    def __init__(self, code: int, said: str) -> None:
        super().__init__(said)
        self.code = code


class WorkerTimeout(Exception):
    """A worker did not answer in time, and was killed."""


class WorkerStopped(Exception):
    """A worker was stopped before it answered, and was killed."""


class Worker:
    """A process that answers tasks, one after the other; a context manager.

    Args:
      function: what answers a task, as "package.module:function".
      log: file for all output of the process, next to which the captured standard
        error is kept; None: files that last as long as the worker.
      environment: variables in addition to those of `environment_of_worker`.
    """

    def __init__(
        self,
        function: str,
        *,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._log = log or Path(self._folder.name) / "log"
        self._kept = self._log.with_suffix(".stderr")
        self._kept.unlink(missing_ok=True)
        with self._log.open("wb") as file:
            # A session of its own: this process handles the terminal's interrupts.
            self._process = subprocess.Popen(
                # As a file: the package is imported where the function needs it.
                (sys.executable, "-P", __file__, function),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env={
                    **environment_of_worker(),
                    **(environment or {}),
                    KEPT_AT: str(self._kept),
                },
                start_new_session=True,
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def answer(
        self,
        task: Any,
        *,
        timeout_s: float | None = None,
        stop: threading.Event | None = None,
    ) -> Any:
        """Send a task, and wait for its answer.

        Args:
          task: plain data.
          timeout_s: seconds after which the process is killed; None: no limit.
          stop: kills the process when it is set; None: nothing does.
        Raises:
          TaskFailed, WorkerEnded, WorkerTimeout, WorkerStopped: see above.
        """
        try:
            with self._limited(timeout_s, stop):
                self.send(task)
                return self.receive()
        except (TaskFailed, WorkerEnded):
            raise
        except BaseException:  # an interrupt: the next task would read this answer
            self.kill()
            raise

    def send(self, task: Any) -> None:
        """Send a task; `receive` waits for its answer."""
        assert self._process.stdin is not None
        # A worker that has ended is an error of `receive`.
        with contextlib.suppress(OSError):
            self._process.stdin.write(pickle.dumps(task))
            self._process.stdin.flush()

    def receive(self) -> Any:
        """Wait for the answer to the task that was sent; errors as for `answer`."""
        assert self._process.stdout is not None
        try:
            answer, failed = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            raise WorkerEnded(self._process.wait(), self._last_words()) from None
        if failed is not None:
            raise TaskFailed(*failed)
        return answer

    @contextlib.contextmanager
    def _limited(
        self, timeout_s: float | None, stop: threading.Event | None
    ) -> Iterator[None]:
        """Kill the process when the time is over or `stop` is set, and raise that."""
        if timeout_s is None and stop is None:
            yield
            return
        ends_at = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        is_done, why = threading.Event(), list[type[Exception]]()

        def watch() -> None:
            while not is_done.wait(max(0.0, min(_POLL_S, ends_at - time.monotonic()))):
                is_stopped = stop is not None and stop.is_set()
                if is_stopped or time.monotonic() >= ends_at:
                    why.append(WorkerStopped if is_stopped else WorkerTimeout)
                    self.kill()
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        except WorkerEnded:
            if not why:
                raise
        finally:
            is_done.set()
            watcher.join()
        if why:
            raise why[0]

    @property
    def is_running(self) -> bool:
        """Whether the process can answer another task."""
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill the process, with all that it started."""
        if self.is_running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        """Kill the process, and close its files."""
        self.kill()
        self._folder.cleanup()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        lines = [
            line.strip()[:300]
            for file in (self._log, self._kept)
            if file.exists()
            for line in file.read_text("utf-8", "replace").splitlines()
            if line.strip() and not line.lstrip().startswith("@")  # a C++ stack
        ]
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        # What was fatal may stand before many lines of a handler of crashes.
        fatal = [line for line in lines[:-LAST_LINES] if _FATAL.match(line)]
        return "; ".join([how, *fatal[-1:], *lines[-LAST_LINES:]])


def answer_tasks(function: str) -> None:
    """Answer the parent's tasks until it ends; runs in the worker."""
    tasks = sys.stdin.buffer
    # Printed output must not be mistaken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    module, _, name = function.partition(":")
    answer = getattr(importlib.import_module(module), name)
    while True:
        try:
            task = pickle.load(tasks)
        except EOFError:
            return
        try:
            found = pickle.dumps((answer(task), None))
        except Exception as error:
            trace = traceback.format_exc()
            print(trace, file=sys.stderr, flush=True)
            found = pickle.dumps((None, (type(error).__name__, str(error), trace)))
        answers.write(found)
        answers.flush()


def environment_of_worker() -> dict[str, str]:
    """Return the environment of a worker: it finds this package, and starts JAX on CPU.

    A worker plans and compiles for targets, and runs nothing on devices, which stay
    with this process.
    """
    found = dict(os.environ)
    home = str(Path(__file__).resolve().parents[2])
    paths = [home, *filter(None, [found.get("PYTHONPATH")])]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found["JAX_PLATFORMS"] = "cpu"
    return found


if __name__ == "__main__":
    answer_tasks(sys.argv[1])
