"""Sums over the batch in micro-batches: checks of the named places, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rhino_jax.errors import MicrobatchError, nearest
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.places import at_place, known_places
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import MICROBATCHES, Transform
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.microbatch import MicrobatchCut, may_cut
from rhino_jax.utils.keywords import brief


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
