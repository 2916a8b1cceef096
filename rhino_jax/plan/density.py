"""Annotation density: the values of a program on which a plan sets shardings.

By default ("all") a plan annotates every value. "matmul" annotates the operands and
results of every matmul, as people do by hand at best; values in between are left to the
compiler's propagation. "batch" annotates parameters, optimizer state, and the batch dim
of activations, as most people do.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from rhino_jax.hardware.lowering import AS_WRITTEN
from rhino_jax.ir.program import Program, RegionKind
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.traits import OpKind
from rhino_jax.plan.decisions import Decisions


def only_around_matmuls(program: Program, decisions: Decisions) -> Decisions:
    """Reduce decisions to program arguments and results, loop borders, and matmuls.

    Operands and results of contractions and kernels count as matmuls; nothing is
    decided about other values.

    Args:
      program: the planned program.
      decisions: specs of all its values.
    """
    held = decisions.values
    kept = {i.value for i in program.inputs} | {o.value for o in program.outputs}
    operands: dict[tuple[int, int], Spec] = {}
    for op in program.ops:
        is_loop = op.call is not None and op.call.kind in _LOOPS
        is_kernel = op.traits.kind is OpKind.KERNEL
        if not (op.traits.is_contraction or is_kernel or is_loop):
            continue
        kept |= set(op.results)
        for i, value in enumerate(op.operands):
            spec = decisions.operands.get((op.id, i), held.get(value))
            if spec is not None:
                operands[op.id, i] = spec
        if op.call is not None:
            for region in op.call.regions:
                kept |= {*region.inputs, *region.outputs}
    return Decisions(
        values={v: spec for v, spec in held.items() if v in kept},
        operands=operands,
        region_outputs=decisions.region_outputs,
        outputs=decisions.outputs,
        lowering=AS_WRITTEN.without_waypoints(),
    )


def only_the_batch(
    program: Program, decisions: Decisions, led_by_batch: AbstractSet[int]
) -> Decisions:
    """Reduce decisions to arguments, results, and the batch dim of activations.

    Nothing is decided about other values.

    Args:
      program: the planned program.
      decisions: specs of all its values.
      led_by_batch: ids of the values whose leading dim is the batch; its axes are
        listed in the mesh's order, as people write them.
    """
    held = decisions.values
    kept = {i.value for i in program.inputs} | {o.value for o in program.outputs}
    pinned = {
        v: (tuple(sorted(spec[0])), *((),) * (len(spec) - 1))
        for v, spec in held.items()
        if v in led_by_batch and spec[0]
    }
    return Decisions(
        values=pinned | {v: spec for v, spec in held.items() if v in kept},
        outputs=decisions.outputs,
        lowering=AS_WRITTEN.without_waypoints(),
    )


_LOOPS = (RegionKind.SCAN, RegionKind.WHILE)
