"""Small held-out models of several families, planned by `configs/bench/unseen.toml`.

Those of `public` are planned by `configs/bench/fidelity.toml`.

They took no part in fitting any constant; nothing else may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rhino_jax.bench.holdout import images, public, text
from rhino_jax.models.workload import Workload


MODELS: Mapping[str, Callable[..., Workload]] = {
    "unseen-bert": text.bert,
    "unseen-dlrm": text.dlrm,
    "unseen-gpt": text.gpt,
    "unseen-mixer": images.mixer,
    "unseen-resnet": images.resnet,
    "unseen-t5": text.t5,
    "unseen-unet": images.unet,
    "unseen-vit": images.vit,
    **public.MODELS,
}
"""Name of a model → function that makes its workload, with its sizes as keywords."""
