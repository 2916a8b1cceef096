"""Notes and warnings on ops without a rule, rules without an op, ops left out of micro-
batches, arguments that take more memory than necessary, and sums over the batch in
micro-batches, with the check of the places named for these.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from rhino_jax.analysis.roles import data_inputs
from rhino_jax.errors import MicrobatchError, RhinoWarning, nearest
from rhino_jax.frontend.registry import unmet_rules
from rhino_jax.frontend.trace import Traced
from rhino_jax.hardware.target import Target
from rhino_jax.ir.coverage import KERNELS, rule_name, uncovered
from rhino_jax.ir.op import Source
from rhino_jax.ir.places import at_place, known_places
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import axes_text
from rhino_jax.ir.transform import MICROBATCHES, Transform
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.microbatch import MicrobatchCut, may_cut
from rhino_jax.plan.kept import keys_of
from rhino_jax.plan.plan import Leaf, PlanData
from rhino_jax.units import format_bytes, format_share
from rhino_jax.utils.keywords import brief


LARGE_SHARE = 0.05
"""Minimum share of FLOPs, or of result bytes, of an op without a rule for a warning;
and minimum share of the peak for a note on memory."""

_TOLD: set[tuple[str, str]] = set()


def warn_of_uncovered(program: Program) -> None:
    """Warn of large ops without a rule, once for each name and function.

    The warning points at the user's line.
    """
    for found in uncovered(program):
        key, source = (program.name, found.name), found.source
        if max(found.flops, found.bytes) <= LARGE_SHARE or key in _TOLD:
            continue
        # Many kernels share a primitive's name.
        advice = (
            "Give the kernel a name, and register how it may be sharded:"
            " rhino.register_rule('my_kernel', 'b s d, d f -> b s f')."
            if found.name in KERNELS
            else "Register how it may be sharded:"
            f" rhino.register_rule({found.name!r}, 'b s d, d f -> b s f')."
        )
        _warn(
            key,
            f"`{found.name}` has no rule, so every device computes"
            f" all of it: {format_share(found.flops)} of the FLOPs and"
            f" {format_share(found.bytes)} of the bytes that ops make"
            f" (at {source}). {advice}" + nearest(found.name, unmet_rules()),
            source,
        )


def warn_of_left_out(program: Program, plan: PlanData) -> None:
    """Warn of ops without results, such as `jax.debug.print`, where the batch is split
    into micro-batches: only what the results depend on runs then. Once for each line
    and function."""
    if plan.microbatches <= 1:
        return
    for op in (program.ops[o] for o in program.body.ops):
        key = (program.name, f"{op.name} at {op.source}")
        if op.results or key in _TOLD:
            continue
        _warn(
            key,
            f"`{op.name}` at {op.source} gives no result, and does"
            f" not run: the plan is in {plan.microbatches} micro-batches. Return what"
            " it should see, or plan with `stages=1, microbatches=1`.",
            op.source,
        )


def _warn(key: tuple[str, str], text: str, source: Source) -> None:
    """Warn at the user's line, once for each (program, op)."""
    _TOLD.add(key)
    warnings.warn_explicit(
        f"`{key[0]}`: {text}",
        RhinoWarning,
        filename=source.file or "<unknown>",
        lineno=source.line or 1,
    )


def notes_of_rules(program: Program) -> tuple[str, ...]:
    """Return notes on registered rules whose names no program has had."""
    names = unmet_rules()
    if not names:
        return ()
    there = {rule_name(op) for op in program.ops}
    said = [f"{name!r}.{nearest(name, there)}" for name in names]
    return (
        "rules are registered for names that no op has had so far: " + " ".join(said),
    )


def notes_of_groups(program: Program, target: Target) -> tuple[str, ...]:
    """Return a note on grouped matmuls that run in a kernel of rhino's."""
    if not target.device.tiles_groups:
        return ()
    lines = {str(op.source) for op, _ in program.walk() if op.traits.is_tiled}
    if not lines:
        return ()
    return (
        "grouped matmuls run in a Triton kernel of rhino's, forward and backward, where"
        f" XLA would multiply every group with all rows: {', '.join(sorted(lines))};"
        " grouped='as written' leaves them to XLA.",
    )


def notes_of_idle(mesh: Mesh) -> tuple[str, ...]:
    """Return a note on present devices that are not in a mesh of others of them."""
    present = jax.devices()
    idle = len(present) - mesh.size
    if idle <= 0 or not set(mesh.devices.flat) <= set(present):
        return ()
    return (
        f"the mesh has {mesh.size} devices, {len(present)} are present: {idle} stay"
        " idle.",
    )


def notes_of_arguments(program: Program, plan: PlanData) -> tuple[str, ...]:
    """Return notes on state that is not donated, and on a batch that does not divide.

    Args:
      program: the user's program.
      plan: its plan.
    """
    inputs, notes = program.inputs, list[str]()
    back = sorted({o.state_of for o in program.outputs if o.state_of is not None})
    kept = [i for i in back if not (inputs[i].is_donated or inputs[i].is_const)]
    leaves = [plan.inputs[i] for i in kept]
    total = sum(leaf.bytes_per_device for leaf in leaves)
    if total > LARGE_SHARE * plan.predicted.peak_bytes:
        names = list(dict.fromkeys(keys_of(leaf.path)[0] for leaf in leaves))
        notes.append(
            f"{_listed(names)} {_verb(names, 'comes', 'come')} back and"
            f" {_verb(names, 'is', 'are')} not donated: a device holds"
            f" {format_bytes(total)} more. Give donate_argnums= or donate_argnames=,"
            " and use what the step returns."
        )
    return (*notes, *_uneven(program, plan))


def _uneven(program: Program, plan: PlanData) -> Iterator[str]:
    """Yield a note on batch arguments that are replicated because their rows do not
    divide: arguments are sharded evenly or not at all."""
    axes = [(name, size) for name, size in plan.mesh_axes if size > 1]
    if not axes or plan.num_stages > 1:
        return
    dims = data_inputs(program)
    data = [plan.inputs[i] for i, at in dims.items() if at and not at.dim]
    counts = Counter(leaf.shape[0] for leaf in data)
    has_state = any(o.state_of is not None for o in program.outputs)
    if not counts:
        return
    if len(counts) > 1 and not has_state:
        return  # These inputs may be parameters.
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
        f" {rows} rows do not divide over {axes_text(axes)}: {format_bytes(whole)}"
        f" where an even batch has {format_bytes(math.ceil(whole / devices))}. Pad it"
        f" to {padded} rows whose loss counts none of those added, or leave some out."
    )


def _paths(leaves: Sequence[Leaf]) -> str:
    paths = [leaf.path for leaf in leaves]
    return _listed(paths[:3]) + (f" and {len(paths) - 3} more" if paths[3:] else "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _verb(things: Sequence[object], one: str, several: str) -> str:
    return one if len(things) == 1 else several


KEYWORD = "per_microbatch"


def read_places(what: str, value: Any) -> tuple[str, ...]:
    """Return the names of places as a tuple; `value` is one name or several.

    Raises:
      MicrobatchError: they are no names.
    """
    names = [value] if isinstance(value, str) else value
    if isinstance(names, list | tuple) and all(
        isinstance(n, str) and n.strip() for n in names
    ):
        return tuple(dict.fromkeys(names))
    raise MicrobatchError(
        f"{what}: {KEYWORD} takes names of modules, scopes, functions or lines.",
        where=f"{KEYWORD}=",
        numbers=f"got {brief(value)}",
        fix=f"write {KEYWORD}=('BatchNorm',), or a line as ('model.py:61',).",
    )


def check_places(what: str, names: Iterable[str], program: Program) -> None:
    """Refuse names that match no op.

    Raises:
      MicrobatchError: a name matches no op of the program.
    """
    for name in names:
        is_there = at_place(name)
        if any(is_there(op.source) for op in program.ops):
            continue
        known = known_places(program)
        sources = [op.source for op in program.ops]
        parts = {p for of in sources for p in (*of.scopes.split("/"), of.function)}
        raise MicrobatchError(
            f"{what}: {KEYWORD} names {name!r}, where `{program.name}` does nothing."
            + nearest(name, [*sorted(parts - {""}), *known]),
            where=f"{KEYWORD}={name!r}",
            numbers=f"{len(program.ops)} ops, at {len(known)} lines and scopes",
            fix="name a module ('BatchNorm'), a scope ('encoder/norm_*'), a function"
            " ('batch_norm') or a line ('model.py:61').",
        )


def notes_of_microbatches(
    traced: Traced, transforms: Sequence[Transform]
) -> tuple[str, ...]:
    """Return a plan's notes on sums over the batch: that they are taken over each
    micro-batch instead of the whole batch, or what it costs that they are not.

    Args:
      traced: the user's function, traced; `transforms`: the passes of the plan.
    """
    for i, transform in enumerate(transforms):
        if transform.name != MICROBATCHES or not transform.choice:
            continue
        count, names = transform.chosen["count"], transform.chosen.get(KEYWORD, ())
        if names:
            return (
                f"as `{KEYWORD}=` asks, sums over the batch in {', '.join(names)}"
                f" are of each of the {count} micro-batches, not of the whole batch;"
                " running statistics take their mean.",
            )
        after = apply_passes(traced, transforms[: i + 1]).program
        ops = [after.ops[op] for op in after.body.ops]
        loops = sum(
            op.call is not None and op.source.scopes == MICROBATCHES for op in ops
        )
        before = apply_passes(traced, transforms[:i])
        cut = loops > 1 and may_cut(before.closed_jaxpr, before.program, count)
        if isinstance(cut, MicrobatchCut) and cut.places:
            again = cut.again_flops / cut.flops if cut.flops else 0.0
            return (
                f"for sums over the whole batch in {', '.join(cut.places)},"
                f" micro-batches run in {len(cut.loops)} loops, which compute"
                f" {again:.0%} of the FLOPs again; {KEYWORD}={list(cut.places)!r} takes"
                " the sums of each micro-batch, which changes results.",
            )
    return ()
