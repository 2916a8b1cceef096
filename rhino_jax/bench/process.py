"""Child processes that each do one job, and may crash."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rhino_jax.bench.store import read_json, write_json
from rhino_jax.utils.subprocess import environment_of_child


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of a process.

    Attributes:
      status: "ok", "timeout", "died" (by a signal) or "error".
      error: the last error that it wrote, or what ended it.
      values: result of the job; None without one.
    """

    status: str
    error: str = ""
    values: Any = None


class Stopped(Exception):
    """An interrupt elsewhere ended a process."""


def run_job(
    job: Mapping[str, Any],
    log: Path,
    timeout_s: float,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run `rhino_jax.bench.child` on a job, and return its result.

    Args:
      job: content of the job file.
      log: file for all output of the process; those of job and result are next to it.
      timeout_s: seconds after which it is killed.
      stop: kills it when it is set; None: it is not stopped.

    Raises:
      Stopped: `stop` was set.
    """
    path, result = log.with_suffix(".json"), log.with_suffix(".result.json")
    write_json(path, {**job, "result": str(result)})
    result.unlink(missing_ok=True)
    command = (sys.executable, "-m", "rhino_jax.bench.child", str(path))
    outcome = run_process(command, log, timeout_s, stop)
    if outcome.status != "ok":
        return outcome
    values = read_json(result)
    result.unlink(missing_ok=True)
    if values is None:
        error = "the process ended without a result."
        return Outcome(status="error", error=error)
    return Outcome(status="ok", values=values)


def run_process(
    command: Sequence[str],
    log: Path,
    timeout_s: float,
    stop: threading.Event | None = None,
) -> Outcome:
    """Run a command until it ends, or times out.

    An interrupt, or `stop`, kills it with all processes that it started.

    Args:
      command: the words of the command.
      log: file for its output.
      timeout_s: seconds after which it is killed.
      stop: kills it when it is set; None: it is not stopped.

    Raises:
      Stopped: `stop` was set.
    """
    started = time.monotonic()
    with log.open("wb") as file:
        # A new session, so that only this process gets an interrupt of the terminal.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
        try:
            code = _wait(process, started + timeout_s, stop)
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    status, error = _verdict(code, log, timeout_s)
    return Outcome(status=status, error=error)


_POLL_S = 0.1
"""Polling interval of a process that can be stopped, in seconds."""


def _wait(
    process: subprocess.Popen[bytes], deadline_s: float, stop: threading.Event | None
) -> int | None:
    """Return the exit code of a process; None if it timed out."""
    while True:
        left_s = max(0.0, deadline_s - time.monotonic())
        try:
            return process.wait(left_s if stop is None else min(left_s, _POLL_S))
        except subprocess.TimeoutExpired:
            if stop is not None and stop.is_set():
                raise Stopped from None
            if time.monotonic() >= deadline_s:
                return None


def _verdict(code: int | None, log: Path, timeout_s: float) -> tuple[str, str]:
    if code is None:
        return "timeout", f"stopped after {timeout_s:.0f} s; what it wrote: {log}"
    if code < 0:
        reason = signal.Signals(-code).name
        if -code == signal.SIGKILL:
            reason += ", perhaps because the host's memory was full"
        return "died", f"killed by {reason}; what it wrote: {log}"
    if code:
        # Output of a compiler that ended the process is captured in a separate file.
        files = [log, log.with_suffix(".stderr")]
        texts = [f.read_text("utf-8", "replace") for f in files if f.exists()]
        return "error", next(filter(None, map(_last_error, texts)), "")
    return "ok", ""


_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Interrupt|Exit)\b", re.MULTILINE)
_MAX_LINES = 12


def _last_error(text: str) -> str:
    """Return the last error's message, a few lines without its traceback."""
    starts = [m.start() for m in _ERROR.finditer(text)]
    lines = text[starts[-1] if starts else 0 :].strip().splitlines()
    kept = lines[:_MAX_LINES] if starts else lines[-_MAX_LINES:]
    return "\n".join(line[:300] for line in kept)


def _environment() -> dict[str, str]:
    """Return the environment of a child, which sets its own number of emulated devices.

    The plan cache is disabled, as planning is measured.
    """
    found = environment_of_child()
    found["RHINO_CACHE"] = "0"
    flags = found.get("XLA_FLAGS", "").split()
    kept = [f for f in flags if "xla_force_host_platform_device_count" not in f]
    found["XLA_FLAGS"] = " ".join(kept)
    return found
