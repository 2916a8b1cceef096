"""The ops of a micro-batch by pass: forward, backward, or free (of the data alone)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from rhino_jax._compat import jaxpr_consts
from rhino_jax.errors import PlanFileError
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.ir.program import Program
from rhino_jax.passes.staged.apart import Apart, take_apart
from rhino_jax.passes.staged.holding import is_plain
from rhino_jax.rewrite.flat import FlatProgram, FlatRegion
from rhino_jax.rewrite.flatten import flatten


@dataclass(frozen=True, eq=False)
class Sides:
    """A micro-batch's ops, by their positions, divided by pass.

    What reads values that couple micro-batches, and all that depends on it, waits for
    the forward passes of all of them: it is in the backward pass.

    Free ops read data, numbers of micro-batches and scalars alone and contract nothing:
    they run wherever their results are read, and are in neither pass.

    Attributes:
      flat: a micro-batch; its calls are ops.
      region: its ops, by position.
      is_free: for every op.
      is_backward: for every op; none of these is free.
      parameters: ids of the inputs that depend on other arrays than the data: weights,
        converted or not. Scalars and random keys are not.
      coupled: ids of the inputs that depend on all micro-batches.
    """

    flat: FlatProgram
    region: FlatRegion
    is_free: tuple[bool, ...]
    is_backward: tuple[bool, ...]
    parameters: frozenset[int]
    coupled: frozenset[int]

    @property
    def program(self) -> Program:
        """The program of a micro-batch, that value ids refer to."""
        return self.flat.program

    @cached_property
    def is_coupled(self) -> bool:
        """Whether backward passes wait for the forward passes of all micro-batches."""
        return any(self.readers.get(v) for v in self.coupled)

    @cached_property
    def forward(self) -> tuple[int, ...]:
        """Equations of the forward pass."""
        pairs = zip(self.is_free, self.is_backward, strict=True)
        return tuple(i for i, (free, back) in enumerate(pairs) if not (free or back))

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """Equations of the backward pass."""
        return tuple(i for i, back in enumerate(self.is_backward) if back)

    @property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Value → the equations that read it."""
        return self.region.readers

    def is_free_value(self, value: int) -> bool:
        """Whether every submesh has a value, or computes it for itself."""
        at = self.region.maker.get(value)
        if at is not None:
            return self.is_free[at]
        return value not in self.parameters | self.coupled

    @cached_property
    def of_weights(self) -> frozenset[int]:
        """Values of parameters alone, by no contraction: slices of layer stacks."""
        found = set(self.parameters)
        for i, reads in enumerate(self.region.reads):
            op = self.region.ops[i].op
            is_light = op.call is None and not op.traits.is_contraction
            if is_light and reads and found.issuperset(reads):
                found.update(self.region.makes[i])
        return frozenset(found - self.parameters)

    @cached_property
    def homes(self) -> tuple[int | None, ...]:
        """The forward equation that each equation belongs to; None of free ones."""
        return self.placed({i: i for i in self.forward})

    @cached_property
    def not_before(self) -> frozenset[tuple[int, int]]:
        """Pairs (home, forward equation): the second may not be in an earlier stage.

        Else a backward equation would not be where its home is, but with the second. So
        it is for layers under `jax.checkpoint`, whose backward pass is one equation,
        and waits for that of the layers that read its results. Only of equations with
        regions, and without pairs of which the second depends on the first anyway.
        """
        ops = [each.op for each in self.region.ops]
        if all(ops[i].call is None for i in self.backward):
            return frozenset()
        rank = {i: i for i in self.forward}
        found = set[tuple[int, int]]()
        waits: dict[int, set[int]] = {}  # of backward equations, for forward ones
        for i in self.backward:
            home, mine = self.homes[i], set[int]()
            for v in self.region.reads[i]:
                if self._is_of_backward(v):
                    mine |= waits[self.region.maker[v]]
                else:
                    mine.update(self._limits(v, (), rank))
            if home is None or ops[i].call is None:
                waits[i] = mine
            else:
                waits[i] = {home}
                found.update((home, at) for at in mine)
        needs: dict[int, int] = {}  # sets of equations, as bits
        for i in self.forward:
            made_by = {self.region.maker.get(v, -1) for v in self.region.reads[i]}
            needs[i] = 1 << i
            for j in made_by & needs.keys():
                needs[i] |= needs[j]
        return frozenset(
            (home, at) for home, at in found if at > home and not needs[at] >> home & 1
        )

    def placed(self, rank: Mapping[int, int]) -> tuple[int | None, ...]:
        """Return the ranks of all equations, given those of the forward pass.

        A backward op comes as early as what it reads of the backward pass, and no
        earlier than the last forward op that reads, or else computes, what it reads: so
        gradients of weights are where the weights are. An op that reads nothing of the
        backward pass is where its results are read.

        Args:
          rank: forward equation → a rank that rises along the forward pass, and falls
            along the backward pass.
        Returns:
          For every equation its rank; None of free ones.
        """
        top = max(rank.values(), default=0)
        of: list[int | None] = [None] * len(self.region.reads)
        for i, reads in enumerate(self.region.reads):
            if not self.is_free[i]:
                limits = [limit for v in reads for limit in self._limits(v, of, rank)]
                of[i] = min(limits, default=top) if self.is_backward[i] else rank[i]
        for i in reversed(self.backward):
            waits = any(self._is_of_backward(v) for v in self.region.reads[i])
            later = {j for v in self.region.makes[i] for j in self.readers.get(v, ())}
            known = [r for j in later if (r := of[j]) is not None]
            if known and not waits and (mine := of[i]) is not None:
                of[i] = min(mine, max(known))
        return tuple(of)

    def _is_of_backward(self, value: int) -> bool:
        at = self.region.maker.get(value)
        return at is not None and self.is_backward[at]

    def _limits(
        self, value: int, of: Sequence[int | None], rank: Mapping[int, int]
    ) -> Iterator[int]:
        """Yield the highest rank, if any, that a backward reader of it may have."""
        if self.is_free_value(value):
            return
        at = self.region.maker.get(value)
        if at is not None and self.is_backward[at]:
            found = of[at]
        else:
            ahead = (rank[i] for i in self.readers.get(value, ()) if i in rank)
            found = max(ahead, default=None if at is None else rank[at])
        if found is not None:
            yield found


def apart_as_planned(
    closed: Any,
    program: Program,
    count: int,
    places: tuple[str, ...],
    planned: tuple[int, bool],
) -> Apart:
    """Divide a planned step as it was when it was planned.

    Args:
      closed, program, count, places: as of `take_apart`.
      planned: how many forward ops the plan puts into stages, and whether micro-batches
        are coupled there.
    Raises:
      MicrobatchError: the batch cannot be divided so.
      PlanFileError: the step is not the one that was planned.
    """
    apart = take_apart(closed, program, count, places)
    sides = sides_of(apart)
    now = len(sides.forward), sides.is_coupled
    if now == planned:
        return apart
    raise PlanFileError(
        f"the plan of `{program.name}` was made by a version of rhino_jax that cuts its"
        " micro-batches otherwise.",
        where=f"{count} micro-batches",
        numbers=f"{planned[0]} ops of a forward pass then, {now[0]} now;"
        f" coupled: {planned[1]}, {now[1]}",
        fix="plan again and save that plan, or use the version that made it.",
    )


def sides_of(apart: Apart) -> Sides:
    """Divide a micro-batch's ops by pass; results for the last few steps are cached.

    Backward is what reverse differentiation made (JAX marks its ops in their name
    stacks), what is coupled, and all that depends on these; except ops that the coupled
    values depend on.
    """
    return _sides_of(
        apart.piece,
        apart.cut.program.name,
        apart.sources,
        apart.data,
        len(apart.entering),
        apart.early,
    )


@lru_cache(maxsize=4)
def _sides_of(
    piece: Any,
    name: str,
    sources: tuple[frozenset[int], ...],
    data: frozenset[int],
    entering: int,
    early: int,
) -> Sides:
    flat = flatten(import_jaxpr(piece, name=name), piece, is_top_entered=False)
    region = flat.top.with_consts(jaxpr_consts(piece))
    parameters = frozenset(
        value
        for value, made_of in zip(region.inputs[1:], sources, strict=True)
        if made_of - data
        and region.avals[value].shape
        and is_plain(region.avals[value])
    )
    coupled = frozenset(region.inputs[1 + entering :])
    ahead, _ = region.needed(region.outputs[:early])
    is_free: list[bool] = []
    is_backward: list[bool] = []
    for i, reads in enumerate(region.reads):
        op = region.ops[i].op
        made_by = [region.maker[v] for v in reads if v in region.maker]
        is_free.append(
            not (parameters | coupled) & set(reads)
            and all(is_free[j] for j in made_by)
            and not op.traits.is_contraction
            and (op.call is None or not op.flops)
        )
        is_backward.append(
            i not in ahead
            and (
                op.source.is_backward
                or bool(coupled & set(reads))
                or any(is_backward[j] for j in made_by)
            )
        )
    return Sides(
        flat=flat,
        region=region,
        is_free=tuple(is_free),
        is_backward=tuple(
            b and not f for f, b in zip(is_free, is_backward, strict=True)
        ),
        parameters=parameters,
        coupled=coupled,
    )
