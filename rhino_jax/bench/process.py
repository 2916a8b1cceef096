"""Child processes that do jobs, and may crash."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.store import write_json
from rhino_jax.utils.worker import TaskFailed, Worker, WorkerEnded, WorkerTimeout


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of a job.

    Attributes:
      status: "ok", "timeout", "died" (by a signal) or "error".
      error: the last error that it wrote, or what ended it.
      values: result of the job; None without one.
    """

    status: str
    error: str = ""
    values: Any = None


class JobProcess:
    """A process that does jobs, and may crash: the next job starts a new one.

    Args:
      function: does a job, as for `Worker`.
    """

    def __init__(self, function: str = "rhino_jax.bench.child:run_task") -> None:
        self._function, self._log = function, Path()
        self._worker: Worker | None = None

    @property
    def is_running(self) -> bool:
        """Whether the next job needs no new process."""
        return self._worker is not None and self._worker.is_running

    def run(
        self,
        job: Any,
        log: Path,
        timeout_s: float,
        stop: threading.Event | None = None,
    ) -> Outcome:
        """Do a job.

        Args:
          job: plain data, which is also written next to the log.
          log: file for all output of the process, if it is a new one.
          timeout_s: seconds after which it is killed, with all processes that it
            started.
          stop: kills it when it is set; None: it is not stopped.

        Raises:
          WorkerStopped: `stop` was set.
        """
        write_json(log.with_suffix(".json"), job)
        if self._worker is None or not self.is_running:
            self.close()
            self._log = log
            self._worker = Worker(self._function, log=log, environment=_environment())
        try:
            values = self._worker.answer(job, timeout_s=timeout_s, stop=stop)
            return Outcome(status="ok", values=values)
        except WorkerTimeout:
            error = f"stopped after {timeout_s:.0f} s; what it wrote: {self._log}"
            return Outcome(status="timeout", error=error)
        except TaskFailed as failed:
            lines = str(failed).splitlines()[:_MAX_LINES]
            return Outcome(status="error", error=_clipped(lines))
        except WorkerEnded as ended:
            return _verdict(ended.code, self._log)

    def close(self) -> None:
        """End the process."""
        if self._worker is not None:
            self._worker.close()


def answers(
    function: str, tasks: Sequence[Any], what: str, where: str = ""
) -> list[Any]:
    """Return the answers to tasks, each in a process of its own, all at a time.

    Args:
      function: as for `Worker`.
      tasks: plain data.
      what, where: for errors.

    Raises:
      BenchError: a process failed.
    """
    workers = [Worker(function, environment=_environment()) for _ in tasks]
    try:
        for worker, task in zip(workers, tasks, strict=True):
            worker.send(task)
        return [worker.receive() for worker in workers]
    except (TaskFailed, WorkerEnded) as error:
        raise BenchError(
            what,
            where=where,
            numbers=str(error),
            fix="see the traceback above, if there is one.",
        ) from error
    finally:
        for worker in workers:
            worker.close()


def _verdict(code: int, log: Path) -> Outcome:
    if code < 0:
        reason = signal.Signals(-code).name
        if -code == signal.SIGKILL:
            reason += ", perhaps because the host's memory was full"
        error = f"killed by {reason}; what it wrote: {log}"
        return Outcome(status="died", error=error)
    # Output of a compiler that ended the process is captured in a separate file.
    files = [log, log.with_suffix(".stderr")]
    texts = [f.read_text("utf-8", "replace") for f in files if f.exists()]
    error = next(filter(None, map(_last_error, texts)), "")
    return Outcome(status="error", error=error)


_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b", re.MULTILINE)
_MAX_LINES = 12


def _last_error(text: str) -> str:
    """Return the last error's message, a few lines without its traceback."""
    starts = [m.start() for m in _ERROR.finditer(text)]
    lines = text[starts[-1] if starts else 0 :].strip().splitlines()
    return _clipped(lines[:_MAX_LINES] if starts else lines[-_MAX_LINES:])


def _clipped(lines: list[str]) -> str:
    return "\n".join(line[:300] for line in lines)


def _environment() -> dict[str, str]:
    """Return variables of a child, which sets its own number of emulated devices.

    The plan cache is disabled, as planning is measured.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [f for f in flags if "xla_force_host_platform_device_count" not in f]
    return {"RHINO_CACHE": "0", "XLA_FLAGS": " ".join(kept)}
