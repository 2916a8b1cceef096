"""Compile a lowered program and collect the compiler's messages and memory use."""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from rhino_jax._compat import (
    CompiledInput,
    compiler_input,
    compiling_anew,
    parameter_axes,
)
from rhino_jax.hardware.compile_only import TpuLog, compiler_options, origin_of
from rhino_jax.runtime.lowering import Lowered
from rhino_jax.utils.progress import Progress
from rhino_jax.utils.stderr import captured_stderr, real_stderr, write_stderr
from rhino_jax.verify.hlo.records import Compilation, MemoryUse, OutOfMemory
from rhino_jax.verify.in_child import (
    NO_LIMIT,
    USUAL_COMPILE_TIME,
    CompileLimit,
    CompilerTask,
    compile_in_child,
)


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
            if out_of_memory is None:
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
    """
    argument_bytes = int(stats.argument_size_in_bytes)
    output_bytes = int(stats.output_size_in_bytes)
    alias_bytes = int(stats.alias_size_in_bytes)
    temp_bytes = int(stats.temp_size_in_bytes)
    peak_bytes = int(stats.peak_memory_in_bytes)
    if platform == "cpu":
        peak_bytes = argument_bytes + output_bytes - alias_bytes + temp_bytes
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
