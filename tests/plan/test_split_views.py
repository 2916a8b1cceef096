"""What is only split in between is left to the compiler, and nothing else is."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.ir.program import Program
from rhino_jax.plan.decisions import without_split_views
from tests.runtime.stand_in import random_decisions


X = jax.ShapeDtypeStruct((16, 8, 64), jnp.float32)
SPLIT = (16, 8, 32, 2)


def normalised(x: Any) -> Any:
    """Over positions and pairs of channels; `jnp.var` is a call."""
    wide = x.reshape(SPLIT)
    mean = wide.mean((1, 3), keepdims=True)
    variance = wide.var((1, 3), keepdims=True)
    return jnp.tanh((wide - mean) / (variance + 1.0)).reshape(x.shape) * 2.0


def multiplied(x: Any) -> Any:
    """Heads of 2: the matrix product works on the split dims."""
    heads = jnp.tanh(x.reshape(SPLIT))
    return jnp.einsum("bshd,bthd->bhst", heads, heads)


def widened(x: Any) -> Any:
    return jnp.tanh(x[..., None]).reshape(x.shape)


def shapes_left_out(fn: Any, lanes: int) -> set[tuple[int, ...]]:
    program: Program = trace(fn, (X,), {}).program
    decisions = random_decisions(program, 3)
    decisions = type(decisions)(values=decisions.values)
    kept = without_split_views(program, decisions, lanes).values
    return {tuple(program.values[v].shape) for v in decisions.values.keys() - kept}


def test_a_norm_over_groups_is_left_to_propagation() -> None:
    left_out = shapes_left_out(normalised, 128)
    assert SPLIT in left_out
    assert {len(shape) for shape in left_out} == {4}


@pytest.mark.parametrize(
    ("fn", "lanes"),
    [(normalised, 0), (normalised, 2), (multiplied, 128), (widened, 128)],
)
def test_everything_else_stays_annotated(fn: Any, lanes: int) -> None:
    assert shapes_left_out(fn, lanes) == set()


def test_what_a_reader_wants_otherwise_stays_annotated() -> None:
    program = trace(normalised, (X,), {}).program
    decisions = random_decisions(program, 3)
    kept = without_split_views(program, decisions, 128)
    read = {program.ops[op].operands[i] for op, i in decisions.operands}
    assert read & decisions.values.keys() <= kept.values.keys()
    assert kept.operands == decisions.operands
