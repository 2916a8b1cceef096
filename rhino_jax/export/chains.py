"""Layouts that a plan gives the values of an expression, and their cotangents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rhino_jax.export.places import ExpressionPlace, Read, is_transposed
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.traits import OpKind
from rhino_jax.plan.decisions import Decisions
from rhino_jax.runtime.constraints import stops


Chain = tuple[Spec, ...]
"""Layouts that a value passes through, one collective each; the last one is final."""


@dataclass(frozen=True, slots=True)
class Finder:
    """Lookup of layouts in a plan's decisions.

    Attributes:
      program: the program.
      decisions: decisions on its values.
      sizes: sizes of the mesh axes.
      inside: result of a call → the value inside of the call that it is.
      readers: value → its reads.
    """

    program: Program
    decisions: Decisions
    sizes: tuple[int, ...]
    inside: Mapping[int, int]
    readers: Mapping[int, Sequence[Read]]

    def shape(self, value: int) -> tuple[int, ...]:
        return self.program.values[value].shape

    def spec(self, value: int) -> Spec | None:
        """Return the layout of a value; None for scalars, and without a decision."""
        found = self.decisions.values.get(value)
        while found is None and value in self.inside:
            value = self.inside[value]
            found = self.decisions.values.get(value)
        rank = self.program.values[value].rank
        return found if found is not None and len(found) == rank > 0 else None

    def made(self, value: int) -> Chain:
        """Return the layouts up to a value's final one; empty if `spec` is None."""
        held = self.spec(value)
        if held is None:
            return ()
        return (*self.decisions.waypoints.get(value, ()), held)

    def read(self, read: Read) -> Chain:
        """Return the layouts from a value's own to a reader's; empty if equal."""
        value, op, position = read
        held = self.spec(value)
        if held is None:
            return ()
        on_the_way = self.decisions.through.get((op, position), ())
        places = [*on_the_way, self.decisions.operands.get((op, position), held)]
        chain: list[Spec] = []
        for place in places:
            before = chain[-1] if chain else held
            if len(place) != len(before):
                return ()
            if place != before:
                chain += stops(before, place, self.sizes, self.decisions.lowering)
        return tuple(chain) or self._read_turned(op)

    def _read_turned(self, op: int) -> Chain:
        """Return how the result of a transpose is read, in dims of its operand.

        Empty for other ops, and for results with several readers.
        """
        at = self.program.ops[op]
        if at.traits.kind is not OpKind.MOVEMENT or at.rule is None:
            return ()
        before, after = at.rule.operands[0], at.rule.results[0]
        readers = self.readers.get(at.results[0], ())
        if len(readers) != 1 or sorted(before) != sorted(after):
            return ()
        order = [after.index(dim) for dim in before]
        return tuple(tuple(spec[i] for i in order) for spec in self.read(readers[0]))

    def is_read_otherwise(self, value: int) -> bool:
        """Whether any op reads a value in another layout than its own."""
        held = self.spec(value)
        return held is not None and any(
            self.decisions.operands.get((op, i), held) != held
            for _, op, i in self.readers.get(value, ())
        )

    def is_gathered(self, read: Read) -> bool:
        """Whether an op gathers rows of a value."""
        _, op, position = read
        return self.program.ops[op].traits.kind is OpKind.LOOKUP and position == 0

    def is_recomputed(self, place: ExpressionPlace) -> bool:
        """Whether the backward pass rematerializes an expression.

        It does so if it reads inner values (of a gather the indices) in other layouts
        than the forward pass stores.
        """
        if not place.is_cheap or not place.cotangents:
            return False
        return any(
            self.is_read_otherwise(v)
            and any(is_transposed(self.program.ops[op]) for _, op, _ in reads)
            for v in place.inner
            if (reads := self.readers.get(v))
        )

    def held(self, place: ExpressionPlace) -> Iterator[tuple[int, Chain]]:
        """Yield a value of an expression with its layouts, for each run of it.

        Yields nothing for loops, and for runs whose several arrays have different
        layouts.
        """
        if place.is_loop:
            return
        for made in place.values:
            chains = {self.made(v) for v in made}
            if len(chains) == 1 and (chain := chains.pop()):
                yield made[0], chain

    def is_said(
        self,
        place: ExpressionPlace,
        held: Sequence[tuple[int, Chain]],
        back: Chain | None,
    ) -> bool:
        """Whether an expression needs a constraint.

        It does if its layout does not follow from its operands, or differs from that of
        its readers or cotangent.

        Args:
          place: the expression.
          held: its values with their layouts, see `held`.
          back: layouts of its cotangent, see `cotangent`.
        """
        if not place.is_elementwise or place.is_contracted:
            return True
        if back is not None and any(back != chain[::-1] for _, chain in held):
            return True
        if any(self.is_read_otherwise(v) for made in place.values for v in made):
            return True
        read = {self.spec(v) for reads in place.read for v, _, _ in reads}
        return any(chain[-1] not in read for _, chain in held)

    def cotangent(
        self, place: ExpressionPlace, shapes: set[tuple[int, ...]]
    ) -> Chain | None:
        """Return the layouts of the cotangent of an expression's value.

        The layout of the reads is included if all are equal.

        Returns:
          None if there is no cotangent; empty if its layout is not unique.
        """
        found = {
            self._passed(reads, v in place.passed_on)
            for v, reads in place.cotangents.items()
            if self.shape(v) in shapes
        }
        if not found:
            return None
        return found.pop() if len(found) == 1 else ()

    def _passed(self, reads: Sequence[Read], is_known: bool) -> Chain:
        made = () if is_known else self.made(reads[0][0])
        read = {self.read(r) for r in reads}
        if len(read) > 1:
            return made
        return made if is_known else (*made, *read.pop())

    def given(
        self, place: ExpressionPlace, shapes: set[tuple[int, ...]]
    ) -> Chain | None:
        """Return the layouts of the cotangents of an expression's operands.

        Args:
          place: the expression.
          shapes: shapes of the operands in question.

        Returns:
          None if there are no cotangents; empty if their layout is not unique.
        """
        if not place.given:
            return None
        made = {self.made(v) for v in place.given if self.shape(v) in shapes}
        return made.pop() if len(made) == 1 else ()
