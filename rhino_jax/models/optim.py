"""The optimizers by name."""

from __future__ import annotations

import optax


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
