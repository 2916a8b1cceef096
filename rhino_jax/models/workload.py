"""A workload: a function to plan, with all that its call needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from rhino_jax.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A named model with its step.

    Attributes:
      name: as in `rhino_jax.models.registry.names`.
      config: its sizes.
      init: function from a PRNG key to the tuple of state arguments: (params,
        opt_state) to train, (params, opt_state, model_state) with BatchNorm, (params,)
        to decode.
      make_batch: function from a PRNG key to the step's last argument.
      step: the function to plan. When training, `step(*state, batch)` returns
        `(*state, loss)`; when decoding, `step(params, prompt)` returns tokens.
      donate_argnums: positions of the arguments that are fed back.
      jit: compiles the step on one device; `nnx.jit` if state is a Flax object that the
        step changes in place, and does not return.
    """

    name: str
    config: ModelConfig
    init: Callable[[jax.Array], tuple[Any, ...]]
    make_batch: Callable[[jax.Array], Any]
    step: Callable[..., Any]
    donate_argnums: tuple[int, ...]
    jit: Callable[..., Any] = jax.jit

    def make_args(self, key: jax.Array) -> tuple[Any, ...]:
        """Return concrete arguments of `step`; allocates, so for small sizes."""
        return jax.jit(self._args)(key)

    def abstract_args(self) -> tuple[Any, ...]:
        """Return the arguments of `step` as ShapeDtypeStructs; allocates nothing."""
        return jax.eval_shape(self._args, jax.eval_shape(lambda: jax.random.key(0)))

    def num_params(self) -> int:
        """Return the number of trained scalars."""
        params = self.abstract_args()[0]
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))

    def _args(self, key: jax.Array) -> tuple[Any, ...]:
        state_key, batch_key = jax.random.split(key)
        return (*self.init(state_key), self.make_batch(batch_key))
