"""Backward scans split in two: what is waited for, and gradients of weights.

A scan over layers, differentiated, computes in each step the gradient that the next one
reads, and those of the layer's weights, which nothing reads. As one op both would be
waited for. Split in two, the first scan computes the gradient that is passed along, and
stacks what the second one reads of it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

from rhino_jax._compat import hide_frames, without_dead_code
from rhino_jax.frontend.regions import REMATS
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.rewrite.emit import inline_body, scan_like
from rhino_jax.rewrite.flat import FlatOp
from rhino_jax.rewrite.flatten import flat_region
from rhino_jax.rewrite.retraced import traced_on


hide_frames(__file__)


def apart_loops(apart: Apart, labels: Labels) -> Apart | None:
    """Return the step with backward scans split in two; None where there are none.

    Args:
      apart: the step.
      labels: of its micro-batches, with backward passes whole.
    """
    region, waited_for = labels.region, labels.waited_for[1]
    loops: dict[int, _SplitScan] = {}
    for i, (makes, label) in enumerate(zip(region.makes, labels.of, strict=True)):
        wanted = [k for k, v in enumerate(makes) if v in waited_for]
        is_back = label is not None and labels.turn(label) == 1
        if is_back and wanted and region.ops[i].is_scan:
            loop = _SplitScan(region.ops[i], wanted)
            if loop.is_worth_it:
                loops[i] = loop
    if not loops:
        return None

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(region.inputs, arrays, strict=True))
        for i, each in enumerate(region.ops):
            if i not in loops:
                region.run([i], env)
                continue
            with each.context():
                results = loops[i].run(region.arguments(i, env))
            env.update(zip(each.results, results, strict=True))
        return [region.result(v, env) for v in region.outputs]

    types = [region.avals[v] for v in region.inputs]
    return replace(apart, piece=without_dead_code(traced_on(run, types)))


class _SplitScan:
    """A scan, and which of its results come from the first of two scans.

    Attributes:
      body: of one step.
      early: positions of results, carries first, that the first scan computes.
      saved: values of a step that the second scan reads of the first.
    """

    def __init__(self, each: FlatOp, wanted: Sequence[int]) -> None:
        self.eqn, self.call = each.eqn, each.call
        # Recomputation in a layer under `jax.checkpoint` runs in the first scan alone:
        # the second reads what it needs of it from stacks.
        self.body = body = flat_region(inline_body(each.eqn, _is_call))
        self.early = self._early(wanted)
        outs = body.outputs
        self.first, _ = body.needed(outs[k] for k in self.early)
        made = body.made_by(self.first)
        made |= {self._carry(k) for k in self.early if k < self.call.num_carry}
        self.late = [k for k in range(len(outs)) if k not in set(self.early)]
        self.second, read = body.needed([outs[k] for k in self.late], made)
        self.saved = sorted(read & made)

    @property
    def is_worth_it(self) -> bool:
        """Whether the second scan has matmuls or convolutions."""
        return any(self.body.ops[i].op.traits.is_contraction for i in self.second)

    def _carry(self, position: int) -> int:
        return self.body.inputs[self.call.num_consts + position]

    def _early(self, wanted: Sequence[int]) -> list[int]:
        """Return the results of the first scan: wanted ones, and carries for them."""
        found = set(wanted)
        while True:
            _, read = self.body.needed(self.body.outputs[k] for k in found)
            carries = range(self.call.num_carry)
            more = {k for k in carries if self._carry(k) in read} - found
            if not more:
                return sorted(found)
            found |= more

    def run(self, operands: list[Any]) -> list[Any]:
        call, body = self.call, self.body
        results: dict[int, Any] = {}

        def scan(
            which: Sequence[int], ops: Set[int], xs: dict[int, Any], gives: list[int]
        ) -> list[Any]:
            """Run a scan of some ops of the body; return stacks of `gives`."""
            mine = [k for k in which if k < call.num_carry]

            def step(carry: Any, slices: Any) -> tuple[list[Any], list[Any]]:
                env = dict(zip(body.inputs, call.consts(operands), strict=False))
                env.update(zip(map(self._carry, mine), carry, strict=True))
                env.update(zip(xs, slices, strict=True))
                body.run(sorted(ops), env)
                made = [body.result(body.outputs[k], env) for k in which]
                stacked = [*made[len(mine) :], *(env[v] for v in gives)]
                return made[: len(mine)], stacked

            init = [operands[call.num_consts + k] for k in mine]
            ends, ys = scan_like(self.eqn, step, init, [*xs.values()])
            results.update(zip(which, (*ends, *ys), strict=False))
            return list(ys[len(which) - len(mine) :])

        rows = zip(call.sliced(body.inputs), call.sliced(operands), strict=True)
        xs = dict(rows)
        saved = scan(self.early, self.first, xs, self.saved)
        scan(self.late, self.second, xs | dict(zip(self.saved, saved, strict=True)), [])
        return [results[k] for k in range(len(results))]


def _is_call(eqn: Any) -> bool:
    return eqn.primitive.name in ("jit", "pjit", *REMATS)
