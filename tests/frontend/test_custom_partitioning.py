"""Functions under `custom_partitioning` bring the rule that they are sharded by."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.frontend.trace import trace
from tests.runtime.stand_in import assert_close, normal


def brought(fn: Any, rule: str, reduces: bool = False, **factors: Any) -> Any:
    """Return `fn` with a rule; its partial results are summed where it `reduces`."""
    made = custom_partitioning(fn)

    def partition(mesh: Any, ins: Any, out: Any) -> Any:
        axes = [a for dim in ins[-1].sharding.spec[:1] if dim for a in (dim,)]

        def local(*arrays: Any) -> Any:
            result = fn(*arrays)
            return jax.lax.psum(result, axes) if reduces and axes else result

        return mesh, local, out.sharding, tuple(x.sharding for x in ins)

    made.def_partition(partition, sharding_rule=rule, **factors)
    return made


def normed(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


NORM = brought(normed, "... d, d -> ... d", need_replication_factors=("d",))
PRODUCT = brought(lambda x, w: x @ w, "i k, k j -> i j", True, reduction_factors=("k",))
MISFIT = brought(lambda x, y: x + y, "i, i -> i")


@pytest.mark.parametrize(
    ("fn", "args", "rule"),
    [
        (
            NORM,
            (normal(0, 8, 4, 16), normal(1, 16)),
            "…0.0 …0.1 d!, d! -> …0.0 …0.1 d!",
        ),
        (PRODUCT, (normal(0, 8, 16), normal(1, 16, 4)), "i k, k j -> i j"),
        (MISFIT, (normal(0, 8), normal(1, 1)), None),
    ],
)
def test_the_rule_of_a_function_is_the_one_that_it_brings(
    fn: Any, args: Any, rule: str | None
) -> None:
    (op,) = trace(fn, args, {}).program.ops
    assert (str(op.rule) if op.is_known else None) == rule
    assert rhino.check_rule(fn, *args).strategies == ()


@pytest.mark.parametrize("pin", [P("data", None), P(None, "data")])
def test_it_runs_sharded_as_it_states(pin: P) -> None:
    def step(x: Any, scale: Any, w: Any) -> Any:
        return PRODUCT(rhino.pin(NORM(x, scale), P()), rhino.pin(w, pin))

    args = normal(0, 8, 16), normal(1, 16), normal(2, 16, 4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    sharded = rhino.auto_shard(step, mesh=mesh, progress=False)
    assert_close(sharded(*args), step(*args))


def test_rows_are_sharded_where_a_kernel_allows_it() -> None:
    args = normal(0, 64, 8, 64), normal(1, 64)
    plan = rhino.plan(NORM, *args, mesh={"data": 4}, hardware="v5e:2x2", progress=False)
    assert "data" in str(plan.out_specs)
    assert not plan.collectives
