"""Split a scan in two: the second one reads stacks of what the first one computed.

Loop fission, of a scan over layers whose body needs a sum over the batch: the first
scan computes, layer by layer, the sums (stacked, each still partial over micro-batches)
and all that does not depend on them; the second reads the complete sums. So the
load-balancing loss of a mixture of experts, in a scan over its layers, costs one more
forward pass, as it does in unrolled layers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rhino_jax._compat import bind_eqn, jaxpr_consts, open_jaxpr, without_dead_code
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.rewrite.emit import run_inlined, scan_like, substitute
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion
from rhino_jax.rewrite.flatten import flat_region
from rhino_jax.rewrite.retraced import traced_on


EqnResult = tuple[Any, int]
"""An equation, and the index of one of its results."""


def scan_body(
    eqn: Any, is_inlined: Callable[[Any], bool], exposed: Sequence[EqnResult] = ()
) -> FlatRegion:
    """Return the body of a scan with calls inlined.

    Args:
      eqn: the scan.
      is_inlined: whether the call of an equation is inlined.
      exposed: values of the body that are outputs, too, after its own.
    """
    (closed,) = closed_region_jaxprs(eqn)
    jaxpr, consts = open_jaxpr(closed), jaxpr_consts(closed)
    made: dict[int, list[Any]] = {}

    def instead(inner: Any, arrays: list[Any]) -> list[Any] | None:
        if all(inner is not e for e, _ in exposed):
            return None
        made[id(inner)] = bind_eqn(inner, arrays, inner.params)
        return made[id(inner)]

    def run(*arrays: Any) -> list[Any]:
        outs = run_inlined(jaxpr, consts, arrays, instead, is_inlined)
        return [*outs, *(made[id(e)][i] for e, i in exposed)]

    return flat_region(traced_on(run, [v.aval for v in jaxpr.invars]))


def scan_in_two(
    each: FlatOp,
    body: FlatRegion,
    wanted: Iterable[int],
    stacked: Collection[int] | None = None,
) -> tuple[Callable[[Sequence[Any]], list[Any]], set[int]]:
    """Divide a scan into two, each of which computes some of its results.

    Args:
      each: the scan.
      body: of one step; see `scan_body`.
      wanted: results of the first scan, which has the carries for them, too.
      stacked: values of a step that the second scan may read of the first; None: all
        that the first one computes for its results.
    Returns:
      A function of the scan's operands that runs both, and returns its results; and
        positions of the ops that the second one runs: those with side effects that the
        first does not need, too.
    """
    call, num_carry = each.call, each.call.num_carry
    carries = call.carries(body.inputs)

    def needed(
        which: Iterable[int], values: Iterable[int], known: set[int]
    ) -> tuple[list[int], set[int], set[int]]:
        """Return results with the carries that they need, and as `FlatRegion.needed`
        for these and some values."""
        found = {*which}
        while True:
            outs = [body.outputs[k] for k in found]
            ops, read = body.needed([*outs, *values], known)
            more = {k for k, v in enumerate(carries) if v in read - known} - found
            if not more:
                return sorted(found), ops, read
            found |= more

    early, first, _ = needed(wanted, stacked or (), set())
    made = {*(stacked or ())}
    if stacked is None:
        made = body.made_by(first) | {carries[k] for k in early if k < num_carry}
    rest = {*range(len(each.results))} - {*early}
    effects = {i for i, e in enumerate(body.ops) if e.eqn.effects} - first
    late, second, read = needed(rest, body.read_by(effects), made)
    second |= effects
    saved = sorted(read & made)

    def run(operands: Sequence[Any]) -> list[Any]:
        results: dict[int, Any] = {}

        def scan(
            which: Sequence[int],
            ops: Collection[int],
            xs: dict[int, Any],
            gives: Sequence[int],
        ) -> list[Any]:
            """Run a scan of some ops of the body; return stacks of `gives`."""
            mine = [k for k in which if k < num_carry]

            def step(carry: Any, slices: Any) -> tuple[list[Any], list[Any]]:
                env = dict(zip(body.inputs, call.consts(operands), strict=False))
                env.update(zip((carries[k] for k in mine), carry, strict=True))
                env.update(zip(xs, slices, strict=True))
                body.run(sorted(ops), env)
                outs = [body.result(body.outputs[k], env) for k in which]
                return outs[: len(mine)], [*outs[len(mine) :], *(env[v] for v in gives)]

            init = [call.carries(operands)[k] for k in mine]
            ends, ys = scan_like(each.eqn, step, init, [*xs.values()])
            for k, x in zip(which, (*ends, *ys), strict=False):
                results.setdefault(k, x)
            return list(ys[len(which) - len(mine) :])

        rows = zip(call.sliced(body.inputs), call.sliced(operands), strict=True)
        xs = dict(rows)
        xs |= zip(saved, scan(early, first, xs, saved), strict=True)
        scan(late, second, xs, [])
        return [results[k] for k in range(len(results))]

    return run, second


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
    carries = [*zip(scan.call.carries(body.inputs), body.outputs, strict=False)]
    late, before = {*stacked}, -1
    while before < len(late):  # values that depend on the sums, in any iteration
        before = len(late)
        late |= body.made_by(body.behind(late))
        late.update(entering for entering, left in carries if left in late)
    wanted = [k for k in range(count) if body.outputs[k] not in late]
    run, _ = scan_in_two(scan, body, wanted, stacked)

    def in_two(eqn: Any, operands: list[Any]) -> list[Any] | None:
        return run(operands) if eqn is scan.eqn else None

    return without_dead_code(substitute(closed, in_two))


def _holds(eqn: Any, sums: Sequence[EqnResult]) -> bool:
    """Whether an equation contains one of the summing equations, at any depth."""
    inner = [e for j in closed_region_jaxprs(eqn) for e in open_jaxpr(j).eqns]
    return any(e is s or _holds(e, sums) for e in inner for s, _ in sums)
