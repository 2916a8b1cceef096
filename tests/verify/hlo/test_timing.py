"""Seconds of instructions and of steps on made-up hardware."""

from __future__ import annotations

import pytest

from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import AxisLink, Device, Target
from rhino_jax.verify.hlo.module import parse_module
from rhino_jax.verify.hlo.reading import step_time, work_s
from rhino_jax.verify.hlo.work import InstructionWork


def _target(clock_hz: float | None = None, launch_s: float = 0.0) -> Target:
    return Target(
        name="made-up",
        device=Device(
            peak_flops_per_s=(("float32", 100.0), ("bfloat16", 200.0)),
            matmul_efficiency=0.5,
            hbm_bytes=1000,
            hbm_bytes_per_s=10.0,
            memory_efficiency=0.5,
            launch_s=launch_s,
            clock_hz=clock_hz,
        ),
        links=(("x", AxisLink(alpha_s=0.0, bytes_per_s=1.0)),),
    )


def _work(flops: int, size: int, cycles: int | None = None) -> InstructionWork:
    return InstructionWork(
        name="f",
        opcode="fusion",
        count=1,
        flops=flops,
        dtype="bfloat16",
        bytes=size,
        cycles=cycles,
        op="",
        source="",
    )


@pytest.mark.parametrize(
    ("work", "seconds"),
    [
        (_work(1000, 5), 1000 / 100 + 2),
        (_work(1000, 500), 500 / 5 + 2),
        (_work(0, 5), 5 / 5 + 2),
        # Without a clock cycles say nothing.
        (_work(1000, 5, cycles=7), 1000 / 100 + 2),
    ],
)
def test_the_roofline_and_a_launch(work: InstructionWork, seconds: float) -> None:
    assert work_s(_target(launch_s=2.0), work) == pytest.approx(seconds)


def test_cycles_over_the_clock() -> None:
    target = _target(clock_hz=4.0)
    assert work_s(target, _work(1000, 500, cycles=8)) == 2.0
    assert work_s(target, _work(1000, 5)) == pytest.approx(10.0)


CYCLES = """HloModule m, is_scheduled=true
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%x), backend_config={"estimated_cycles":"40"}
}
"""


@pytest.mark.parametrize(("clock_hz", "compute_s"), [(None, 32 / 5), (4.0, 10.0)])
def test_a_scheduled_program_is_played(clock_hz: float, compute_s: float) -> None:
    text = CYCLES.replace(
        "  ROOT %n = f32[4]{0} negate(%x)",
        "  %g = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add\n"
        "  ROOT %n = f32[4]{0} negate(%g)",
    )
    target = _target(clock_hz=clock_hz)
    _, time = step_time(parse_module(text), target, lambda c, i: 3.0)
    assert time.compute_s == pytest.approx(compute_s)
    assert time.communication_s == pytest.approx(3.0)


@pytest.mark.parametrize("name", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_clocks_of_tpus_fit_their_peaks(name: str) -> None:
    target = load_target(name)
    assert target.device.clock_hz is not None
    # All MXUs of a device: 4 to 16 of 128 x 128, or as much in larger ones.
    per_cycle = target.peak_flops_per_s("bfloat16") / target.device.clock_hz
    arrays = per_cycle / (2 * 128 * 128)
    assert min(abs(arrays / n - 1) for n in (4, 8, 16)) < 0.005


@pytest.mark.parametrize("name", ["a100", "h100", "b200", "cpu"])
def test_others_have_no_clock(name: str) -> None:
    assert load_target(name).device.clock_hz is None
