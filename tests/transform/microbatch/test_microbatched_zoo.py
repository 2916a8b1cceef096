"""The zoo in micro-batches: the same numbers as undivided, or refused."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.trace import trace
from rhino_jax.models import registry
from rhino_jax.transform.microbatch import microbatched


def run(closed, arrays):
    opened, consts = open_jaxpr(closed), jaxpr_consts(closed)
    return jax.jit(lambda xs: jax.core.eval_jaxpr(opened, consts, *xs))(arrays)


def numbers(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).astype(np.float64)


def check(step, args, donate, counts, rtol=1e-4):
    """Micro-batches give what the undivided step gives."""
    traced = trace(step, args, {}, donate_argnums=donate)
    arrays = jax.tree.leaves(args)
    expected = run(traced.closed_jaxpr, arrays)
    for count in counts:
        new = microbatched(traced.closed_jaxpr, traced.program, f'{{"count": {count}}}')
        for end, a, b in zip(
            traced.program.outputs, expected, run(new, arrays), strict=True
        ):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            a, b = numbers(a), numbers(b)
            scale = np.abs(a).max(initial=0)
            np.testing.assert_allclose(
                b, a, rtol=rtol, atol=rtol * scale, err_msg=f"{end.path}, m = {count}"
            )


@pytest.mark.parametrize("name", ["mlp-tiny", "gpt-tiny-unrolled", "gpt-tiny"])
def test_numbers_are_those_of_the_undivided_step(name):
    workload = registry.get(name, optimizer="sgd")
    args = workload.make_args(jax.random.key(0))
    check(workload.step, args, workload.donate_argnums, (2, 3))
