"""Loop fission: split a scan over layers whose body needs a sum over the batch.

The first scan computes, layer by layer, the sums (stacked, each still partial over
micro-batches) and all that does not depend on them; the second reads the complete sums.
So the load-balancing loss of a mixture of experts, in a scan over its layers, costs one
more forward pass, as it does in unrolled layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhino_jax._compat import open_jaxpr, without_dead_code
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.passes.split_scan import EqnResult, SplitScan, scan_body
from rhino_jax.rewrite.emit import substitute
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion


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
    sums = [(m.eqn, m.results.index(v)) for v in values for m in [flat.maker[v]]]
    body = scan_body(scan.eqn, lambda e: _holds(e, sums), sums)
    count = len(scan.results)
    stacked = body.outputs[count:]
    late = _late(body, scan, stacked)
    split = SplitScan(scan, body, {*range(count)} - late, stacked)

    def in_two(eqn: Any, operands: list[Any]) -> list[Any] | None:
        return split.run(operands) if eqn is scan.eqn else None

    return without_dead_code(substitute(closed, in_two))


def _holds(eqn: Any, sums: Sequence[EqnResult]) -> bool:
    """Whether an equation contains one of the summing equations, at any depth."""
    inner = [e for j in closed_region_jaxprs(eqn) for e in open_jaxpr(j).eqns]
    return any(e is s or _holds(e, sums) for e in inner for s, _ in sums)


def _late(body: FlatRegion, scan: FlatOp, sums: Sequence[int]) -> set[int]:
    """Return which results of a scan depend on values of its body, in any iteration."""
    late, before = {*sums}, -1
    while before < len(late):
        before = len(late)
        for reads, makes in zip(body.reads, body.makes, strict=True):
            if not late.isdisjoint(reads):
                late.update(makes)
        carries = zip(scan.call.carries(body.inputs), body.outputs, strict=False)
        late.update(entering for entering, left in carries if left in late)
    return {k for k in range(len(scan.results)) if body.outputs[k] in late}
