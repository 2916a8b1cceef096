"""Offloaded state: what only a step's update reads is in host memory between steps.

In: a closed jaxpr, its `Program`, and a choice as text, as `{"inputs": [3, 4]}`.
Out: a closed jaxpr of the same arguments and results, of which those inputs, and the
results that are fed back into them, are in the memory of the host.

Moments of an optimizer are read when the gradients are there, and not before: until
then they need no device memory. Each is copied to the devices behind the values that it
is combined with, and back when it is updated; what is computed from one leaf's state
comes before the next leaf's, so that few are on the devices at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import compress
from typing import Any

import jax

from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import OFFLOADED, Transform, chosen
from rhino_jax.passes.program_pass import ChoiceLimits, ProgramPass
from rhino_jax.passes.remat.frame import can_tie, from_host, to_host
from rhino_jax.rewrite.flat import FlatRegion
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.rewrite.retraced import retraced


SHARES = (0.5, 1.0)
"""Shares of the state that can be offloaded, in bytes, that are tried."""


def offload_state(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program to keep some of its state in the memory of the host.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: JSON: the positions of the inputs, as `{"inputs": [3, 4]}`.
    Returns:
      A closed jaxpr of the same arguments and results but for their memory.
    """
    slots = frozenset(json.loads(choice)["inputs"])
    region = flatten(program, closed).top
    hosted = {region.inputs[slot] for slot in slots}
    is_updated = [output.state_of in slots for output in program.outputs]
    updated = set(compress(region.outputs, is_updated))
    early = set(range(len(region.ops))) - region.behind(hosted)

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(region.inputs, arrays, strict=True))
        region.run(sorted(early), env)
        waiting, sent = set(hosted), dict[int, Any]()
        for value in region.outputs:
            for i in sorted(region.needed([value], env)[0]):
                # What the op reads of the values that wait on the host is copied to
                # the devices when its other operands are there.
                reads = region.reads[i]
                ties = [env[v] for v in reads if v in env and v not in waiting]
                for v in waiting.intersection(reads):
                    env[v] = from_host(env[v], [x for x in ties if can_tie(x)][:1])
                    waiting.discard(v)
                region.run([i], env)
                sent.update(
                    (v, to_host(env[v])) for v in updated.intersection(region.makes[i])
                )
        return [
            sent[v] if goes_back else region.result(v, env)
            for v, goes_back in zip(region.outputs, is_updated, strict=True)
        ]

    return retraced(closed, run, on_host=slots)


def _choices(traced: Traced, limits: ChoiceLimits) -> Iterator[Transform]:
    """Yield more and more of the state, the largest arrays first."""
    program = traced.program
    region = flatten(program, traced.closed_jaxpr).top
    state = _state(region, program)
    total = sum(region.bytes(region.inputs[s]) for s in state)
    for share in SHARES:
        taken, size = list[int](), 0
        for slot in state:
            if size < share * total:
                taken.append(slot)
                size += region.bytes(region.inputs[slot])
        if taken:
            yield chosen(OFFLOADED, {"inputs": sorted(taken)})


def _state(region: FlatRegion, program: Program) -> list[int]:
    """Return the inputs that can be offloaded, the largest first: state that no matrix
    product and no effect depends on, and that each step replaces."""
    found = []
    for output, result in zip(program.outputs, region.outputs, strict=True):
        slot = output.state_of
        if slot is None or not program.inputs[slot].is_donated:
            continue
        value = region.inputs[slot]
        aval = region.avals[value]
        is_array = isinstance(aval, jax.core.ShapedArray) and aval.ndim > 0
        if not is_array or result in region.inputs or program.values[value].on_host:
            continue
        ops = [region.ops[i].op for i in region.behind([value])]
        stays = (op.traits.is_contraction or op.traits.has_effects for op in ops)
        if not any(stays) and all(op.call is None for op in ops):
            found.append(slot)
    return sorted(found, key=lambda s: -region.bytes(region.inputs[s]))


PASS = ProgramPass(OFFLOADED, offload_state, _choices)
