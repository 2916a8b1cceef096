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
from rhino_jax.utils.subprocess import Child, ChildEnded
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


@dataclass(frozen=True, slots=True)
class CompilerAnswer:
    """The result of a `CompilerTask`.

    Attributes:
      compilation: the compilation; None where the compiler failed.
      told: the part of its standard error that the user should see.
      error: text of the compiler's error; empty without one.
    """

    compilation: Compilation | None
    told: str
    error: str = ""


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
        child = _running.pop() if _running else Child("rhino_jax.verify.compile_child")
        is_over = threading.Event()

        def end() -> None:
            is_over.set()
            child.kill()

        timer = threading.Timer(max(0.0, limit.ends_at - time.monotonic()), end)
        if limit.seconds is not None:
            timer.start()
        try:
            answer: CompilerAnswer = child.answer(task)
        except ChildEnded as ended:
            child.close()
            if is_over.is_set():
                raise _out_of_time(task, limit) from None
            raise _ended(task, str(ended)) from None
        except BaseException:  # an interrupt: the next task would read this answer
            child.kill()
            child.close()
            raise
        finally:
            timer.cancel()
        if is_over.is_set():  # as the answer came
            child.close()
        else:
            _running.append(child)
    if answer.compilation is None:
        raise jax.errors.JaxRuntimeError(answer.error)
    return answer.compilation, answer.told


_LOCK = threading.Lock()
_running: list[Child] = []
"""The idle child process, if there is one."""


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
    for child in _running:
        child.kill()
        child.close()
