"""Steps as somebody writes them who meets rhino_jax for the first time: Flax objects, a
loop over layers, gradients accumulated by hand, BatchNorm and averaged parameters. What
`configs/bench/calls.toml` calls once; they need Flax."""

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
