"""Skipping tests whose compiler is not installed; in CI, where it must be, failing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from jax.sharding import Mesh

from rhino_jax.errors import HardwareError
from rhino_jax.verify.targets import compile_target


@contextmanager
def skipped_without_extra() -> Iterator[None]:
    """Skip where the body needs the `tpu` or `gpu` extra and it is not installed."""
    try:
        yield
    except HardwareError as error:
        if "pip install" not in error.fix or os.environ.get("RHINO_REQUIRE_EXTRAS"):
            raise
        pytest.skip(str(error).splitlines()[0])


def mesh_of_target(name: str, mesh: Any = None) -> Mesh:
    """`compile_target`, where its extra is installed."""
    with skipped_without_extra():
        return compile_target(name, mesh)
