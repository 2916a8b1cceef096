"""The rules of JAX's primitives: importing this package registers all of them."""

from __future__ import annotations

from rhino_jax.frontend.rules import (  # noqa: F401
    conv,
    dot,
    dynamic,
    elementwise,
    gather,
    kernel,
    linalg,
    opaque,
    random,
    reduce,
    reshape,
    scatter,
    shape,
    sort,
    window,
)
