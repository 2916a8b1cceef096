"""Compiling a lowered program: text, memory, messages, and programs too large."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import CompilerError
from rhino_jax.utils.stderr import captured_stderr, write_stderr
from rhino_jax.verify.compile import (
    CompileLimit,
    compile_in_child,
    compile_lowered,
    compiled_by,
    memory_use,
    read_out_of_memory,
)
from rhino_jax.verify.hlo.records import OutOfMemory
from tests.verify.extras import mesh_of_target


ROWS, WIDTH = 4096, 512
MESH = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))


def _scan(w: jax.Array, x: jax.Array) -> jax.Array:
    """Eight products, whose inputs are all held for the gradient."""

    def loss(w: jax.Array) -> jax.Array:
        out, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=8)
        return jnp.sum(out)

    return w + jax.grad(loss)(w)


def _lower(mesh: Mesh, rows: int, width: int, **options: Any) -> jax.stages.Lowered:
    axes = mesh.axis_names
    w = jax.ShapeDtypeStruct(
        (width, width), jnp.float32, sharding=NamedSharding(mesh, P())
    )
    x = jax.ShapeDtypeStruct(
        (rows, width), jnp.float32, sharding=NamedSharding(mesh, P(axes))
    )
    return jax.jit(_scan, **options).lower(w, x)


def test_memory_on_the_chip_is_not_in_peaks() -> None:
    stats = SimpleNamespace(
        argument_size_in_bytes=40, output_size_in_bytes=20, alias_size_in_bytes=10,
        temp_size_in_bytes=30, peak_memory_in_bytes=100,
    )  # fmt: skip
    assert memory_use(stats, "tpu").peak_bytes == 80
    stats.peak_memory_in_bytes = 70
    assert memory_use(stats, "tpu").peak_bytes == 70


def test_memory_of_a_program_on_cpu() -> None:
    found = compile_lowered(_lower(MESH, ROWS, WIDTH, donate_argnums=0), mesh=MESH)
    memory = found.memory
    assert memory is not None and found.out_of_memory is None
    weight, rows = 4 * WIDTH**2, 4 * ROWS * WIDTH // 8
    assert memory.argument_bytes == weight + rows
    assert memory.output_bytes == memory.alias_bytes == weight
    # All that the gradient needs is held at once, and counts.
    assert memory.temp_bytes >= 8 * rows
    assert memory.peak_bytes == memory.argument_bytes + memory.temp_bytes
    assert found.platform == "cpu" and found.seconds > 0
    assert "num_partitions=8" in found.hlo_text and "all-reduce" in found.hlo_text


def test_what_rhino_lowered_compiles_too() -> None:
    @rhino.auto_shard(mesh=MESH, progress=False)
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x)

    lowered = step.lower(jax.ShapeDtypeStruct((64, 8), jnp.float32))
    found = compile_lowered(lowered, mesh=MESH)
    assert found.memory is not None and found.memory.argument_bytes == 64 * 8 * 4 // 8


class _Speaking:
    """A lowered program whose compiler says something, and may fail."""

    def __init__(self, words: str, error: str = "") -> None:
        self.words, self.error = words, error

    def compile(self, compiler_options: Any = None) -> Any:
        write_stderr(self.words)
        if self.error:
            raise jax.errors.JaxRuntimeError(self.error)
        names = (
            "argument_size",
            "output_size",
            "alias_size",
            "temp_size",
            "peak_memory",
        )
        stats = SimpleNamespace(**{f"{name}_in_bytes": 0 for name in names})
        return SimpleNamespace(
            as_text=lambda: "HloModule", memory_analysis=lambda: stats
        )


REMAT = "W1 spmd_partitioner.cc:675] [SPMD] Involuntary full rematerialization.\n"


def test_messages_are_kept_and_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    lowered: Any = _Speaking(f"before\n{REMAT}after\n")
    found = compile_lowered(lowered, mesh=MESH)
    assert found.messages == f"before\n{REMAT}after\n"
    # What is reported with its cause is not told twice.
    assert capfd.readouterr().err == "before\nafter\n"


def test_other_errors_are_raised_with_what_was_said(
    capfd: pytest.CaptureFixture[str],
) -> None:
    lowered: Any = _Speaking("the reason\n", error="INTERNAL: it broke")
    with pytest.raises(jax.errors.JaxRuntimeError, match="it broke"):
        compile_lowered(lowered, mesh=MESH)
    assert capfd.readouterr().err == "the reason\n"


def test_a_program_that_does_not_fit_is_a_result(
    capfd: pytest.CaptureFixture[str],
) -> None:
    error = "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: … (24.00G) exceeds available"
    lowered: Any = _Speaking("report\n", error=f"{error} HBM (15.75G). HLO module: f.")
    found = compile_lowered(lowered, mesh=MESH)
    assert found.memory is None and found.hlo_text == ""
    assert found.out_of_memory is not None
    assert found.out_of_memory.needed_bytes == 24 * 2**30
    assert found.messages == "report\n" and capfd.readouterr().err == ""


GIB = 2**30


@pytest.mark.parametrize(
    ("message", "needed", "available"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM,"
            " the total memory required for HLO temporaries (65.50G) exceeds available"
            " HBM (15.75G). HLO module: jit_f.",
            65.5 * GIB,
            15.75 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in"
            " memory space hbm. Used 1.50T of 95.74G hbm. Exceeded hbm capacity by 1T.",
            1.5 * 1024 * GIB,
            95.74 * GIB,
        ),
        (
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824"
            " bytes.",
            GIB,
            None,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm.", None, None),
    ],
)
def test_forms_of_out_of_memory(
    message: str, needed: float | None, available: float | None
) -> None:
    found = read_out_of_memory(message)
    assert found == OutOfMemory(
        needed_bytes=None if needed is None else round(needed),
        available_bytes=None if available is None else round(available),
        message=message,
    )


@pytest.mark.parametrize(
    "message",
    [
        "INTERNAL: Ran out of patience with HBM",
        "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in"
        " memory space vmem. Used 20M of 16M vmem.",
        "RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 300000",
    ],
)
def test_other_errors_are_no_lack_of_device_memory(message: str) -> None:
    assert read_out_of_memory(message) is None


def test_gpu_products_without_a_tiling_are_compiled_by_a_library() -> None:
    """Attention in windows of 7 x 7 on h100, in any layout, plain `jax.jit` too."""
    lowered, tried = _lower(MESH, ROWS, WIDTH), []

    def compile(more: Any) -> Any:
        tried.append(dict(more))
        if not more:
            raise jax.errors.JaxRuntimeError(
                "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.7"
            )
        return lowered.compile()

    found, _ = compiled_by(compile, "gpu")
    assert tried == [{}, {"xla_gpu_enable_triton_gemm": False}]
    assert found.memory is not None


def test_capture_is_undone_by_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), captured_stderr() as captured:
        write_stderr("first\n")
        raise KeyError
    os.write(2, b"second\n")
    assert captured.text == "first\n"
    assert capfd.readouterr().err == "first\nsecond\n"


@pytest.fixture
def compilation_cache(tmp_path: Path) -> Iterator[Path]:
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize(
    "hardware",
    [
        "cpu",
        pytest.param("v5e:2x4", marks=pytest.mark.compile_only),
        pytest.param("h100:2x4", marks=pytest.mark.compile_only),
    ],
)
def test_rematerialisations_are_heard_of_every_time(
    hardware: str, compilation_cache: Path
) -> None:
    """Every compiler tells on standard error, and again where a cache would not."""
    axes = {"x": 4, "y": 2}
    if hardware == "cpu":
        mesh = jax.make_mesh((4, 2), tuple(axes), axis_types=(AxisType.Auto,) * 2)
    else:
        mesh = mesh_of_target(hardware, axes)

    def turn(x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("x", "y", None)))
        x = jnp.sin(x)
        last = NamedSharding(mesh, P(None, None, ("y", "x")))
        return jax.lax.with_sharding_constraint(x, last) + 1

    x = jax.ShapeDtypeStruct(
        (64, 64, 64), jnp.float32, sharding=NamedSharding(mesh, P())
    )
    for _ in range(2):
        found = compile_lowered(jax.jit(turn).lower(x), mesh=mesh)
        assert found.messages.count("Involuntary full rematerialization") == 1
    assert not list(compilation_cache.glob("*turn*"))


@pytest.mark.compile_only
@pytest.mark.parametrize("hardware", ["v5e:2x2", "v5p:2x2x1", "h100:1x4"])
def test_memory_of_a_program_that_is_compiled_only(hardware: str) -> None:
    mesh = mesh_of_target(hardware)
    # On-chip memory, which is not in peaks, does not hold them.
    many = 64 * ROWS
    found = compile_lowered(_lower(mesh, many, WIDTH, donate_argnums=0), mesh=mesh)
    memory = found.memory
    assert memory is not None
    weight, rows = 4 * WIDTH**2, 4 * many * WIDTH // 4
    assert memory.argument_bytes == weight + rows
    assert memory.alias_bytes == weight
    assert memory.peak_bytes >= memory.argument_bytes + 4 * rows
    assert found.platform == ("gpu" if hardware.startswith("h") else "tpu")


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("hardware", "rows", "gib"), [("v5e:2x2", 2**21, 15.75), ("v5p:1x1x1", 2**21, 95.7)]
)
def test_tpu_programs_that_do_not_fit(hardware: str, rows: int, gib: float) -> None:
    mesh = mesh_of_target(hardware)
    found = compile_lowered(_lower(mesh, rows, 4096), mesh=mesh)
    assert found.memory is None
    error = found.out_of_memory
    assert error is not None and "HBM" in error.message
    assert error.available_bytes == pytest.approx(gib * GIB, rel=1e-3)
    # At least x and the eight inputs of the products.
    held = 9 * 4 * rows * 4096 // mesh.size
    assert error.needed_bytes is not None and error.needed_bytes >= held


@pytest.mark.compile_only
def test_gpu_programs_that_do_not_fit_compile_nonetheless() -> None:
    mesh = mesh_of_target("h100:1x1")
    found = compile_lowered(_lower(mesh, 2**20, 4096), mesh=mesh)
    assert found.out_of_memory is None
    assert found.memory is not None and found.memory.peak_bytes > 100 * GIB


class Fatal:
    """A task that ends the process that reads it."""

    name, platform, device_ids = "`step`", "tpu", (0, 1)

    def __reduce__(self) -> Any:
        return os._exit, (7,)


def test_a_process_that_ends_is_an_error_and_the_next_is_another() -> None:
    for _ in range(2):
        with pytest.raises(CompilerError, match="while it compiled `step`") as caught:
            compile_in_child(Fatal())  # type: ignore[arg-type]
        assert "exit status 7" in caught.value.numbers
        assert caught.value.where and caught.value.fix


class Endless(Fatal):
    """A task that takes a minute to read."""

    def __reduce__(self) -> Any:
        return time.sleep, (60,)


def test_a_process_is_ended_when_the_time_is_over() -> None:
    limit, begun = CompileLimit.of("`plan.verify`", "0.2 s"), time.monotonic()
    with pytest.raises(CompilerError, match="still compiling `step`") as caught:
        compile_in_child(Endless(), limit)  # type: ignore[arg-type]
    assert time.monotonic() - begun < 30
    error = caught.value
    assert "time_limit_s=" in error.where and error.numbers.startswith("0.2 s")
    assert "more time" in error.fix


@pytest.mark.slow
@pytest.mark.compile_only
@pytest.mark.skipif(jax.__version_info__ > (0, 12, 1), reason="XLA may not abort")
def test_an_abort_of_xla_has_its_last_words() -> None:
    """A grouped convolution, on which the partitioner fails (jax 0.10.2 to 0.12)."""
    mesh = mesh_of_target("h100:8", {"a": 2, "b": 4})

    def gradient(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            y = jax.lax.conv_general_dilated(
                x,
                w,
                (1,),
                "SAME",
                feature_group_count=2,
                dimension_numbers=("NWC", "WIO", "NWC"),
            )
            return jnp.sum(jnp.sin(y))

        return jax.grad(loss)(w)

    def compiled(w_spec: P, x_spec: P) -> Any:
        w, x = (
            jax.ShapeDtypeStruct(s, "float32", sharding=NamedSharding(mesh, spec))
            for s, spec in (((5, 4, 16), w_spec), ((1, 8, 8), x_spec))
        )
        return compile_lowered(jax.jit(gradient).lower(w, x), mesh=mesh)

    with pytest.raises(CompilerError, match="Check failed"):
        compiled(P(None, None, "b"), P(None, "a"))
    assert "HloModule" in compiled(P(), P()).hlo_text


@pytest.mark.compile_only
def test_programs_that_call_back_are_compiled_here() -> None:
    mesh = mesh_of_target("v5e:2x4", {"x": 8})

    def printing(x: Any) -> Any:
        jax.debug.print("{}", x[0])
        return x * 2

    whole = NamedSharding(mesh, P())
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=whole)
    found = compile_lowered(jax.jit(printing).lower(x), mesh=mesh)
    assert "HloModule" in found.hlo_text
