"""Steps as a first-time user of rhino_jax writes them; they need Flax.

Flax objects, a loop over layers, gradients accumulated by hand, BatchNorm and averaged
parameters. `configs/bench/calls.toml` calls each once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rhino_jax.bench.newcomers import batch_norm, llama, transformer
from rhino_jax.models.workload import Workload


MODELS: Mapping[str, Callable[..., Workload]] = {
    "newcomer-batchnorm": batch_norm.workload,
    "newcomer-llama": llama.workload,
    "newcomer-nnx": transformer.workload,
}
"""Name of a model → function that makes its workload, with its sizes as keywords."""
