"""Which strategies an op has."""

from __future__ import annotations

import jax.numpy as jnp

from rhino_jax.frontend.trace import trace
from rhino_jax.search.strategies import strategies


def test_a_partial_sum_is_not_scattered_onto_a_batch_dim_that_is_cut() -> None:
    """XLA gathers whole operands for that: compiled, a mixture of experts moved three
    times the planned bytes."""
    x = jnp.ones((8, 4, 16))
    program = trace(lambda a, b: jnp.einsum("ebf,ebd->efd", a, b), (x, x), {}).program
    (dot,) = [op for op in program.ops if op.name == "dot_general"]
    assert dot.rule is not None
    found = strategies(dot.rule, ((8, 16, 16),), (2, 4))
    assert not [s for s in found if s.made[0][0] == (1,) and s.results[0][0] == (1, 0)]
    # Onto the same dim uncut, and onto others, it is.
    assert [s for s in found if s.made[0][0] == () and s.results[0][0] == (0,)]
    assert [s for s in found if s.made[0][1] == (1,) and s.results[0][1] == (1, 0)]
