"""Program passes, in order, and their application by name.

The planner tries them (`planner.variants`), a plan records what was chosen, and the
runtime applies that to the user's program again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rhino_jax.errors import PlanFileError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.transform import FORMS, Transform
from rhino_jax.passes import (
    chunks,
    deferred_reductions,
    experts,
    interleaved,
    microbatch,
    offload,
    spmd_pipeline,
    stacked,
    unroll,
)
from rhino_jax.passes.forms import in_forms
from rhino_jax.passes.program_pass import ProgramPass
from rhino_jax.passes.remat import emit as remat, unremat
from rhino_jax.rewrite.retraced import reimported


PASSES: Mapping[str, ProgramPass] = {
    each.name: each
    for each in (
        interleaved.PASS,
        interleaved.BATCHES,
        unremat.PASS,
        unroll.PASS,
        chunks.PASS,
        remat.PASS,
        microbatch.PASS,
        offload.PASS,
        experts.PASS,
        stacked.PASS,
        spmd_pipeline.PASS,
        deferred_reductions.PASS,
    )
}
"""Name of a `Transform` → the pass that implements it, in the order in which the
planner tries and applies them."""


def apply_passes(traced: Traced, transforms: Iterable[Transform]) -> Traced:
    """Apply the chosen transforms to a traced call, in order.

    Args:
      traced: the call as traced from the user's function.
      transforms: passes with their choices; those without a choice are skipped.
    Returns:
      The same call with the rewritten program.
    Raises:
      PlanFileError: this version of the package rewrites the program differently from
        the version that made the plan, so the plan does not describe the result.
    """
    for transform in transforms:
        if not transform.choice:
            continue
        key = transform.name, transform.choice
        found = traced.after_passes.get(key)
        if found is None:
            found = traced.after_passes[key] = _done(traced, *key)
        # A program of another size before the pass is another one after it, too.
        is_again = transform.ops_before == len(traced.program.ops)
        if is_again and transform.ops_after != len(found.program.ops):
            raise PlanFileError(
                f"the plan of `{traced.name}` was made by a version of rhino_jax that"
                f" does the pass {transform.name!r} otherwise.",
                where=f"choice {transform.choice}",
                numbers=f"{transform.ops_after} ops then, {len(found.program.ops)} now,"
                f" of {transform.ops_before}",
                fix="plan again and save that plan, or use the version that made it.",
            )
        traced = found
    return traced


def _done(traced: Traced, name: str, choice: str) -> Traced:
    before = traced.program
    if name == FORMS:
        done = in_forms(traced, choice)
    else:
        done = PASSES[name].apply(traced.closed_jaxpr, before, choice)
        trips = (*before.while_trips, *PASSES[name].trips.items())
        before = replace(before, while_trips=trips)
    jaxpr, choice = done if isinstance(done, tuple) else (done, choice)
    program = reimported(jaxpr, before)
    ran = Transform(name, len(before.ops), len(program.ops), choice)
    program = replace(program, transforms=(*before.transforms, ran))
    return replace(traced, closed_jaxpr=jaxpr, program=program, after_passes={})
