"""How much of a plan is said to the compiler.

Saying everything is how rhino applies a plan. Saying only what goes into and comes
out of every matmul is how people write it by hand, at best; what lies between is left
to the compiler's propagation.
"""

from __future__ import annotations

from rhino_jax.ir.program import Program, RegionKind
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.decisions import Decisions


MATMULS = ("dot_general", "conv_general_dilated")


def only_around_matmuls(program: Program, decisions: Decisions) -> Decisions:
    """Decisions about the program's arguments and results, loops' borders, and the
    operands and results of matmuls and convolutions; nothing about other values.

    Args:
      program: the planned program.
      decisions: specs of all its values.
    """
    held = decisions.values
    kept = {i.value for i in program.inputs} | {o.value for o in program.outputs}
    operands: dict[tuple[int, int], Spec] = {}
    for op in program.ops:
        is_loop = op.call is not None and op.call.kind in _LOOPS
        if op.name not in MATMULS and not is_loop:
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
        says_stops=False,
    )


_LOOPS = (RegionKind.SCAN, RegionKind.WHILE)
