"""The model zoo: ordinary single-device JAX models, used by demo and benchmarks.

No file here knows of meshes or shardings.
"""

from __future__ import annotations

from rhino_jax.models.config import ModelConfigError as ModelConfigError
from rhino_jax.models.registry import get as get, load as load, names as names
from rhino_jax.models.workload import Workload as Workload
