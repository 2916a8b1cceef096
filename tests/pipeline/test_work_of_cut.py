"""Cuts as what schedules are made of: estimated and simulated steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rhino_jax.pipeline.cut.choose import cut
from rhino_jax.pipeline.cut.ops import (
    IN_FLIGHT,
    CutOp,
    CutOps,
    CutProblem,
    CutValue,
    StageDevices,
)
from rhino_jax.pipeline.schedules.searched import make
from rhino_jax.pipeline.simulator import checked, simulate
from rhino_jax.pipeline.tasks import TransferLink
from rhino_jax.pipeline.work import as_work


def u_net(levels: int, per_level: int, stages: int, m: int, rate: float) -> CutProblem:
    """Values halve from level to level, and every level has a skip across."""
    rng = np.random.default_rng(0)
    ops: list[CutOp] = []
    made: list[int] = []
    readers: list[list[int]] = []

    def op(size: int, *reads: int) -> int:
        seconds = float(rng.uniform(0.5, 1.5)) * 1e-3
        ops.append(
            CutOp(forward_s=seconds, backward_s=2 * seconds, activation_bytes=size)
        )
        made.append(size)
        readers.append([])
        for read in reads:
            readers[read].append(len(ops) - 1)
        return len(ops) - 1

    x, skips = op(1000 << levels), []
    for level in range(levels):
        for _ in range(per_level):
            x = op(1000 << (levels - level), x)
        skips.append(x)
    for level in reversed(range(levels)):
        x = op(1000 << (levels - level), x, skips.pop())
        for _ in range(per_level):
            x = op(1000 << (levels - level), x)
    values = [
        CutValue(i, tuple(r), made[i], made[i]) for i, r in enumerate(readers) if r
    ]
    return CutProblem(
        ops=CutOps(tuple(ops), tuple(values)),
        groups=(StageDevices(),) * stages,
        hops=(TransferLink("", rate, 1e-5),) * (stages - 1),
        micro_batches=m,
        in_flight=IN_FLIGHT["1f1b"](stages, m),
    )


@pytest.mark.parametrize(("stages", "m"), [(2, 8), (4, 16), (6, 12)])
@pytest.mark.parametrize("rate", [1e7, 1e8, 1e10])
def test_estimates_are_those_of_simulated_1f1b(
    stages: int, m: int, rate: float
) -> None:
    problem = u_net(4, 5, stages, m, rate)
    found = cut(problem)
    assert found.is_optimal
    simulated = simulate(make("1f1b", as_work(problem, found)))
    assert 0.95 < found.step_time_s / simulated.step_time_s < 1.02


def test_estimates_of_gpipe_are_exact_where_transfers_hide() -> None:
    problem = u_net(4, 5, 4, 8, 1e8)
    problem = replace(problem, in_flight=IN_FLIGHT["gpipe"](4, 8))
    found = cut(problem)
    simulated = simulate(make("gpipe", as_work(problem, found)))
    assert found.step_time_s == pytest.approx(simulated.step_time_s, rel=1e-4)


def test_what_a_cut_holds_is_what_a_step_holds_at_most() -> None:
    problem = u_net(3, 4, 3, 8, 1e9)
    found = cut(problem)
    simulated = simulate(make("1f1b", as_work(problem, found)))
    for held, peak in zip(found.held_bytes, simulated.group_peak_bytes, strict=True):
        assert 0.8 * held < peak <= held
    limits = tuple(map(StageDevices, found.held_bytes))
    assert checked(make("1f1b", as_work(replace(problem, groups=limits), found)))
