"""Saying less changes what the compiler is told, never what is computed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.plan.decisions import only_around_matmuls
from rhino_jax.runtime.sharded import jit_with_plan
from tests.cases import covering
from tests.runtime.programs import PROGRAMS, arguments
from tests.runtime.stand_in import assert_close, mesh_of, plan_of, random_decisions


@pytest.mark.parametrize("name", covering(PROGRAMS, ["mlp", "scanned", "branched"]))
def test_numbers_stay(name: str) -> None:
    fn, args = PROGRAMS[name], arguments()
    traced = trace(fn, args, {})
    decisions = only_around_matmuls(traced.program, random_decisions(traced.program, 5))
    plan = plan_of(traced, mesh_of(), decisions)
    assert_close(jit_with_plan(fn, plan)(*args), jax.jit(fn)(*args))


def test_matmuls_keep_operands_and_results_and_nothing_between_is_said() -> None:
    def three(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        return jnp.sum(jnp.exp(y) * 2.0) * y

    program = trace(three, arguments(), {}).program
    everything = random_decisions(program, 1)
    everything = replace(everything, operands={})
    kept = only_around_matmuls(program, everything)
    (dot,) = [op for op in program.ops if op.name == "dot_general"]
    between = [op for op in program.ops if op.name in ("tanh", "exp")]
    assert between and all(op.results[0] not in kept.values for op in between)
    assert dot.results[0] in kept.values
    assert kept.operands == {
        (dot.id, i): everything.values[v] for i, v in enumerate(dot.operands)
    }
    assert kept.outputs == everything.outputs
    assert all(i.value in kept.values for i in program.inputs)
