"""From a jaxpr to a `Program`: importer, provenance, and the rules of primitives."""

from __future__ import annotations

# Before anything else of this package, so that users' rules come after.
from rhino_jax.frontend import rules as rules
