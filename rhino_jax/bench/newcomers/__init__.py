"""Steps as a first-time user of rhino_jax writes them; they need Flax.

Flax objects, a loop over layers, gradients accumulated by hand, BatchNorm and averaged
parameters. `configs/bench/calls.toml` calls each once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rhino_jax.bench.checks import built
from rhino_jax.bench.newcomers import batch_norm, llama, transformer
from rhino_jax.models.workload import Workload


_MODELS: Mapping[str, Callable[..., Workload]] = {
    "newcomer-batchnorm": batch_norm.workload,
    "newcomer-llama": llama.workload,
    "newcomer-nnx": transformer.workload,
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
