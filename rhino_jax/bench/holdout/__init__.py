"""Small models of several families that took no part in fitting any constant: what
`configs/bench/unseen.toml` plans. Nothing else may depend on them."""

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
    """All of them, sorted."""
    return tuple(sorted(_MODELS))


def get(name: str, **overrides: Any) -> Workload:
    """A model by name.

    Args:
      overrides: keywords of the model's `workload`.
    Raises:
      ModelConfigError: it has no such keyword.
    """
    return built(_MODELS[name], name, overrides)
