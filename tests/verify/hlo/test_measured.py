"""Prices against times that one H100 took, instruction by instruction and per step.

`h100.csv`: instructions of 10 us and more of 23 programs, the longest of each kind
(jax 0.11.2, CUDA 13, 3 steps under the profiler, command buffers off), alike ones of a
program once; FLOPs, bytes and the rest as read from the compiled HLO; `runs` per step
as profiled; `us` of one run, the sum of its kernels. `h100_steps.csv`: steps of 33
programs, and the memory that they take as compiled.
"""

from __future__ import annotations

import csv
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax.frontend.rules.elementwise import _VECTOR_OPS
from rhino_jax.hardware.files import load_target
from rhino_jax.ir.traits import Library
from rhino_jax.verify.hlo.instruction_cost import _OPS_OF, Channels
from rhino_jax.verify.hlo.reading import work_s
from rhino_jax.verify.hlo.work import InstructionWork


HERE = Path(__file__).parent


def _table(name: str) -> list[dict[str, str]]:
    with (HERE / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _work(row: dict[str, str]) -> InstructionWork:
    family, is_gradient = row["family"], row["family"] == "gradient by kernel"
    is_library = family in ("sorting", "fourier", "factoring")
    return InstructionWork(
        name="",
        opcode=row["opcode"],
        count=int(row["runs"]),
        flops=int(row["flops"]),
        dtype=row["dtype"],
        bytes=int(row["bytes"]),
        cycles=None,
        op="",
        source="",
        vector_ops=float(row["vector_ops"]),
        library=Library(family if is_library else "", float(row["passes"])),
        channels=Channels(
            int(row["inputs"]), int(row["outputs"]), int(row["groups"]), is_gradient
        )
        if row["inputs"]
        else None,
    )


@functools.cache
def _ratios() -> dict[str, np.ndarray]:
    """Return family → [instructions, (priced over measured, measured seconds)]."""
    target, found = load_target("h100:1"), dict[str, list[tuple[float, float]]]()
    for row in _table("h100.csv"):
        work, measured_s = _work(row), float(row["us"]) * 1e-6
        ratio = work_s(target, work) / measured_s
        found.setdefault(row["family"], []).append((ratio, measured_s * work.count))
    return {family: np.array(pairs) for family, pairs in found.items()}


BOUNDS = {
    "matmul": (1.15, 1.05),
    "copy": (1.20, 1.20),
    "fusion": (1.02, 1.11),
    "fourier": (0.89, 0.90),
    "vector": (1.10, 1.06),
    "sorting": (0.93, 0.75),
    "gradient by kernel": (0.93, 1.13),
    "convolution": (1.13, 1.17),
}
"""Family → priced over measured time: of all its instructions, and the median."""


@pytest.mark.parametrize("family", BOUNDS)
def test_prices_of_a_family_of_kernels(family: str) -> None:
    """The priced time of all its instructions, and the median of their ratios, within
    a tenth of what they were when measured."""
    ratios, seconds = _ratios()[family].T
    of_sum = (ratios * seconds).sum() / seconds.sum()
    assert [of_sum, np.median(ratios)] == pytest.approx(BOUNDS[family], rel=0.1)


def test_most_instructions_are_priced_within_a_quarter() -> None:
    ratios, seconds = np.concatenate(list(_ratios().values())).T
    near = np.abs(np.log(ratios)) < np.log(1.25)
    assert seconds[near].sum() / seconds.sum() > 0.75


def _solve(a: Any, b: Any) -> Any:
    factor = jnp.linalg.cholesky(a)
    x = jax.scipy.linalg.cho_solve((factor, True), b)
    return a + 0 * jnp.mean(x)


def _waves(w: Any, dt: Any) -> Any:
    n = w.shape[0]
    k = jnp.fft.fftfreq(n) * n
    k2 = k[:, None] ** 2 + k[None, : n // 2 + 1] ** 2
    for _ in range(2):
        h = jnp.fft.rfft2(w)
        w = w + dt * jnp.fft.irfft2(h * jnp.exp(-1e-4 * k2))
    return w


@pytest.mark.parametrize(
    ("name", "step", "other"),
    [("linalg", _solve, (4096, 64)), ("fft", _waves, ())],
)
def test_plans_of_one_device_take_the_measured_time(
    name: str, step: Any, other: tuple[int, ...]
) -> None:
    (row,) = [x for x in _table("h100_steps.csv") if x["program"] == name]
    shapes = (4096, 4096), other
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    plan = rhino.plan(
        step,
        *args,
        mesh={"data": 1},
        hardware="h100:1",
        donate_argnums=(0,),
        progress=False,
    )
    measured_s = float(row["step_ms"]) / 1e3
    assert plan.predicted.step_time_s == pytest.approx(measured_s, rel=0.15)


SPELLINGS = {
    "convert_element_type": "convert", "round": "round-nearest-even", "div": "divide",
    "exp": "exponential", "expm1": "exponential-minus-one", "log1p": "log-plus-one",
    "rem": "remainder", "cos": "cosine", "sin": "sine", "pow": "power",
}  # fmt: skip
"""JAX's name of an op → HLO's, where they differ."""

WITHOUT_HLO = {"exp2", "integer_pow", "erfc", "erf_inv", "lgamma", "digamma"}
"""Ops that become several of HLO."""


def test_plans_and_prices_count_the_same_vector_operations() -> None:
    counted = {
        name: _OPS_OF[SPELLINGS.get(name, name)]
        for name in _VECTOR_OPS.keys() - WITHOUT_HLO
    }
    assert counted == {name: _VECTOR_OPS[name] for name in counted}
    assert set(_OPS_OF) >= set(SPELLINGS.values())
