"""What users are told of arguments that take more memory than they need."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from rhino_jax.ir.program import Program
from rhino_jax.plan.kept import keys_of
from rhino_jax.plan.plan import Leaf, Plan
from rhino_jax.planning.uncovered import LARGE_SHARE
from rhino_jax.transform.microbatch.flow.batch import data_inputs
from rhino_jax.units import format_bytes


def notes_of_arguments(program: Program, plan: Plan) -> tuple[str, ...]:
    """Return notes on state that is not donated, and on a batch that does not divide.

    Args:
      program: as its user wrote it.
      plan: its plan.
    """
    return (*_not_donated(program, plan), *_uneven(program, plan))


def _not_donated(program: Program, plan: Plan) -> Iterator[str]:
    """State is held twice where it comes back and is not donated."""
    inputs = program.inputs
    back = sorted({o.state_of for o in program.outputs if o.state_of is not None})
    kept = [i for i in back if not (inputs[i].is_donated or inputs[i].is_const)]
    leaves = [plan.inputs[i] for i in kept]
    total = sum(leaf.bytes_per_device for leaf in leaves)
    if total <= LARGE_SHARE * plan.predicted.peak_bytes:
        return
    names = list(dict.fromkeys(keys_of(leaf.path)[0] for leaf in leaves))
    yield (
        f"{_listed(names)} {_verb(names, 'comes', 'come')} back and"
        f" {_verb(names, 'is', 'are')} not donated: a device holds"
        f" {format_bytes(total)} more. Give donate_argnums= or donate_argnames=, and"
        " use what the step returns."
    )


def _uneven(program: Program, plan: Plan) -> Iterator[str]:
    """Arguments are cut evenly or not at all."""
    axes = [(name, size) for name, size in plan.mesh_axes if size > 1]
    data = [plan.inputs[i] for i in data_inputs(program)]
    counts = Counter(leaf.shape[0] for leaf in data)
    has_state = any(o.state_of is not None for o in program.outputs)
    if not axes or not counts or plan.num_stages > 1:
        return
    if len(counts) > 1 and not has_state:
        return  # these may be parameters
    rows = counts.most_common(1)[0][0]
    widest = max(size for _, size in axes)
    batch = [leaf for leaf in data if leaf.shape[0] == rows and not any(leaf.spec)]
    if not batch or rows < widest or rows % widest == 0:
        return
    devices = math.prod(size for _, size in axes)
    padded = rows + -rows % devices
    whole = sum(leaf.bytes_per_device for leaf in batch)
    yield (
        f"{_paths(batch)} {_verb(batch, 'lies', 'lie')} whole on every device, as"
        f" {rows} rows do not divide over {_axes(axes)}: {format_bytes(whole)} where an"
        f" even batch has {format_bytes(math.ceil(whole / devices))}. Pad it to"
        f" {padded} rows whose loss counts none of those added, or leave some out."
    )


def _paths(leaves: Sequence[Leaf]) -> str:
    paths = [leaf.path for leaf in leaves]
    return _listed(paths[:3]) + (f" and {len(paths) - 3} more" if paths[3:] else "")


def _axes(axes: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _verb(things: Sequence[object], one: str, several: str) -> str:
    return one if len(things) == 1 else several
