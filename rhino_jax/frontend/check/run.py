"""Many runs of an op at once: all its shards in one compiled function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax._compat import bind_eqn
from rhino_jax.errors import RuleError


Call = tuple[Sequence[np.ndarray], Mapping[str, Any]]
"""The operands and parameters of one run of a primitive."""

Outcome = list[np.ndarray] | Exception
"""The results of one run, or the exception that it raised."""


@dataclass(frozen=True, slots=True)
class PrimitiveRunner:
    """Runs one equation's primitive on NumPy arrays.

    PRNG keys are passed as their words, in trailing dims.

    Attributes:
      eqn: the equation.
      key_impls: for every operand, the PRNG implementation of its keys; None for other
        arrays.
      fn: runs the op on arrays of any size, instead of the primitive; None: the
        primitive runs.
    """

    eqn: Any
    key_impls: tuple[Any, ...]
    fn: Callable[..., Any] | None = None

    def __call__(self, calls: Sequence[Call]) -> list[Outcome]:
        """Return the outcomes of all runs, in order, with one compilation unless some
        run fails."""
        operands = [list(call[0]) for call in calls]
        params = [call[1] for call in calls]

        def run_all(arrays: list[list[Any]]) -> list[list[Any]]:
            return [self._run(x, p) for x, p in zip(arrays, params, strict=True)]

        try:
            return [
                [np.asarray(x) for x in results]
                for results in jax.jit(run_all)(operands)
            ]
        except Exception as error:
            # Find out which run failed; a user's op may raise any exception.
            if len(calls) == 1:
                return [error]
            return [outcome for call in calls for outcome in self([call])]

    def _run(self, operands: Sequence[Any], params: Mapping[str, Any]) -> list[Any]:
        arrays = [
            jnp.asarray(x) if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(operands, self.key_impls, strict=True)
        ]
        if self.fn is not None:
            results = jax.tree.leaves(self.fn(*arrays))
        else:
            results = bind_eqn(self.eqn, arrays, params)
        return [jax.random.key_data(x) if is_key(x) else x for x in results]


def runner_of(
    eqn: Any, args: Sequence[Any], fn: Callable[..., Any] | None
) -> PrimitiveRunner:
    """Return the runner of an equation, for operands of the kinds of `args`."""
    impls = tuple(jax.random.key_impl(x) if is_key(x) else None for x in args)
    return PrimitiveRunner(eqn, impls, fn)


def is_key(x: Any) -> bool:
    """Whether an array holds PRNG keys."""
    return bool(jnp.issubdtype(jax.typeof(x).dtype, jax.dtypes.prng_key))


def as_array(x: Any) -> jax.Array:
    """Return an example argument as an array, with the element type that JAX gives it.

    Raises:
      RuleError: it is no array.
    """
    try:
        return x if isinstance(x, jax.Array) else jnp.asarray(x)
    except TypeError:
        raise RuleError(
            "a rule is checked by running it, and needs arrays.",
            numbers=f"got {type(x).__name__}: {x!r}",
            fix="pass small example arrays, as numpy.ones((8, 4)).",
        ) from None


def to_numpy(x: Any) -> np.ndarray:
    """Return an array, or the words of PRNG keys, as a NumPy array."""
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)
