"""The model zoo: ordinary single-device JAX models, used by demo and benchmarks.

In: a name of `configs/models/`, or keywords of a family's config.
Out: `workload.Workload`: a function to plan, with all that its call needs.
Order: `config` (files read), `weights` and `layers` (pieces), a file for each family,
`train` (optimizers, the train step), `text` (data), `workload`, `registry` (by name).
No file here refers to meshes or shardings.
"""

from __future__ import annotations

from rhino_jax.models.config import ModelConfigError as ModelConfigError
from rhino_jax.models.registry import get as get, load as load, names as names
from rhino_jax.models.workload import Workload as Workload
