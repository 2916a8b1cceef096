"""The passes that a plan chose, done to the program that its user wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from rhino_jax.errors import PlanFileError
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import (
    BLOCKS,
    CHUNKS,
    MICROBATCHES,
    ONE_PROGRAM,
    PARTIAL_SUMS,
    RECOMPUTE,
    UN_REMAT,
    Transform,
)
from rhino_jax.passes.chunks import chunked
from rhino_jax.passes.deferred_reductions.emit import delayed
from rhino_jax.passes.interleaved.emit import in_blocks
from rhino_jax.passes.microbatch import microbatched
from rhino_jax.passes.remat.rewrite import recomputed
from rhino_jax.passes.remat.unremat import kept_instead
from rhino_jax.passes.retraced import imported_again
from rhino_jax.passes.spmd_pipeline import on_stage


Pass = Callable[[Any, Program, str], Any]
"""A closed jaxpr, the program that was imported from it, and a choice → a closed jaxpr
of the same arguments, constants and results."""

PASSES: Mapping[str, Pass] = {
    BLOCKS: in_blocks,
    UN_REMAT: kept_instead,
    CHUNKS: chunked,
    MICROBATCHES: microbatched,
    ONE_PROGRAM: on_stage,
    RECOMPUTE: recomputed,
    PARTIAL_SUMS: delayed,
}
"""Name of a `Transform` → how it is done."""

BEFORE: Mapping[str, Mapping[str, float]] = {MICROBATCHES: {"kept": 0.0}}
"""Name → what was done before choices of it could say so: rows of earlier loops were
not kept to save one (`passes.microbatch.choice.MicrobatchChoice.kept`)."""


def remade(traced: Traced, transforms: Iterable[Transform]) -> Traced:
    """The same call, with all of these done that were chosen, in order.

    Raises:
      PlanFileError: one of them was done otherwise when the program was planned, by
        another version of this package: the plan says nothing of what it makes now.
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
    key = name, choice
    found = traced.remade.get(key)
    if found is None:
        found = traced.remade[key] = _done(traced, *key)
    return found


def _is_otherwise(transform: Transform, before: Traced, after: Traced) -> bool:
    """Whether a pass that is done again makes something else of the same program."""
    is_again = transform.ops_before == len(before.program.ops)
    return is_again and transform.ops_after != len(after.program.ops)


def _as_then(traced: Traced, transform: Transform, found: Traced) -> Traced:
    """A pass as versions did it that knew fewer choices."""
    before = BEFORE.get(transform.name, {})
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
    jaxpr = PASSES[name](traced.closed_jaxpr, before, choice)
    program = imported_again(jaxpr, before)
    done = Transform(name, len(before.ops), len(program.ops), choice)
    program = replace(program, transforms=(*before.transforms, done))
    return replace(traced, closed_jaxpr=jaxpr, program=program, remade={})
