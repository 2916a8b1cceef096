"""Compiling a lowered program, and what the compiler says about it."""

from __future__ import annotations

import re
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from rhino_jax._compat import compiling_anew, parameter_axes
from rhino_jax.apply.lowering import Lowered
from rhino_jax.hardware.compile_only import TpuLog, compiler_options
from rhino_jax.streams import captured_stderr, write_stderr
from rhino_jax.verify.hlo.records import Compilation, MemoryUse, OutOfMemory


# XLA:TPU, whose figure is of all buffers, arguments too, in spite of its name:
# "the total memory required for HLO temporaries (24.00G) exceeds available HBM
# (15.75G)"; on standard error, and before libtpu numbered its errors: "Used 24.00G of
# 15.75G hbm."
_SIZE = r"[\d.]+[KMGTP]?"
_NEEDED_OF_AVAILABLE = re.compile(
    rf"\((?P<needed>{_SIZE})\) exceeds available HBM \((?P<available>{_SIZE})\)"
    rf"|Used (?P<used>{_SIZE}) of (?P<of>{_SIZE}) hbm"
)
# Where a device is here and holds too much already, as constants are placed.
_ALLOCATION = re.compile(r"[Oo]ut of memory .*?allocat\w+ (?P<bytes>\d+) bytes")
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40, "P": 2**50}
_TOLD_ELSEWHERE = re.compile(r"rematerialization", re.IGNORECASE)
_MESSAGE_LINES = 4


def compile_lowered(lowered: Lowered | jax.stages.Lowered, *, mesh: Any) -> Compilation:
    """Compile in this process; a program that does not fit is a result, not an error.

    What the compiler writes to standard error, and libtpu to its log, is kept as
    `messages`. Standard error is held back meanwhile and passed on then, but for
    what is reported as a result: lack of memory, and lines on rematerialisation. No
    cache is used, because programs come out of one without messages. There are none
    either where warnings are silenced: TF_CPP_MIN_LOG_LEVEL above 1 and, on TPU,
    TPU_MIN_LOG_LEVEL above 1 or TPU_LOG_DIR=disabled.

    XLA:TPU alone refuses a program that does not fit. For GPU and CPU compare
    `memory.peak_bytes` with what the hardware has.

    Args:
      lowered: of `jax.jit`, or of a function that rhino sharded.
      mesh: the mesh that it was lowered for; may be compile-only.
    Raises:
      jax.errors.JaxRuntimeError: the compiler fails for any other reason.
    """
    inner = lowered.lowered if isinstance(lowered, Lowered) else lowered
    platform = _platform(mesh)
    tpu_log, start = TpuLog(), time.perf_counter()
    compiled, out_of_memory = None, None
    with captured_stderr() as written, compiling_anew() as options:
        try:
            options = {**options, **compiler_options(mesh)}
            compiled = inner.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            out_of_memory = read_out_of_memory(str(error))
            if out_of_memory is None:
                raise
    seconds = time.perf_counter() - start
    lines = written.text.splitlines(keepends=True)
    if out_of_memory is None:
        write_stderr("".join(x for x in lines if not _TOLD_ELSEWHERE.search(x)))
    if platform == "tpu":
        logged = tpu_log.read().splitlines(keepends=True)
        lines += [line for line in logged if line not in lines]
    hlo_text, memory = "", None
    if compiled is not None:
        hlo_text = _text_of(compiled, inner, options, platform)
        memory = memory_use(compiled.memory_analysis(), platform)
    return Compilation(
        platform=platform,
        hlo_text=hlo_text,
        memory=memory,
        out_of_memory=out_of_memory,
        messages="".join(lines),
        seconds=seconds,
        parameter_axes=() if compiled is None else parameter_axes(compiled),
    )


def _text_of(
    compiled: jax.stages.Compiled,
    lowered: jax.stages.Lowered,
    options: dict[str, Any],
    platform: str,
) -> str:
    """The compiled program as text.

    JAX 0.10.2 cannot print some programs of libtpu 0.0.51 ("async-update instruction
    should have 1 operands but sees 3"): libtpu itself then has to, in a second run.
    """
    try:
        return compiled.as_text() or ""
    except jax.errors.JaxRuntimeError:
        if platform != "tpu":
            raise
    with tempfile.TemporaryDirectory() as folder, captured_stderr(), compiling_anew():
        dumping: dict[str, Any] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        lowered.compile(compiler_options={**options, **dumping})
        modules = [p.read_text() for p in Path(folder).glob("*.after_codegen.txt")]
    return max(modules, key=len, default="")


def _platform(mesh: Any) -> str:
    platform = str(mesh.devices.flat[0].platform)
    return "gpu" if platform in ("cuda", "rocm") else platform


def memory_use(stats: Any, platform: str) -> MemoryUse:
    """The compiler's `CompiledMemoryStats` as a record.

    XLA:CPU (0.10.2 to 0.12) leaves temporaries out of its peak. It allocates them as
    one block that is held for the whole run, so there the peak is the sum of all.
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
    """What a compiler's error says about device memory; None if it is another.

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
        # On-chip memory, as of a Pallas kernel: no other sharding would help.
        return None
    lines = message.strip().splitlines()[:_MESSAGE_LINES]
    return OutOfMemory(
        needed_bytes=needed, available_bytes=available, message="\n".join(lines)
    )


def _bytes(text: str) -> int:
    unit = text[-1] if text[-1] in _UNITS else ""
    return round(float(text.removesuffix(unit)) * _UNITS[unit])
