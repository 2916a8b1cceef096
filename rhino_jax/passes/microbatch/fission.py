"""Loop fission: split a scan over layers whose body needs a sum over the batch.

The first scan computes, layer by layer, the sums (stacked, each still partial over
micro-batches) and all that does not depend on them; the second reads the complete sums.
So the load-balancing loss of a mixture of experts, in a scan over its layers, costs one
more forward pass, as it does in unrolled layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhino_jax._compat import (
    bind_eqn,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    scan_counts,
    without_dead_code,
)
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.rewrite.emit import run_inlined, scan_like, substitute
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


Sums = list[tuple[Any, int]]
"""Equations inside of a loop body, each with the index of one of its results."""


def split_scan(
    closed: Any, flat: FlatProgram, scan: FlatOp, values: Sequence[int]
) -> Any:
    """Split one scan of a closed jaxpr into two.

    Args:
      closed: the closed jaxpr.
      flat: the flattened program of it.
      scan: the scan to split.
      values: ids of the values computed in its body that the second scan reads in full.
    Returns:
      A closed jaxpr of the same arguments and results.
    """
    makers = [flat.maker[v] for v in values]
    sums: Sums = [
        (m.eqn, m.results.index(v)) for m, v in zip(makers, values, strict=True)
    ]

    def in_two(eqn: Any, operands: list[Any]) -> list[Any] | None:
        return _in_two(eqn, operands, sums) if eqn is scan.eqn else None

    return without_dead_code(substitute(closed, in_two))


def _holds(eqn: Any, sums: Sums) -> bool:
    """Whether an equation contains one of the summing equations, at any depth."""
    inner = [e for j in closed_region_jaxprs(eqn) for e in open_jaxpr(j).eqns]
    return any(e is s or _holds(e, sums) for e in inner for s, _ in sums)


def _in_two(eqn: Any, operands: list[Any], sums: Sums) -> list[Any]:
    """Run a scan as two: one that stacks the sums, and one that reads them complete.

    Args:
      eqn: equation of the scan.
      operands: its operands.
      sums: equations of its body whose results the second scan replaces.
    Returns:
      Results of the scan: of the first run where they do not depend on the sums.
    """
    num_consts, num_carry = scan_counts(eqn.params)
    first = num_consts + num_carry
    (closed,) = closed_region_jaxprs(eqn)
    body = open_jaxpr(closed)
    consts = operands[:num_consts]

    def once(carry: Any, xs: Any, given: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        made: list[Any] = [None] * len(sums)

        def instead(inner: Any, arrays: list[Any]) -> list[Any] | None:
            at = [i for i, (e, _) in enumerate(sums) if e is inner]
            if not at:
                return None
            found = bind_eqn(inner, arrays, inner.params)
            for i in at:
                made[i] = found[sums[i][1]]
                if given:
                    found[sums[i][1]] = given[i]
            return found

        outs = run_inlined(
            body,
            jaxpr_consts(closed),
            [*consts, *carry, *xs],
            instead,
            lambda e: _holds(e, sums),
        )
        return outs, made

    carry = operands[num_consts:first]

    def expose(carry: Any, xs: Any) -> Any:
        outs, made = once(carry, xs, ())
        return outs[:num_carry], (outs[num_carry:], made)

    def use(carry: Any, xs: Any) -> Any:
        outs, _ = once(carry, *xs)
        return outs[:num_carry], outs[num_carry:]

    rows = operands[first:]
    carries, (stacks, made) = scan_like(eqn, expose, carry, rows)
    before = [*carries, *stacks]
    carries, stacks = scan_like(eqn, use, carry, (rows, made))
    after = [*carries, *stacks]
    late = _late(body, num_consts, num_carry, sums)
    pairs = zip(before, after, late, strict=True)
    return [b if is_late else a for a, b, is_late in pairs]


def _late(body: Any, num_consts: int, num_carry: int, sums: Sums) -> list[bool]:
    """Return which results of a loop's body depend on the sums, in any iteration."""
    carries = [False] * num_carry
    while True:
        late = {
            v
            for v, is_late in zip(body.invars[num_consts:], carries, strict=False)
            if is_late
        }
        outs = _tainted(body, late, sums)
        again = [a or b for a, b in zip(carries, outs, strict=False)]
        if again == carries:
            return outs
        carries = again


def _tainted(jaxpr: Any, late: set[Any], sums: Sums) -> list[bool]:
    """Return which outputs of a jaxpr depend on `late` variables or on the sums."""
    for eqn in jaxpr.eqns:
        at = [i for e, i in sums if e is eqn]
        operands = [not is_literal(v) and v in late for v in eqn.invars]
        if _holds(eqn, sums):
            (body,) = map(open_jaxpr, closed_region_jaxprs(eqn))
            inner = {v for v, t in zip(body.invars, operands, strict=True) if t}
            found = _tainted(body, inner, sums)
        else:
            found = [any(operands) or i in at for i in range(len(eqn.outvars))]
        late |= {v for v, t in zip(eqn.outvars, found, strict=True) if t}
    return [not is_literal(v) and v in late for v in jaxpr.outvars]
