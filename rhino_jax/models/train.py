"""The ordinary single-device train step, and the optimizers by name."""

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


def optimizer(
    name: str,
    learning_rate: float = 1e-3,
    *,
    clip_norm: float = 0.0,
    accumulate_steps: int = 1,
) -> optax.GradientTransformation:
    """Return one of optax's optimizers, with clipping and accumulation around it.

    Args:
      name: "adamw", "adafactor", or "sgd" (with momentum 0.9).
      learning_rate: constant learning rate.
      clip_norm: maximum global norm of the gradients; 0: no clipping.
      accumulate_steps: with more than 1, `optax.MultiSteps` averages the gradients of
        that many steps and updates once.

    Raises:
      ValueError: no optimizer has that name.
    """
    if name == "adamw":
        base = optax.adamw(learning_rate)
    elif name == "adafactor":
        # Optax factors dims from 128 up; 32 lets small models take that path, too.
        base = optax.adafactor(learning_rate, min_dim_size_to_factor=32)
    elif name == "sgd":
        base = optax.sgd(learning_rate, momentum=0.9)
    else:
        raise ValueError(f"optimizer {name!r}: expected adamw, adafactor or sgd")
    if clip_norm:
        base = optax.chain(optax.clip_by_global_norm(clip_norm), base)
    if accumulate_steps > 1:
        return optax.MultiSteps(base, accumulate_steps).gradient_transformation()
    return base
