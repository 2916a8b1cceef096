"""Passes over a jaxpr before it is imported, and the record of their changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from rhino_jax._compat import open_jaxpr, without_dead_code, without_refs
from rhino_jax.errors import RhinoWarning
from rhino_jax.frontend.noops import without_noops
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.frontend.split_dims import split_merged_dims
from rhino_jax.frontend.tracing.linear_solves import with_open_solves
from rhino_jax.frontend.tracing.open_moves import with_open_moves
from rhino_jax.ir.transform import Transform


def transformed(jaxpr: Any, name: str) -> tuple[Any, tuple[Transform, ...]]:
    """Return an equivalent jaxpr that plans better, and the passes that changed it.

    Args:
      jaxpr: closed.
      name: the user's function, for messages.
    """
    passes: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("references as values", without_refs),
        ("no-ops", without_noops),
        ("linear solves", with_open_solves),
        ("constant windows and rotations", with_open_moves),
        # XLA drops dead code; otherwise it would be planned, costed and reported.
        ("dead code", without_dead_code),
        ("merged dims", lambda found: _unmerged(found, name)),
    )
    done = []
    for what, run in passes:
        before, jaxpr = jaxpr, run(jaxpr)
        if jaxpr is before:
            continue
        counts = _num_eqns(before), _num_eqns(jaxpr)
        # Dead-code elimination always returns a new jaxpr.
        if what != "dead code" or counts[0] != counts[1]:
            done.append(Transform(what, *counts))
    return jaxpr, tuple(done)


def _num_eqns(jaxpr: Any) -> int:
    """Return the number of equations of a jaxpr, including those of sub-jaxprs."""
    return sum(
        1 + sum(map(_num_eqns, closed_region_jaxprs(eqn)))
        for eqn in open_jaxpr(jaxpr).eqns
    )


def _unmerged(jaxpr: Any, name: str) -> Any:
    """Split merged dims; return the original jaxpr where that fails, since it only
    serves better plans."""
    try:
        return split_merged_dims(jaxpr)
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        warnings.warn(
            f"`{name}`: its merged dims are planned as they are, since keeping them"
            f" apart failed ({text[:200]}). Please report this.",
            RhinoWarning,
            stacklevel=2,
        )
        return jaxpr
