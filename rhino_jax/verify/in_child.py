"""Compile in a child process, so that an aborting compiler does not end a notebook."""

from __future__ import annotations

import atexit
import threading
from dataclasses import dataclass

import jax

from rhino_jax.errors import CompilerError
from rhino_jax.hardware.compile_only import DeviceCall
from rhino_jax.utils.subprocess import Child, ChildEnded
from rhino_jax.verify.hlo.records import Compilation


@dataclass(frozen=True, slots=True)
class CompilerTask:
    """A program for a child process to compile.

    Attributes:
      name: name of the program, for messages.
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


def compile_in_child(task: CompilerTask) -> tuple[Compilation, str]:
    """Compile in a child process, which stays alive for the next program.

    Returns:
      The compilation, and the part of standard error that the user should see.
    Raises:
      jax.errors.JaxRuntimeError: the compiler fails.
      CompilerError: the compiler aborted the process.
    """
    with _LOCK:
        child = _running.pop() if _running else Child("rhino_jax.verify.compile_child")
        try:
            answer: CompilerAnswer = child.answer(task)
        except ChildEnded as ended:
            child.close()
            raise _ended(task, str(ended)) from None
        except BaseException:  # an interrupt: the next task would read this answer
            child.kill()
            child.close()
            raise
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
        f" `{task.name}`.",
        where=f"`{task.name}`, for {len(task.device_ids)} devices",
        numbers=how,
        fix="nothing of this process is lost: try another layout of what the last line"
        " names (pins=), another version of the compiler, or report it to XLA.",
    )


@atexit.register
def _end() -> None:
    for child in _running:
        child.kill()
        child.close()
