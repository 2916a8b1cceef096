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
    spmd_pipeline,
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
        experts.PASS,
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
        found = _kept(traced, transform.name, transform.choice)
        if _is_otherwise(transform, traced, found):
            raise _changed(traced, transform, found)
        traced = found
    return traced


def _kept(traced: Traced, name: str, choice: str) -> Traced:
    """Return the result of a pass on a traced call, cached by name and choice."""
    key = name, choice
    found = traced.after_passes.get(key)
    if found is None:
        found = traced.after_passes[key] = _done(traced, *key)
    return found


def _is_otherwise(transform: Transform, before: Traced, after: Traced) -> bool:
    """Whether a rerun of a pass yields another number of ops than the plan recorded.

    False where the program before the pass differs from the recorded size, too.

    Args:
      transform: the pass, with the op counts recorded in the plan.
      before: the call before the pass.
      after: the call after the pass.
    """
    is_again = transform.ops_before == len(before.program.ops)
    return is_again and transform.ops_after != len(after.program.ops)


def _changed(traced: Traced, transform: Transform, found: Traced) -> PlanFileError:
    """Return the error of a pass that rewrites otherwise than when the plan was made.

    Args:
      traced: the call before the pass.
      transform: the pass, with the op counts recorded in the plan.
      found: the result of the pass in this version.
    """
    return PlanFileError(
        f"the plan of `{traced.name}` was made by a version of rhino_jax that does the"
        f" pass {transform.name!r} otherwise.",
        where=f"choice {transform.choice}",
        numbers=f"{transform.ops_after} ops then, {len(found.program.ops)} now, of"
        f" {transform.ops_before}",
        fix="plan again and save that plan, or use the version that made it.",
    )


def _done(traced: Traced, name: str, choice: str) -> Traced:
    before = traced.program
    if name == FORMS:
        done = in_forms(traced, choice)
    else:
        done = PASSES[name].apply(traced.closed_jaxpr, before, choice)
    jaxpr, choice = done if isinstance(done, tuple) else (done, choice)
    program = reimported(jaxpr, before)
    ran = Transform(name, len(before.ops), len(program.ops), choice)
    program = replace(program, transforms=(*before.transforms, ran))
    return replace(traced, closed_jaxpr=jaxpr, program=program, after_passes={})
