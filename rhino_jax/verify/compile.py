"""Compile a lowered program and collect the compiler's messages and memory use.

Compile-only devices are compiled for in a worker, so that a compiler that aborts does
not end a notebook."""

from __future__ import annotations

import atexit
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from rhino_jax._compat import (
    CompiledInput,
    compiler_input,
    compiling_anew,
    parameter_axes,
)
from rhino_jax.errors import CompilerError
from rhino_jax.hardware.compile_only import (
    DeviceCall,
    TpuLog,
    compiler_options,
    origin_of,
)
from rhino_jax.runtime.bound import Lowered
from rhino_jax.utils.keywords import read_seconds
from rhino_jax.utils.progress import Progress
from rhino_jax.utils.stderr import captured_stderr, real_stderr, write_stderr
from rhino_jax.utils.worker import TaskFailed, Worker, WorkerEnded, WorkerTimeout
from rhino_jax.verify.hlo.records import Compilation, MemoryUse, OutOfMemory


# XLA:TPU. In spite of its wording, the figure is of all buffers, arguments included:
# "the total memory required for HLO temporaries (24.00G) exceeds available HBM
# (15.75G)"; on standard error, and before libtpu numbered its errors: "Used 24.00G of
# 15.75G hbm."
_SIZE = r"[\d.]+[KMGTP]?"
_NEEDED_OF_AVAILABLE = re.compile(
    rf"\((?P<needed>{_SIZE})\) exceeds available HBM \((?P<available>{_SIZE})\)"
    rf"|Used (?P<used>{_SIZE}) of (?P<of>{_SIZE}) hbm"
)
# Where a real device runs out of memory as constants are placed on it.
_ALLOCATION = re.compile(r"[Oo]ut of memory .*?allocat\w+ (?P<bytes>\d+) bytes")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_TOLD_ELSEWHERE = re.compile(r"rematerialization", re.IGNORECASE)
_MESSAGE_LINES = 4


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


def compile_lowered(
    lowered: Lowered | jax.stages.Lowered,
    *,
    mesh: Any,
    limit: CompileLimit = NO_LIMIT,
) -> Compilation:
    """Compile a program; running out of memory is a result, not an error.

    Args:
      lowered: a lowered program, of `jax.jit` or of a function that rhino sharded.
      mesh: the mesh that it was lowered for. Where its devices are compile-only ones of
        `rhino_jax.hardware.compile_only`, a child process compiles.
      limit: how long a child process may compile; compiling in this process is not
        interrupted.
    Raises:
      jax.errors.JaxRuntimeError: the compiler fails for any other reason.
      CompilerError: the compiler aborted that child process, or the time is over.
    """
    inner = lowered.lowered if isinstance(lowered, Lowered) else lowered
    platform, origin = _platform(mesh), origin_of(mesh)
    with compiling_anew() as new:
        options = {**new, **compiler_options(mesh)}
        given = None if origin is None else compiler_input(inner, options)
        doing = _doing(_name(lowered), mesh, platform, is_here=origin is None)
        if origin is None or given is None:
            with (
                real_stderr() as stream,
                Progress(doing=doing, stream=stream).ticking(),
            ):
                found, told = compiled_by(
                    lambda more: inner.compile(compiler_options={**options, **more}),
                    platform,
                )
        else:
            task = CompilerTask(
                _name(lowered),
                *given,
                origin,
                tuple(device.id for device in mesh.devices.flat),
                platform,
            )
            with Progress(doing=doing).ticking():
                found, told = compile_in_child(task, limit)
    write_stderr(told)
    return replace(found, parameter_axes=parameter_axes(inner))


def compile_task(task: CompilerTask) -> tuple[Compilation, str]:
    """Compile a task of `compile_in_child`; runs in the worker."""
    by_id = {device.id: device for device in task.origin.devices()}
    devices = [by_id[i] for i in task.device_ids]
    return compiled_by(
        lambda more: CompiledInput(task.module, task.options, devices, more),
        task.platform,
    )


_NO_TILES = "Couldn't find output tile sizes"
"""XLA:GPU's error where the tiling that it gives a product of matrices without a card
to time tilings on does not divide what is fused with it, such as windows of 7 x 7."""


def compiled_by(
    compile: Callable[[Mapping[str, Any]], Any], platform: str
) -> tuple[Compilation, str]:
    """Compile in this process, and return the compilation with its messages.

    What the compiler writes to standard error, and libtpu to its log, becomes
    `messages`; standard error is captured meanwhile. No compilation cache may be used:
    programs from a cache come without messages. There are no messages either where
    warnings are silenced: TF_CPP_MIN_LOG_LEVEL above 1 and, on TPU, TPU_MIN_LOG_LEVEL
    above 1 or TPU_LOG_DIR=disabled.

    Only XLA:TPU refuses a program that does not fit. For GPU and CPU compare
    `memory.peak_bytes` with the hardware's memory.

    Args:
      compile: compiles with further XLA options; the result has `as_text` and
        `memory_analysis`, as `jax.stages.Compiled`.
      platform: "cpu", "tpu" or "gpu".
    Returns:
      The compilation, and the part of standard error that the user should see: all but
        what is reported as a result (out-of-memory errors and messages on
        rematerialisation).
    Raises:
      jax.errors.JaxRuntimeError: the compiler fails for another reason than memory.
    """
    tpu_log, start = TpuLog(), time.perf_counter()
    compiled, out_of_memory, told = None, None, ""
    with captured_stderr() as written:
        try:
            compiled = compile({})
        except jax.errors.JaxRuntimeError as error:
            out_of_memory = read_out_of_memory(str(error))
            if _NO_TILES in str(error):
                compiled = compile({"xla_gpu_enable_triton_gemm": False})
            elif out_of_memory is None:
                raise
    seconds = time.perf_counter() - start
    lines = written.text.splitlines(keepends=True)
    if out_of_memory is None:
        told = "".join(x for x in lines if not _TOLD_ELSEWHERE.search(x))
    if platform == "tpu":
        logged = tpu_log.read().splitlines(keepends=True)
        lines += [line for line in logged if line not in lines]
    hlo_text, memory = "", None
    if compiled is not None:
        hlo_text = _text_of(compiled, compile, platform)
        memory = memory_use(compiled.memory_analysis(), platform)
    compilation = Compilation(
        platform=platform,
        hlo_text=hlo_text,
        memory=memory,
        out_of_memory=out_of_memory,
        messages="".join(lines),
        seconds=seconds,
    )
    return compilation, told


def _text_of(
    compiled: Any, compile: Callable[[Mapping[str, Any]], Any], platform: str
) -> str:
    """Return the text of the compiled program.

    JAX 0.10.2 cannot print some programs of libtpu 0.0.51 ("async-update instruction
    should have 1 operands but sees 3"): they are compiled a second time, with libtpu
    dumping the text.
    """
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        if platform != "tpu":
            raise
    with tempfile.TemporaryDirectory() as folder, captured_stderr():
        with compiling_anew() as new:
            dumping = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
            compile({**new, **dumping})
        modules = [p.read_text() for p in Path(folder).glob("*.after_codegen.txt")]
    return max(modules, key=len, default="")


def _name(lowered: Lowered | jax.stages.Lowered) -> str:
    if isinstance(lowered, Lowered):
        return f"`{lowered.bound.traced.name}`"
    return "the program"


def _doing(name: str, mesh: Any, platform: str, *, is_here: bool) -> str:
    """Return what is compiled, for how many of which devices, and the usual time."""
    kind = mesh.devices.flat[0].device_kind
    usual = "" if is_here else f", usually {USUAL_COMPILE_TIME[platform]}"
    return f"compiling {name} for {mesh.devices.size} × {kind}{usual}"


def _platform(mesh: Any) -> str:
    platform = str(mesh.devices.flat[0].platform)
    return "gpu" if platform in ("cuda", "rocm") else platform


def memory_use(stats: Any, platform: str) -> MemoryUse:
    """Convert the compiler's `CompiledMemoryStats` to a record.

    XLA:CPU (0.10.2 to 0.12) leaves temporaries out of its peak. It allocates them as
    one block that is live for the whole run, so there the peak is the sum of all.
    XLA:TPU counts what is in on-chip memory in its peak, but not in its temporaries, so
    that the sum is a bound there (HLO of look-ups, v5e, libtpu 0.0.52).
    """
    argument_bytes = int(stats.argument_size_in_bytes)
    output_bytes = int(stats.output_size_in_bytes)
    alias_bytes = int(stats.alias_size_in_bytes)
    temp_bytes = int(stats.temp_size_in_bytes)
    peak_bytes = argument_bytes + output_bytes - alias_bytes + temp_bytes
    if platform != "cpu":
        peak_bytes = min(peak_bytes, int(stats.peak_memory_in_bytes))
    return MemoryUse(
        argument_bytes=argument_bytes,
        output_bytes=output_bytes,
        alias_bytes=alias_bytes,
        temp_bytes=temp_bytes,
        peak_bytes=peak_bytes,
    )


def read_out_of_memory(message: str) -> OutOfMemory | None:
    """Parse a compiler's out-of-memory error; None for any other error.

    Args:
      message: text of a `jax.errors.JaxRuntimeError`.
    """
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    needed, available = None, None
    if (found := _NEEDED_OF_AVAILABLE.search(message)) is not None:
        needed = _bytes(found["needed"] or found["used"])
        available = _bytes(found["available"] or found["of"])
    elif (found := _ALLOCATION.search(message)) is not None:
        needed = int(found["bytes"])
    elif not re.search(r"HbmOom|\bhbm\b|\bHBM\b", message):
        # On-chip memory, as in a Pallas kernel: no other sharding would help.
        return None
    lines = message.strip().splitlines()[:_MESSAGE_LINES]
    return OutOfMemory(
        needed_bytes=needed, available_bytes=available, message="\n".join(lines)
    )


def _bytes(text: str) -> int:
    unit = text[-1] if text[-1] in _UNITS else ""
    return round(float(text.removesuffix(unit)) * _UNITS[unit])


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
