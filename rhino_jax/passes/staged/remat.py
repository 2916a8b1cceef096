"""Values of forward passes that backward passes of stages recompute."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rhino_jax.ir.congruence import pair_ops, pair_regions
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.remat.emit import emit
from rhino_jax.passes.remat.late import find_stacks, halves_of
from rhino_jax.passes.remat.rerun import Decided, decide
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.group import GroupProgram
from rhino_jax.passes.staged.sides import Sides
from rhino_jax.passes.staged.step import ValueKind
from rhino_jax.rewrite.flatten import flat_region, flatten
from rhino_jax.rewrite.retraced import retraced


@dataclass(frozen=True, slots=True)
class StagedRemat:
    """Values and chunks that backward passes recompute.

    Attributes:
      chunks: chunks whose forward passes run again as a whole.
      values: submesh → a `RematChoice`, as text, of values of the forward passes of its
        other chunks. Ids are of `Sides.program`. What these values depend on is
        recomputed too, down to what the backward pass reads anyway and what the choice
        saves for that; others are offloaded to host memory.
    """

    chunks: frozenset[int] = frozenset()
    values: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, chunks: Iterable[int], choices: Iterable[str]) -> StagedRemat:
        """Collect the choices of a step.

        Args:
          chunks: chunks whose forward passes run again.
          choices: for every submesh, a `RematChoice` as text; empty where it recomputes
            none of its values.
        """
        texts = {g: text for g, text in enumerate(choices) if text}
        return cls(frozenset(chunks), texts)

    def with_values(self, group: int, choice: str) -> StagedRemat:
        """Return a copy with another choice for a submesh; an empty one removes it."""
        rest = {g: text for g, text in self.values.items() if g != group}
        return replace(self, values={**rest, group: choice} if choice else rest)

    @property
    def choice(self) -> RematChoice:
        """The choice of all submeshes together."""
        each = [RematChoice.parse(text) for _, text in sorted(self.values.items())]
        return RematChoice(
            tuple(v for c in each for v in c.recompute),
            tuple(v for c in each for v in c.keep),
            tuple(v for c in each for v in c.offload),
        )


def applied(
    sides: Sides, apart: Apart, choice: RematChoice, asked: Sides
) -> tuple[Sides, frozenset[int], frozenset[int]]:
    """Apply a choice to a micro-batch: its scans no longer stack recomputed values.

    Args:
      sides: of the micro-batch.
      apart: the step.
      choice: values to recompute.
      asked: whose ids the choice has: the same forward ops.
    Returns:
      The micro-batch: the same equations, with the same ids of values; which other
        values to recompute; which are saved to recompute these.
    """
    choice = _in_ids_of(sides, choice, asked)
    flat = sides.flat
    stacked = {s.value for s in find_stacks(flat, halves_of(flat.top))}
    slices = tuple(v for v in choice.recompute if v in stacked)
    forward = _forward_values(sides)
    again = forward.intersection(choice.recompute) - stacked
    saved = forward.intersection(choice.keep)
    if not slices:
        return sides, again, saved
    inside = tuple(v for v in choice.keep if v not in forward)
    decided = decide(flat, RematChoice(slices, inside))
    piece = retraced(apart.piece, lambda *arrays: emit(flat, decided, arrays))
    region, before = flat_region(piece), sides.region
    ids = dict(zip(region.inputs, before.inputs, strict=True))
    for makes, known in zip(region.makes, _numbers(sides, decided[None]), strict=True):
        ids.update(zip(makes, known, strict=True))
    return replace(sides, region=region.renamed(ids)), again, saved


def offloaded(
    sides: Sides, remat: StagedRemat, asked: Sides
) -> dict[int, frozenset[int]]:
    """Return ids of offloaded values, for every submesh that has any.

    Args:
      sides, asked: as of `applied`.
      remat: choices of all submeshes.
    """
    forward, found = _forward_values(sides), {}
    for group, text in remat.values.items():
        choice = RematChoice((), (), RematChoice.parse(text).offload)
        choice = _in_ids_of(sides, choice, asked)
        found[group] = forward.intersection(choice.offload)
    return {group: values for group, values in found.items() if values}


def _forward_values(sides: Sides) -> frozenset[int]:
    """Return the results of forward ops."""
    return frozenset(sides.region.made_by(sides.forward))


def _numbers(sides: Sides, decided: Decided) -> list[tuple[int, ...]]:
    """Return value ids of the results of every equation, once scans stack other values.

    The id of a value that was not stacked before depends on that value alone: submeshes
    that are planned already know values by their ids.
    """
    first, found = len(sides.program.values), list(sides.region.makes)
    for k in decided.stacks.keys() | decided.added.keys():
        call = decided.block.ops[k].call
        left_out = {call.num_carry + slot for slot in decided.stacks.get(k, ())}
        found[k] = (
            *(v for at, v in enumerate(found[k]) if at not in left_out),
            *(first + v for v in decided.added.get(k, ())),
        )
    return found


def _in_ids_of(sides: Sides, choice: RematChoice, asked: Sides) -> RematChoice:
    """Translate a choice of values of another program with the same forward ops.

    Values that have no counterpart, as of a scan whose body was traced with other
    constants, are left out: they are then saved, which is right whatever else is
    recomputed, as only values that the backward pass would read change where they come
    from. The memory of this is not hidden: submeshes are planned from the tasks that
    result.
    """
    if sides is asked:
        return choice
    ids: dict[int, int] = {}
    before, now = asked.program, sides.program
    pair_regions(before, before.body, now, now.body, ids)
    chosen = (choice.recompute, choice.keep, choice.offload)
    again, keep, sent = (tuple(ids[v] for v in of if v in ids) for of in chosen)
    return RematChoice(again, keep, sent)


def in_ids_of_piece(choice: RematChoice, of: GroupProgram, sides: Sides) -> str:
    """Translate a choice from ids of a submesh's program to ids of a micro-batch.

    Args:
      choice: values that its forward tasks compute or receive.
      of: the submesh's program.
      sides: of a micro-batch.
    Returns:
      A `RematChoice` as text.
    """
    made = _forward_values(sides)
    ids = {
        end.value: key.number
        for key, end in zip(of.arguments, of.program.inputs, strict=True)
        if key.kind is ValueKind.INSIDE and key.number in made
    }
    for op_id, place in of.places.items():
        other = sides.region.ops[sides.forward[place]].op
        pair_ops(of.program, of.program.ops[op_id], sides.program, other, ids)
    alias = flatten(sides.program).alias
    outside = {alias.get(v, v): v for v in made}
    recompute = [ids[v] for v in choice.recompute if v in ids]
    # Received values are available anyway.
    received = {end.value for end in of.program.inputs}
    keep = tuple(ids[v] for v in choice.keep if v in ids.keys() - received)
    sent = [ids[v] for v in choice.offload if v in ids]
    return str(
        RematChoice(
            tuple(outside.get(v, v) for v in recompute),
            keep,
            tuple(outside.get(v, v) for v in sent),
        )
    )
