"""Seconds of instructions and of steps on made-up hardware."""

from __future__ import annotations

import pytest

from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import AxisLink, Device, Target
from rhino_jax.verify.hlo.module import Computation, Instruction, parse_module
from rhino_jax.verify.hlo.reading import step_time, work_s
from rhino_jax.verify.hlo.records import CompiledCollective
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


def _collective(seconds: float, *, is_async: bool) -> CompiledCollective:
    return CompiledCollective(
        kind="all-gather",
        axes=("x",),
        bytes=1,
        count=1,
        seconds=seconds,
        op="",
        source="",
        is_async=is_async,
    )


CYCLES = """HloModule m, is_scheduled=true
ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%x), backend_config={"estimated_cycles":"40"}
}
"""


def _never(computation: Computation, instruction: Instruction) -> float:
    raise AssertionError("a program with cycles is not simulated")


@pytest.mark.parametrize(
    ("sync_s", "async_s", "communication_s"),
    [(3.0, 0.0, 3.0), (0.0, 7.0, 0.0), (3.0, 7.0, 3.0), (3.0, 15.0, 8.0)],
)
def test_asynchronous_collectives_hide_behind_all_compute_on_tpu(
    sync_s: float, async_s: float, communication_s: float
) -> None:
    collectives = [
        _collective(sync_s, is_async=False),
        _collective(async_s, is_async=True),
    ]
    module = parse_module(CYCLES)
    work, time = step_time(module, _target(clock_hz=4.0), collectives, _never)
    assert work.cycles == 40
    assert time.compute_s == 10.0
    assert time.communication_s == pytest.approx(communication_s)
    assert time.step_s == time.compute_s + time.communication_s


def test_a_program_without_cycles_is_played() -> None:
    text = CYCLES.replace(', backend_config={"estimated_cycles":"40"}', "").replace(
        "  ROOT %n = f32[4]{0} negate(%x)",
        "  %g = f32[4]{0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add\n"
        "  ROOT %n = f32[4]{0} negate(%g)",
    )
    # What the list of collectives says is not asked: the instructions are.
    _, time = step_time(parse_module(text), _target(), [], lambda c, i: 3.0)
    assert time.compute_s == pytest.approx(32 / 5)
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
