"""Value numbering of the backward pass: recomputed values that the forward pass has."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np

from rhino_jax._compat import is_literal, open_jaxpr
from rhino_jax.passes.sequence_slices.opened import OpenedProgram
from rhino_jax.passes.staged.apart import Apart


def twins_of(apart: Apart, opened: OpenedProgram) -> dict[int, int]:
    """Return value of the backward pass → the equal value of the forward pass.

    Two values are equal if the same primitive computes them, with the same parameters,
    from equal values; also before the micro-batches.

    Args:
      apart: the step.
      opened: its micro-batch, calls inlined.
    """
    names = _Names()
    before, piece = open_jaxpr(apart.before), open_jaxpr(opened.closed)
    for eqn in before.eqns:
        names.add(eqn)
    entering = [names.of(v) for v in before.outvars]
    names.known.update(zip(piece.invars[1:], entering, strict=False))
    forward: dict[Hashable, int] = {}
    twins: dict[int, int] = {}
    for i, eqn in enumerate(opened.eqns):
        names.add(eqn)
        for v, value in zip(eqn.outvars, opened.op(i).results, strict=True):
            name = names.of(v)
            if not opened.is_backward[i]:
                forward.setdefault(name, value)
            elif name in forward:
                twins[value] = forward[name]
    return twins


class _Names:
    """Value numbers: equal values have one name.

    Attributes:
      known: names of variables; others are their own names.
    """

    def __init__(self) -> None:
        self.known: dict[Any, Hashable] = {}
        self._made: dict[Hashable, int] = {}

    def of(self, atom: Any) -> Hashable:
        if not is_literal(atom):
            return self.known.get(atom, atom)
        x = np.asarray(atom.val)
        return str(x.dtype), x.shape, x.tobytes()

    def add(self, eqn: Any) -> None:
        """Name the results of an equation, unless it has effects."""
        if eqn.effects:
            return
        reads = tuple(map(self.of, eqn.invars))
        key = eqn.primitive.name, _frozen(eqn.params), reads
        number = self._made.setdefault(key, len(self._made))
        for k, v in enumerate(eqn.outvars):
            self.known[v] = number, k


def _frozen(x: Any) -> Hashable:
    """Return a key by which parameters are compared.

    Those that cannot be hashed are compared by identity.
    """
    if isinstance(x, dict):
        return tuple((k, _frozen(x[k])) for k in sorted(x))
    if type(x) in (list, tuple):
        return tuple(map(_frozen, x))
    try:
        hash(x)
    except TypeError:
        return id(x)
    found: Hashable = x
    return found
