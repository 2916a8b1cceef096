"""Processes of this machine, joined by `jax.distributed`, that run scenarios in turn.

They start once for many scenarios (see `worker`): a start costs more than most of them.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO, Any


WITHIN_S = 300.0
"""Seconds within which a scenario must end."""


class Pool:
    """Running processes; others are started where a scenario needs them."""

    def __init__(self) -> None:
        self._running: _Processes | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def run(
        self,
        scenario: str,
        count: int = 2,
        *,
        of: list[int] | None = None,
        module: str = "worker",
        devices: int = 2,
        **settings: str,
    ) -> list[dict[str, Any]]:
        """Run a scenario and return what each process reports, in order.

        Args:
          scenario: name of a function of the module.
          count: number of processes.
          of: those whose reports count; afterwards all are ended.
          module: of `tests.processes`.
          devices: of every process.
          settings: environment variables during the scenario.
        """
        running = self._running
        if running is None or running.kind != (count, devices):
            self.end()
            running = self._running = _Processes(count, devices)
        try:
            running.start(f"{module}.{scenario}", settings)
            found = [running.found(i) for i in (range(count) if of is None else of)]
        except BaseException:
            self.end()
            raise
        if of is not None or any("seconds" not in one for one in found):
            self.end()
        return found

    def end(self) -> None:
        if self._running is not None:
            self._running.end()
        self._running = None


class _Processes:
    def __init__(self, count: int, devices: int) -> None:
        self.kind = (count, devices)
        environment = {
            **os.environ,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
            " --xla_backend_optimization_level=0"
            " --xla_llvm_disable_expensive_passes=true",
        }
        command = [sys.executable, "-m", "tests.processes.worker"]
        port = str(free_port())
        self._number = 0
        self._stderr = [tempfile.TemporaryFile() for _ in range(count)]
        self._running = [
            subprocess.Popen(
                [*command, str(i), str(count), port],
                env=environment,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
            for i, stderr in enumerate(self._stderr)
        ]
        self._lines = [_lines_of(process.stdout) for process in self._running]

    def start(self, scenario: str, settings: dict[str, str]) -> None:
        self._number += 1
        request = {"scenario": scenario, "number": self._number, "settings": settings}
        for process in self._running:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()

    def found(self, i: int) -> dict[str, Any]:
        """Return what process i reports; only `rc` and `stderr` where it ended."""
        until, said = time.monotonic() + WITHIN_S, None
        while said is None:
            line = self._lines[i].get(timeout=max(0.1, until - time.monotonic()))
            if line is None:
                break
            if line.startswith("FOUND "):
                said = json.loads(line.removeprefix("FOUND "))
        rc = 0 if said is not None else self._running[i].wait()
        # The process writes where the file's position is: leave that alone.
        file = self._stderr[i].fileno()
        start = max(0, os.fstat(file).st_size - (1 << 20))
        written = os.pread(file, 1 << 20, start).decode(errors="replace")
        return {**(said or {}), "rc": rc, "stderr": written}

    def end(self) -> None:
        for process, stderr in zip(self._running, self._stderr, strict=True):
            process.kill()
            process.wait()
            stderr.close()


def _lines_of(stream: IO[str]) -> queue.SimpleQueue[str | None]:
    """Return a queue of the lines of a stream, as they come; None after the last."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def results(found: list[dict[str, Any]]) -> list[Any]:
    """Return the results of processes; fail with all errors where one raised."""
    # A collective that fails in one process fails in the others, for another reason.
    raised = [
        f"process {i}: {one.get('text') or one['stderr'][-2000:]}"
        for i, one in enumerate(found)
        if "result" not in one
    ]
    assert not raised, "\n".join(raised)
    return [one["result"] for one in found]


def errors(found: list[dict[str, Any]], kind: str = "ProcessError") -> list[str]:
    """Return the messages of errors of one kind that all processes raised."""
    for one in found:
        assert one.get("error") == kind, one.get("text") or one["stderr"][-2000:]
    return [one["text"] for one in found]


def wrong_of(pool: Pool, scenario: str, name: str, seed: int, most: int) -> list[str]:
    """Return what a scenario of `one_device` finds wrong; a process that ends is.

    Args:
      pool: starts another process in its place.
      scenario: a function's name.
      name, seed, most: what it runs, what is drawn, and how much of it.
    """
    settings = {"NAME": name, "SEED": str(seed), "MOST": str(most)}
    try:
        (found,) = pool.run(scenario, 1, module="one_device", devices=8, **settings)
    except queue.Empty:
        return [f"{name}: no end within {WITHIN_S:.0f} s"]
    if "result" in found:
        return list(found["result"])
    what = found.get("text") or f"the process ended with {found['rc']}"
    last = found["stderr"].rpartition("RUNNING ")[2]
    return [f"{name}: {what}, running {last[:2000]}"]
