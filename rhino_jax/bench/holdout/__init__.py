"""Small held-out models of several families, planned by `configs/bench/unseen.toml`.

They took no part in fitting any constant; nothing else may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rhino_jax.bench.checks import built
from rhino_jax.bench.holdout import bert, dlrm, gpt, mixer, resnet, t5, unet, vit
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
    """Return the names of all models, sorted."""
    return tuple(sorted(_MODELS))


def get(name: str, **overrides: Any) -> Workload:
    """Return a model by name.

    Args:
      name: one of `names()`.
      overrides: keywords of the model's `workload`.

    Raises:
      ModelConfigError: it has no such keyword.
    """
    return built(_MODELS[name], name, overrides)
