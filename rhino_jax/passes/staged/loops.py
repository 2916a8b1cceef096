"""Backward scans split in two: what is waited for, and gradients of weights.

A scan over layers, differentiated, computes in each step the gradient that the next one
reads, and those of the layer's weights, which nothing reads. As one op both would be
waited for. Split in two, the first scan computes the gradient that is passed along, and
stacks what the second one reads of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from rhino_jax._compat import without_dead_code
from rhino_jax.frontend.regions import REMATS
from rhino_jax.passes.split_scan import scan_body, scan_in_two
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.labels import Labels
from rhino_jax.rewrite.retraced import traced_on


def apart_loops(apart: Apart, labels: Labels) -> Apart:
    """Return the step with backward scans split in two, or itself where it has none.

    Args:
      apart: the step.
      labels: of its micro-batches, with backward passes whole.
    """
    region, waited_for = labels.region, labels.waited_for[1]
    loops: dict[int, Callable[..., list[Any]]] = {}
    for i, (makes, label) in enumerate(zip(region.makes, labels.of, strict=True)):
        wanted = [k for k, v in enumerate(makes) if v in waited_for]
        is_back = label is not None and labels.turn(label) == 1
        if is_back and wanted and region.ops[i].is_scan:
            # Recomputation in a layer under `jax.checkpoint` runs in the first scan
            # alone: the second reads what it needs of it from stacks.
            body = scan_body(region.ops[i].eqn, _is_call)
            run_both, second = scan_in_two(region.ops[i], body, wanted)
            if any(body.ops[k].op.traits.is_contraction for k in second):
                loops[i] = run_both
    if not loops:
        return apart

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(region.inputs, arrays, strict=True))
        for i, each in enumerate(region.ops):
            if i not in loops:
                region.run([i], env)
                continue
            with each.context():
                results = loops[i](region.arguments(i, env))
            env.update(zip(each.results, results, strict=True))
        return [region.result(v, env) for v in region.outputs]

    types = [region.avals[v] for v in region.inputs]
    return replace(apart, piece=without_dead_code(traced_on(run, types)))


def _is_call(eqn: Any) -> bool:
    return eqn.primitive.name in ("jit", "pjit", *REMATS)
