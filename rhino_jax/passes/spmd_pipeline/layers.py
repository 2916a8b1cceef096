"""Scans over layers: those with matmuls or convolutions that go through stacks."""

from __future__ import annotations

from typing import Any

from rhino_jax._compat import is_literal, open_jaxpr, scan_counts
from rhino_jax.frontend.regions import sub_jaxprs
from rhino_jax.frontend.registry import traits_of
from rhino_jax.ir.traits import OpKind
from rhino_jax.rewrite.equations import Equations


def layer_loops(lines: Equations, consts: int) -> list[int]:
    """Return positions of scans with matmuls or convolutions that go through stacks.

    The stacks are weights, or results of such a scan before.

    Args:
      lines: equations of a micro-batch.
      consts: how many of its inputs, the first ones, are the same for all
        micro-batches.
    """
    varies = set(lines.inputs[consts:])
    stacks: set[int] = set()
    found = []
    for i, (eqn, reads) in enumerate(zip(lines.eqns, lines.reads, strict=True)):
        if eqn.primitive.name == "scan" and _has_products(eqn):
            rows = set(sliced(lines, i))
            if rows - varies or rows & stacks:
                found.append(i)
                _, carries = scan_counts(eqn.params)
                stacks.update(lines.makes[i][carries:])
                varies.update(lines.makes[i])
                continue
        if varies & set(reads) or _draws(eqn):
            varies.update(lines.makes[i])
    return found


def _draws(eqn: Any) -> bool:
    """Whether an equation draws random numbers."""
    traits = traits_of(eqn.primitive.name)
    return traits.kind is OpKind.GENERATOR and traits.is_expensive


def length_of(lines: Equations, loop: int) -> int:
    """Return the number of layers that a scan goes through."""
    return int(lines.eqns[loop].params["length"])


def _has_products(eqn: Any) -> bool:
    jaxprs = map(open_jaxpr, sub_jaxprs(eqn))
    return any(
        traits_of(inner.primitive.name).is_contraction or _has_products(inner)
        for jaxpr in jaxprs
        for inner in jaxpr.eqns
    )


def sliced(lines: Equations, loop: int) -> list[int]:
    """Return the values that a scan reads slice by slice, without literals."""
    eqn = lines.eqns[loop]
    first = sum(scan_counts(eqn.params))
    return [lines.number(v) for v in eqn.invars[first:] if not is_literal(v)]
