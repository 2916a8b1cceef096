"""The passes that a plan chose, done to the program that its user wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

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
from rhino_jax.transform.blocks.emit import in_blocks
from rhino_jax.transform.chunks import chunked
from rhino_jax.transform.microbatch import microbatched
from rhino_jax.transform.one_program import on_stage
from rhino_jax.transform.partial_sums.emit import delayed
from rhino_jax.transform.recompute.as_kept import kept_instead
from rhino_jax.transform.recompute.written_anew import recomputed
from rhino_jax.transform.retraced import imported_again


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


def remade(traced: Traced, transforms: Iterable[Transform]) -> Traced:
    """The same call, with all of these done that were chosen, in order."""
    for transform in transforms:
        if not transform.choice:
            continue
        key = transform.name, transform.choice
        found = traced.remade.get(key)
        if found is None:
            found = traced.remade[key] = _done(traced, *key)
        traced = found
    return traced


def _done(traced: Traced, name: str, choice: str) -> Traced:
    before = traced.program
    jaxpr = PASSES[name](traced.closed_jaxpr, before, choice)
    program = imported_again(jaxpr, before)
    done = Transform(name, len(before.ops), len(program.ops), choice)
    program = replace(program, transforms=(*before.transforms, done))
    return replace(traced, closed_jaxpr=jaxpr, program=program, remade={})
