"""Compile in a child process, so that an aborting compiler does not end a notebook."""

from __future__ import annotations

import atexit
import threading
import time
from dataclasses import dataclass

import jax

from rhino_jax.errors import CompilerError
from rhino_jax.hardware.compile_only import DeviceCall
from rhino_jax.utils.keywords import read_seconds
from rhino_jax.utils.worker import TaskFailed, Worker, WorkerEnded, WorkerTimeout
from rhino_jax.verify.hlo.records import Compilation


@dataclass(frozen=True, slots=True)
class CompilerTask:
    """A program for a child process to compile.

    Attributes:
      name: the program, for messages, as "`step`".
      module, options: results of `rhino_jax._compat.compiler_input`.
      origin: the call that makes the compile-only devices.
      device_ids: device ids of the mesh, in its order.
      platform: "tpu" or "gpu".
    """

    name: str
    module: bytes
    options: bytes
    origin: DeviceCall
    device_ids: tuple[int, ...]
    platform: str


USUAL_COMPILE_TIME = {"tpu": "1.5 to 7 minutes", "gpu": "0.3 to 2 minutes"}
"""Compile times of train steps of 1 to 8 billion parameters, layers in a scan, on two
cores: nine in ten cells of the table in `bench/RESULTS.md`."""


@dataclass(frozen=True, slots=True)
class CompileLimit:
    """A limit on the time that child processes compile.

    Attributes:
      seconds: wall time that was allowed, of all programs together; None: no limit.
      ends_at: when it is over, by `time.monotonic`.
      what: name of the calling API, for messages.
    """

    seconds: float | None = None
    ends_at: float = float("inf")
    what: str = "compiling"

    @staticmethod
    def of(what: str, time_limit_s: float | str | None) -> CompileLimit:
        """Return the limit that begins now; `time_limit_s` is seconds, or as "2 min".

        Raises:
          RhinoError: it is no time.
        """
        seconds = read_seconds(what, "time_limit_s", time_limit_s)
        if seconds is None:
            return NO_LIMIT
        return CompileLimit(seconds, time.monotonic() + seconds, what)


NO_LIMIT = CompileLimit()
"""Compiling may take any time."""


def compile_in_child(
    task: CompilerTask, limit: CompileLimit = NO_LIMIT
) -> tuple[Compilation, str]:
    """Compile in a child process, which stays alive for the next program.

    Args:
      task: the program.
      limit: when the child process is ended if it still compiles.
    Returns:
      The compilation, and the part of standard error that the user should see.
    Raises:
      jax.errors.JaxRuntimeError: the compiler fails.
      CompilerError: the compiler aborted the process, or the time is over.
    """
    with _LOCK:
        worker = (
            _idle.pop() if _idle else Worker("rhino_jax.verify.compile:compile_task")
        )
        left_s = None if limit.seconds is None else limit.ends_at - time.monotonic()
        try:
            found: tuple[Compilation, str] = worker.answer(task, timeout_s=left_s)
        except TaskFailed as failed:
            if failed.kind != jax.errors.JaxRuntimeError.__name__:
                raise
            raise jax.errors.JaxRuntimeError(failed.message) from None
        except WorkerEnded as ended:
            raise _ended(task, str(ended)) from None
        except WorkerTimeout:
            raise _out_of_time(task, limit) from None
        finally:
            if worker.is_running:
                _idle.append(worker)
            else:
                worker.close()
    return found


_LOCK = threading.Lock()
_idle: list[Worker] = []
"""The idle worker, if there is one."""


def _ended(task: CompilerTask, how: str) -> CompilerError:
    return CompilerError(
        f"the compiler for {task.platform.upper()}s ended its process while it compiled"
        f" {task.name}.",
        where=f"{task.name}, for {len(task.device_ids)} devices",
        numbers=how,
        fix="nothing of this process is lost: try another layout of what the last line"
        " names (pins=), another version of the compiler, or report it to XLA.",
    )


def _out_of_time(task: CompilerTask, limit: CompileLimit) -> CompilerError:
    return CompilerError(
        f"{limit.what}: the compiler for {task.platform.upper()}s was still compiling"
        f" {task.name} when the time was over.",
        where=f"time_limit_s=, {task.name}, for {len(task.device_ids)} devices",
        numbers=f"{limit.seconds:g} s; large models usually take"
        f" {USUAL_COMPILE_TIME[task.platform]}",
        fix="allow more time; or put layers into jax.lax.scan, whose body is compiled"
        " once.",
    )


@atexit.register
def _end() -> None:
    for worker in _idle:
        worker.close()
