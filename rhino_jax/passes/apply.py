"""Program passes, in order: what each applies, and the choices that a program allows.

The planner tries them (`planner.variant_search`), a plan records what was chosen, and
the runtime applies that to the user's program again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rhino_jax.errors import MicrobatchError, PlanFileError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.blocks import as_text
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import (
    BLOCKS,
    CHUNKS,
    DEFERRED_REDUCTIONS,
    MICROBATCHES,
    ONE_PROGRAM,
    RECOMPUTE,
    UN_REMAT,
    Transform,
    chosen,
)
from rhino_jax.passes.chunks import chunked, may_chunk
from rhino_jax.passes.deferred_reductions.emit import delayed
from rhino_jax.passes.interleaved import in_blocks, split_inputs
from rhino_jax.passes.microbatch import may_cut, microbatched
from rhino_jax.passes.remat.rewrite import recomputed
from rhino_jax.passes.remat.unremat import ALL, has_remat, without_remat
from rhino_jax.passes.spmd_pipeline import on_stage
from rhino_jax.rewrite.retraced import reimported


MAX_DOUBLINGS = 8
"""Maximum number of doublings of the number of micro-batches: up to 256."""

CHUNK_COUNTS = (4, 16)
"""Numbers of chunks to try: with the fewest, the rest of the logits of 50,000 classes
is about one layer's activations; more chunks are worth a try where the logits still
make the peak. Every chunk reads the head's weights and accumulates their gradient once
more."""

WITHOUT_REMAT = Transform(UN_REMAT, 0, 0, ALL)
"""The pass that drops `jax.checkpoint`: everything that it would recompute is saved."""


def cut_in(count: int, places: Sequence[str] = ()) -> Transform:
    """Return the pass that splits the batch into micro-batches.

    Args:
      count: the number of micro-batches.
      places: places where sums over the batch are taken over each micro-batch.
    """
    own = {"per_microbatch": list(places)} if places else {}
    return chosen(MICROBATCHES, {"count": count, **own})


def _stored(traced: Traced, *, counts: Iterable[int]) -> Iterator[Transform]:
    """Yield storage of fused weights in some numbers of blocks, each once."""
    closed, program = traced.closed_jaxpr, traced.program
    found = (as_text(split_inputs(closed, program, count)) for count in counts)
    for choice in dict.fromkeys(found):
        if choice:
            yield Transform(BLOCKS, 0, 0, choice)


def _without_remat(traced: Traced) -> Iterator[Transform]:
    if has_remat(traced.program):
        yield WITHOUT_REMAT


def _in_chunks(traced: Traced, *, least_bytes: float = 0.0) -> Iterator[Transform]:
    """Yield numbers of chunks of the loss, fewest first; none where its largest array
    is no larger than `least_bytes`, on all devices together."""
    cut = may_chunk(traced.closed_jaxpr, traced.program, CHUNK_COUNTS[0])
    if isinstance(cut, MicrobatchError):
        return
    (loop,), program = cut.loops, cut.program
    made = (v for op in loop.ops for v in program.ops[op].results)
    if max(program.values[v].bytes for v in made) > least_bytes:
        for count in CHUNK_COUNTS:
            if count <= cut.rows:
                yield chosen(CHUNKS, {"count": count})


def _in_micro_batches(
    traced: Traced, *, places: Sequence[str] = ()
) -> Iterator[Transform]:
    """Yield numbers of micro-batches, fewest first.

    Args:
      traced: the call.
      places: see `cut_in`.
    Raises:
      MicrobatchError: the program has no batch that can be split.
    """
    closed, program = traced.closed_jaxpr, traced.program
    cut = may_cut(closed, program, 2, per_microbatch=tuple(places))
    if isinstance(cut, MicrobatchError):
        raise cut
    for count in (2**k for k in range(1, MAX_DOUBLINGS + 1)):
        if count <= cut.rows:
            # Each has as many rows as the largest of `count` would.
            yield cut_in(math.ceil(cut.rows / math.ceil(cut.rows / count)), places)


def _by_plan(traced: Traced) -> Iterator[Transform]:
    return iter(())


@dataclass(frozen=True, slots=True)
class ProgramPass:
    """A rewrite of a program, from which the planner's variants are made.

    Attributes:
      name: the name of its `Transform`.
      apply: (closed jaxpr, the program imported from it, choice) → a closed jaxpr of
        the same arguments, constants and results; or that, and the choice as it was
        applied.
      choices: (traced call, options) → the choices that the program allows, least
        change first; none for a pass whose choices depend on a plan of the program.
      older: fields of its choice, with the values that they had before choices could
        state them.
    """

    name: str
    apply: Callable[[Any, Program, str], Any]
    choices: Callable[..., Iterable[Transform]] = _by_plan
    older: Mapping[str, float] = field(default_factory=dict)


PASSES: Mapping[str, ProgramPass] = {
    each.name: each
    for each in (
        ProgramPass(BLOCKS, in_blocks, _stored),
        ProgramPass(UN_REMAT, without_remat, _without_remat),
        ProgramPass(CHUNKS, chunked, _in_chunks),
        # Per-row values of earlier loops were not saved to avoid a loop, once
        # (`passes.microbatch.choice.MicrobatchChoice.kept`).
        ProgramPass(MICROBATCHES, microbatched, _in_micro_batches, {"kept": 0.0}),
        ProgramPass(ONE_PROGRAM, on_stage),
        ProgramPass(RECOMPUTE, recomputed),
        ProgramPass(DEFERRED_REDUCTIONS, delayed),
    )
}
"""Name of a `Transform` → the pass that implements it, in the order of application."""


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
            found = _as_then(traced, transform, found)
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


def _as_then(traced: Traced, transform: Transform, found: Traced) -> Traced:
    """Rerun a pass as older versions did, whose choices had fewer fields.

    Args:
      traced: the call before the pass.
      transform: the pass, with the op counts recorded in the plan.
      found: the result of the pass in this version.
    Raises:
      PlanFileError: no known older behavior yields the recorded op count either.
    """
    before = PASSES[transform.name].older
    if before and before.keys().isdisjoint(transform.chosen):
        text = json.dumps({**transform.chosen, **before}, sort_keys=True)
        older = _kept(traced, transform.name, text)
        if not _is_otherwise(transform, traced, older):
            return older
    raise PlanFileError(
        f"the plan of `{traced.name}` was made by a version of rhino_jax that does the"
        f" pass {transform.name!r} otherwise.",
        where=f"choice {transform.choice}",
        numbers=f"{transform.ops_after} ops then, {len(found.program.ops)} now, of"
        f" {transform.ops_before}",
        fix="plan again and save that plan, or use the version that made it.",
    )


def _done(traced: Traced, name: str, choice: str) -> Traced:
    before = traced.program
    done = PASSES[name].apply(traced.closed_jaxpr, before, choice)
    jaxpr, choice = done if isinstance(done, tuple) else (done, choice)
    program = reimported(jaxpr, before)
    ran = Transform(name, len(before.ops), len(program.ops), choice)
    program = replace(program, transforms=(*before.transforms, ran))
    return replace(traced, closed_jaxpr=jaxpr, program=program, after_passes={})
