"""Small models of several families that took no part in fitting any constant: what
`configs/bench/unseen.toml` plans. Nothing else may depend on them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rhino_jax.bench.unseen import bert, dlrm, gpt, mixer, resnet, t5, unet, vit
from rhino_jax.errors import nearest
from rhino_jax.models.config import ModelConfigError
from rhino_jax.models.workload import Workload


_MODELS: Mapping[str, Callable[..., Workload]] = {
    "unseen-bert": bert.workload,
    "unseen-dlrm": dlrm.workload,
    "unseen-gpt": gpt.workload,
    "unseen-mixer": mixer.workload,
    "unseen-resnet": resnet.workload,
    "unseen-t5": t5.workload,
    "unseen-unet": unet.workload,
    "unseen-vit": vit.workload,
}


def names() -> tuple[str, ...]:
    """All of them, sorted."""
    return tuple(sorted(_MODELS))


def get(name: str, **overrides: Any) -> Workload:
    """A model by name.

    Args:
      overrides: keywords of the model's `workload`.
    Raises:
      ModelConfigError: it has no such keyword.
    """
    known = inspect.signature(_MODELS[name]).parameters
    for key in overrides:
        if key not in known:
            raise ModelConfigError(
                f"the model {name!r} has no `{key}`.{nearest(key, known)}",
                where=f"{_MODELS[name].__module__}",
                numbers=f"known: {', '.join(known)}",
                fix=f"remove or rename `{key}`.",
            )
    return _MODELS[name](**overrides)
