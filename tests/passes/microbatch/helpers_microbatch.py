"""Running a function undivided and in micro-batches, and comparing."""

from __future__ import annotations

import functools
import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers_models import CASES

from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.microbatch import MicrobatchCut, may_cut, run_in_microbatches
from tests.passes.interpreter import interpret


NOISE = re.compile(r"\['k(ey)?'\]\['bias'\]")
"""The bias of a key shifts all scores of a row alike: its gradient is exactly zero, and
what optimizers make of the rounding is any number."""


def numbers(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).astype(np.float64)


def arrays_of(args: Any, traced: Any) -> list[Any]:
    """Of the leaves those that are arrays to the program; what else a module holds is
    static."""
    leaves = jax.tree.leaves(args)
    return [leaves[position] for position in traced.arguments.positions]


def doubled(args: Any) -> Any:
    """The same numbers in float64; to be used where x64 is enabled."""
    return jax.tree.map(
        lambda x: x.astype("float64") if jnp.result_type(x) == "float32" else x, args
    )


def check(step, args, donate=(), counts=(3,), rtol=1e-4, run=interpret, **options):
    """Check that micro-batches of a step give what it gives undivided.

    Also allowed are differences far below the largest number of all: gradients that
    are exactly zero are noise.
    """
    traced = trace(step, args, {}, donate_argnums=donate)
    return check_traced(traced, arrays_of(args, traced), counts, rtol, run, **options)


def check_traced(traced, arrays, counts=(3,), rtol=1e-4, run=interpret, **options):
    """As `check`."""
    expected, cuts = run(traced.closed_jaxpr, arrays), []
    most = max(np.abs(numbers(x)).max(initial=0) for x in expected)
    for count in counts:
        found = may_cut(traced.closed_jaxpr, traced.program, count, **options)
        if not isinstance(found, MicrobatchCut):
            raise found
        cuts.append(found)
        choice = json.dumps({"count": count, **options})
        new, _ = run_in_microbatches(traced.closed_jaxpr, traced.program, choice)
        for end, a, b in zip(
            traced.program.outputs, expected, run(new, arrays), strict=True
        ):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            if NOISE.search(end.path):
                continue
            a, b = numbers(a), numbers(b)
            atol = rtol * np.abs(a).max(initial=0) + 3e-7 * most
            where = f"{end.path}, m = {count}"
            np.testing.assert_allclose(b, a, rtol=rtol, atol=atol, err_msg=where)
    return cuts


def cut_of(step, args, count=2, donate=(), **options):
    """Return what would run where, or the refusal."""
    return cut_of_traced(trace(step, args, {}, donate_argnums=donate), count, **options)


def cut_of_traced(traced, count=2, **options):
    return may_cut(traced.closed_jaxpr, traced.program, count, **options)


@functools.cache
def of_framework(name, optimizer):
    """Return a case of `helpers_models.CASES`, traced, and its arrays."""
    step, args, donate = CASES[name](optimizer)
    traced = trace(step, args, {}, donate_argnums=donate)
    return traced, arrays_of(args, traced)


def outcome(step, args, donate, counts=(2, 4), cheap=0.0) -> str:
    """ "equal", "refused", or how it fails; in few loops and many, in few pieces and
    in uneven ones.

    What differs in float32 must be equal to 1e-9 in float64: a maximum of two numbers
    that rounding makes equal has another gradient.
    """
    options = {"most_loops": 5, "most_meeting": 1.0, "cheap": cheap}
    try:
        try:
            check(step, args, donate, counts, **options)
        except AssertionError:
            with jax.enable_x64(True):
                check(step, doubled(args), donate, counts, rtol=1e-9, **options)
    except MicrobatchError as error:
        return "refused, " + error.what.split("would")[0][:20]
    except AssertionError:
        return "differs"
    except Exception as error:
        return f"fails, {type(error).__name__}: {str(error)[:60]}"
    return "equal"
