"""Small held-out models of several families, planned by `configs/bench/unseen.toml`.

They took no part in fitting any constant; nothing else may depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rhino_jax.bench.holdout import bert, dlrm, gpt, mixer, resnet, t5, unet, vit
from rhino_jax.models.workload import Workload


MODELS: Mapping[str, Callable[..., Workload]] = {
    "unseen-bert": bert.workload,
    "unseen-dlrm": dlrm.workload,
    "unseen-gpt": gpt.workload,
    "unseen-mixer": mixer.workload,
    "unseen-resnet": resnet.workload,
    "unseen-t5": t5.workload,
    "unseen-unet": unet.workload,
    "unseen-vit": vit.workload,
}
"""Name of a model → function that makes its workload, with its sizes as keywords."""
