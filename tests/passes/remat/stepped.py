"""Run rewritten steps next to those that their users wrote."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax import models
from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.remat.choice import RematChoice
from tests.passes.interpreter import interpret
from tests.passes.zoo import arguments_of


@functools.cache
def workload(name: str, **changes: Any) -> tuple[Traced, tuple[Any, ...]]:
    """Return a tiny model's step, traced, and its arguments.

    SGD by default: Adam divides small gradients by themselves, and so shows nothing
    but their rounding.
    """
    if "decode" not in name:
        changes.setdefault("optimizer", "sgd")
    found = models.get(name, **changes)
    args = arguments_of(found)
    return trace(found.step, args, {}), args


def with_choice(traced: Traced, choice: RematChoice) -> Traced:
    """The step with a choice done."""
    return apply_passes(traced, [Transform("recompute", 0, 0, str(choice))])


def interpreted(traced: Traced) -> Any:
    """Return the step on arrays, as it is run without compiling it."""
    return lambda *arrays: interpret(traced.closed_jaxpr, arrays)


def compiled(traced: Traced) -> Any:
    """Return the step on arrays, compiled for one CPU."""
    return jax.jit(as_function(traced)).lower(*traced.arguments.arrays).compile()


def as_function(traced: Traced) -> Callable[..., Any]:
    """The step as a function of arrays."""
    opened, consts = open_jaxpr(traced.closed_jaxpr), traced.consts
    return lambda *xs: jax.core.eval_jaxpr(opened, consts, *xs)


def flops(step: Any) -> float:
    """Of a compiled step, loops' bodies once."""
    return float(step.cost_analysis()["flops"])


def assert_same(
    got: Sequence[Any], expected: Sequence[Any], rtol: float = 1e-5
) -> None:
    """Equal but for rounding, relative to the largest element.

    Gradients that are zero, as of a bias before a norm, hold rounding alone: up to
    1.4e-10 in U-Net, whose other leaves begin at 1e-6, so 1e-9 is always allowed.
    """
    for a, b in zip(got, expected, strict=True):
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if jnp.issubdtype(b.dtype, jnp.floating):
            wide = np.asarray(b, np.float64)
            atol = rtol * float(np.abs(wide).max(initial=1e-9 / rtol))
            np.testing.assert_allclose(np.asarray(a, np.float64), wide, rtol, atol)
        else:
            np.testing.assert_array_equal(a, b)
