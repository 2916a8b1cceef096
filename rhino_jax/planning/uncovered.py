"""What users are told of ops without a rule, of rules without an op, and of ops that
micro-batches leave out."""

from __future__ import annotations

import warnings

from rhino_jax.errors import RhinoWarning, nearest
from rhino_jax.frontend.registry import unmet_rules
from rhino_jax.ir.coverage import KERNELS, rule_name, uncovered
from rhino_jax.ir.program import Program
from rhino_jax.plan.plan import Plan
from rhino_jax.units import format_share


LARGE_SHARE = 0.05
"""Share of FLOPs, or of result bytes, from which an op without a rule is warned of."""

_TOLD: set[tuple[str, str]] = set()


def warn_of_uncovered(program: Program) -> None:
    """Warn of large ops without a rule, once for each name and function.

    The warning stands at the user's line.
    """
    for found in uncovered(program):
        key = (program.name, found.name)
        if max(found.flops, found.bytes) <= LARGE_SHARE or key in _TOLD:
            continue
        _TOLD.add(key)
        source = found.source
        warnings.warn_explicit(
            f"`{program.name}`: `{found.name}` has no rule, so every device computes"
            f" all of it: {format_share(found.flops)} of the FLOPs and"
            f" {format_share(found.bytes)} of the bytes that ops make"
            f" (at {source}). {_advice(found.name)}"
            + nearest(found.name, unmet_rules()),
            RhinoWarning,
            filename=source.file or "<unknown>",
            lineno=source.line or 1,
        )


def warn_of_left_out(program: Program, plan: Plan) -> None:
    """Warn of ops that give nothing, as `jax.debug.print`, where the batch is cut in
    time: what runs then is what results need. Once for each line and function.
    """
    if plan.microbatches <= 1:
        return
    for op in (program.ops[o] for o in program.body.ops):
        key = (program.name, f"{op.name} at {op.source}")
        if op.results or key in _TOLD:
            continue
        _TOLD.add(key)
        warnings.warn_explicit(
            f"`{program.name}`: `{op.name}` at {op.source} gives no result, and does"
            f" not run: the plan is in {plan.microbatches} micro-batches. Return what"
            " it should see, or plan with `stages=1, microbatches=1`.",
            RhinoWarning,
            filename=op.source.file or "<unknown>",
            lineno=op.source.line or 1,
        )


def _advice(name: str) -> str:
    """How to give an op a rule; many kernels share the name of their primitive."""
    if name in KERNELS:
        return (
            "Give the kernel a name, and say under it how it may be cut:"
            " rhino.register_rule('my_kernel', 'b s d, d f -> b s f')."
        )
    return (
        f"Say how it may be cut: rhino.register_rule({name!r}, 'b s d, d f -> b s f')."
    )


def notes_of_rules(program: Program) -> tuple[str, ...]:
    """Notes on rules that were registered under names that no program has had."""
    names = unmet_rules()
    if not names:
        return ()
    there = {rule_name(op) for op in program.ops}
    said = [f"{name!r}.{nearest(name, there)}" for name in names]
    return (
        "rules are registered for names that no op has had so far: " + " ".join(said),
    )
