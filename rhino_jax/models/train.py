"""The ordinary single-device train step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax


def train_step_for(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    *,
    has_state: bool = False,
) -> Callable[..., tuple[Any, ...]]:
    """Return a train step: loss, gradients, update.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, or with `has_state`
        `loss_fn(params, model_state, batch) -> (loss, model_state)`.
      optimizer: an optax optimizer.
      has_state: whether the model has untrained state, as BatchNorm's statistics.
    Returns:
      `step(params, opt_state, batch) -> (params, opt_state, loss)`, or with
      `has_state` `step(params, opt_state, model_state, batch) -> (params,
      opt_state, model_state, loss)`.
    """

    def train_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    def train_step_with_state(
        params: Any, opt_state: Any, model_state: Any, batch: Any
    ) -> tuple[Any, Any, Any, Any]:
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, model_state), grads = value_and_grad(params, model_state, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, model_state, loss

    return train_step_with_state if has_state else train_step
