"""Everything read of a compiled program, end to end."""

from __future__ import annotations

import gzip
import math
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhino_jax.cost.collectives import collective_s
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import lay_out
from rhino_jax.verify.hlo.reading import read_compiled
from rhino_jax.verify.hlo.records import Compilation, MemoryUse, OutOfMemory


HLO = Path(__file__).parent
AXES = (("x", 8),)
MEMORY = MemoryUse(
    argument_bytes=10, output_bytes=20, alias_bytes=0, temp_bytes=5, peak_bytes=33
)


def _compilation(text: str, platform: str = "cpu", messages: str = "") -> Compilation:
    return Compilation(
        platform=platform,
        hlo_text=text,
        memory=MEMORY,
        out_of_memory=None,
        messages=messages,
        seconds=1.0,
    )


def _recorded(name: str) -> Compilation:
    return _compilation((HLO / f"{name}.hlo").read_text())


def test_a_tpu_program() -> None:
    target = load_target("v5e:2x4")
    reading = read_compiled(_recorded("work_tpu_scans"), AXES, target)
    assert reading.compiled.flops_per_device == 12 * 2 * 128 * 512 * 512
    assert reading.compiled.peak_bytes == 33
    assert reading.compiled.step_time_s == pytest.approx(15872 / 1.5e9, rel=0.05)
    assert reading.collectives == ()
    assert reading.notes == ()


def test_a_windowed_einsum_exposes_no_more_than_what_it_sends() -> None:
    """Its permutes are simulated at the rate at which the whole is priced."""
    path = HLO / "sequence_parallel.v5e-2x4.1x8.jax-0.10.2.hlo.gz"
    text = gzip.decompress(path.read_bytes()).decode()
    target = load_target("v5e:2x4")
    reading = read_compiled(_compilation(text, "tpu"), (("x", 1), ("y", 8)), target)
    assert any("windowed loop" in c.reason for c in reading.collectives)
    sent_s = sum(c.seconds for c in reading.collectives)
    assert 0 < reading.compiled.communication_s < sent_s


def test_a_sum_of_gradients_is_priced_by_its_links() -> None:
    target = load_target("v5e:2x4")
    reading = read_compiled(_recorded("work_tpu_embedding"), AXES, target)
    (reduced,) = reading.collectives
    assert (reduced.kind, reduced.axes, reduced.is_async) == (
        "all-reduce",
        ("x",),
        False,
    )
    local_bytes = 4 * (32000 * 512 + 512 * 512)
    assert reduced.bytes == round(2 * 7 / 8 * local_bytes)
    expected_s = collective_s("all-reduce", local_bytes, lay_out(target, AXES).axes)
    assert reduced.seconds == pytest.approx(expected_s)
    compiled = reading.compiled
    assert compiled.communication_s == pytest.approx(expected_s)
    assert compiled.step_time_s == compiled.compute_s + compiled.communication_s


def test_cycles_without_a_clock_are_noted() -> None:
    target = replace(load_target("v5e:2x4"), name="mine")
    target = target.replace(clock_hz=None)
    reading = read_compiled(_recorded("work_tpu_scans"), AXES, target)
    (note,) = reading.notes
    assert note == (
        "The compiler estimates cycles, but 'mine' has no `clock_hz`: seconds are"
        " those of the roofline."
    )
    assert 0 < reading.compiled.compute_s < 1e-3


@pytest.mark.parametrize(
    ("needed_bytes", "available_bytes", "peak_bytes"),
    [
        (20 * 2**30, 15 * 2**30, 20 * 2**30),
        (None, None, load_target("v5e").device.hbm_bytes + 1),
        (None, 2**40, 2**40 + 1),
    ],
)
def test_out_of_memory(
    needed_bytes: int | None, available_bytes: int | None, peak_bytes: int
) -> None:
    out = OutOfMemory(
        needed_bytes=needed_bytes, available_bytes=available_bytes, message="too big"
    )
    compilation = Compilation(
        platform="tpu",
        hlo_text="",
        memory=None,
        out_of_memory=out,
        messages="",
        seconds=1.0,
    )
    reading = read_compiled(compilation, AXES, load_target("v5e:2x4"))
    assert reading.compiled.peak_bytes == peak_bytes
    assert reading.compiled.step_time_s == math.inf
    assert reading.collectives == ()


OPERATION = (
    "%copy.7 = f32[16,8]{1,0} copy(%dot), sharding={devices=[2,4]<=[8]},"
    ' metadata={op_name="jit(step)/mul" source_file="a.py" source_line=7}'
)
LINE = (
    "[SPMD] Involuntary full rematerialization. The compiler cannot go from sharding"
    " {devices=[2,4]<=[8]} to {devices=[8,1]<=[8]} efficiently for HLO operation"
    f" {OPERATION}. As the last resort, SPMD will replicate the tensor and then"
    " partition it to obtain the target sharding, which is inefficient."
)


def test_rematerialisations_count_once_each() -> None:
    other = LINE.replace("copy.7", "copy.8")
    stamp = "W1121 06:00:00.000000    1 spmd_partitioner.cc:630] "
    messages = f"{stamp}{LINE}\nI other\n{stamp}{LINE}\nE1121 {other}\n"
    text = (HLO / "work_tpu_scans.hlo").read_text()
    reading = read_compiled(
        _compilation(text, messages=messages), AXES, load_target("v5e:2x4")
    )
    first, second = reading.rematerialised
    assert first.startswith("The compiler cannot go from sharding {devices=[2,4]")
    assert first.endswith("source_line=7}.")
    assert "copy.8" in second


def test_a_program_compiled_here() -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("x",))
    cut = NamedSharding(mesh, PartitionSpec(None, "x"))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct((64, 512), jnp.float32, sharding=cut)
    w = jax.ShapeDtypeStruct((512, 128), jnp.float32, sharding=rows)
    compiled = jax.jit(jnp.matmul, out_shardings=whole).lower(x, w).compile()
    target = load_target("cpu")
    reading = read_compiled(_compilation(compiled.as_text() or ""), AXES, target)
    assert reading.compiled.flops_per_device == 2 * 64 * 64 * 128
    (summed,) = reading.collectives
    expected_s = collective_s("all-reduce", 64 * 128 * 4, lay_out(target, AXES).axes)
    assert (summed.kind, summed.count) == ("all-reduce", 1)
    assert summed.seconds == pytest.approx(expected_s)
    assert reading.compiled.communication_s == pytest.approx(expected_s)
    # At least the dot: its operands, its result, and a launch.
    traffic_bytes = 4 * (64 * 64 + 64 * 128 + 64 * 128)
    least_s = target.device.launch_s + traffic_bytes / (
        target.device.hbm_bytes_per_s * target.device.memory_efficiency
    )
    assert least_s <= reading.compiled.compute_s < 5 * least_s
