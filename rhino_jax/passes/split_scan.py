"""Split a scan in two: the second one reads stacks of what the first one computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from rhino_jax._compat import bind_eqn, jaxpr_consts, open_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.rewrite.emit import run_inlined, scan_like
from rhino_jax.rewrite.flat import FlatOp, FlatRegion
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


class SplitScan:
    """A scan as two: each computes some of its results.

    Attributes:
      body: of one step.
      early, late: positions of results, carries first, that the first and the second
        scan compute.
      first, second: positions of the ops that they run; those with side effects that
        the first does not need are in the second.
      saved: values of a step that the second scan reads of the first.
    """

    def __init__(
        self,
        each: FlatOp,
        body: FlatRegion,
        wanted: Iterable[int],
        stacked: Collection[int] | None = None,
    ) -> None:
        """Divide the ops of a scan's body.

        Args:
          each: the scan.
          body: see `scan_body`.
          wanted: results of the first scan, which has the carries for them, too.
          stacked: values of a step that the second scan may read of the first; None:
            all that the first one computes for its results.
        """
        self.eqn, self.call, self.body = each.eqn, each.call, body
        self.early, self.first, _ = self._needed(wanted, stacked or (), set())
        made = {*(stacked or ())}
        if stacked is None:
            made = body.made_by(self.first)
            made |= {self.carry(k) for k in self.early if k < self.call.num_carry}
        rest = {*range(len(each.results))} - {*self.early}
        effects = {i for i, e in enumerate(body.ops) if e.eqn.effects} - self.first
        values = body.read_by(effects)
        self.late, self.second, read = self._needed(rest, values, made)
        self.second |= effects
        self.saved = sorted(read & made)

    def carry(self, position: int) -> int:
        """Return the input of the body that is a carry."""
        return self.body.inputs[self.call.num_consts + position]

    def _needed(
        self, wanted: Iterable[int], values: Iterable[int], known: set[int]
    ) -> tuple[list[int], set[int], set[int]]:
        """Return results with the carries that they need, and as `FlatRegion.needed`
        for these and some values."""
        found, body = {*wanted}, self.body
        while True:
            outs = [body.outputs[k] for k in found]
            ops, read = body.needed([*outs, *values], known)
            carries = range(self.call.num_carry)
            more = {k for k in carries if self.carry(k) in read - known} - found
            if not more:
                return sorted(found), ops, read
            found |= more

    def run(self, operands: Sequence[Any]) -> list[Any]:
        """Run both scans, and return the results of the one that they are."""
        call, body = self.call, self.body
        results: dict[int, Any] = {}

        def scan(
            which: Sequence[int],
            ops: Collection[int],
            xs: dict[int, Any],
            gives: Sequence[int],
        ) -> list[Any]:
            """Run a scan of some ops of the body; return stacks of `gives`."""
            mine = [k for k in which if k < call.num_carry]

            def step(carry: Any, slices: Any) -> tuple[list[Any], list[Any]]:
                env = dict(zip(body.inputs, call.consts(operands), strict=False))
                env.update(zip(map(self.carry, mine), carry, strict=True))
                env.update(zip(xs, slices, strict=True))
                body.run(sorted(ops), env)
                made = [body.result(body.outputs[k], env) for k in which]
                stacked = [*made[len(mine) :], *(env[v] for v in gives)]
                return made[: len(mine)], stacked

            init = [operands[call.num_consts + k] for k in mine]
            ends, ys = scan_like(self.eqn, step, init, [*xs.values()])
            for k, x in zip(which, (*ends, *ys), strict=False):
                results.setdefault(k, x)
            return list(ys[len(which) - len(mine) :])

        rows = zip(call.sliced(body.inputs), call.sliced(operands), strict=True)
        xs = dict(rows)
        saved = scan(self.early, self.first, xs, self.saved)
        scan(self.late, self.second, xs | dict(zip(self.saved, saved, strict=True)), [])
        return [results[k] for k in range(len(results))]
