"""Convert layer stacks between one array over all stages and parts, without copies."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from rhino_jax.passes.staged.stacks import LayerStack, Unstacked
from rhino_jax.passes.staged.step import StagedStep, ValueKey, ValueKind
from rhino_jax.plan.plan import PlanData
from rhino_jax.runtime.processes.across import assembled, here
from rhino_jax.runtime.tasks.programs import GroupPrograms


@dataclass(frozen=True, eq=False)
class Stacks:
    """Splits stacked inputs into parts per stage, and joins stacked results.

    Attributes:
      of_step: the function with stacks split: which inputs and results are parts of
        which array.
      step: its tasks.
      programs: programs of every submesh.
      out_shardings: shardings of the whole results.
    """

    of_step: Unstacked
    step: StagedStep
    programs: Sequence[GroupPrograms]
    out_shardings: Sequence[NamedSharding]
    # Parts of results that are alive: the next step reads them again, and splitting
    # arrays costs as much time as dispatching tasks.
    _made: dict[int, tuple[Any, dict[int, Any]]] = field(default_factory=dict)

    def parts(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arrays with stacks split into parts, which share their buffers."""
        shards: dict[int, dict[Any, Any]] = {}
        found = []
        for i, end in enumerate(self.of_step.inputs):
            x = arrays[end.whole]
            if end.part is None:
                found.append(x)
                continue
            key = ValueKey(ValueKind.INPUT, i)
            sharding = self.programs[self.step.home[i]].shardings[key]
            part = self._part_of(x, end.part)
            if part is not None and part.sharding == sharding:
                found.append(part)
                continue
            if end.whole not in shards:
                shards[end.whole] = {s.device: s.data for s in x.addressable_shards}
            mine = shards[end.whole]
            like = self.step.types[key]
            found.append(assembled(like, sharding, [mine[d] for d in here(sharding)]))
        return found

    def delete_donated(self, arrays: Sequence[Any], parts: Sequence[Any]) -> None:
        """Delete stacks whose parts were donated: their buffers are gone."""
        for end, part in zip(self.of_step.inputs, parts, strict=True):
            if end.part is not None and part.is_deleted():
                arrays[end.whole].delete()

    def whole(self, results: Sequence[Any]) -> list[Any]:
        """Return the results with the parts of each stack joined into one array."""
        parts: dict[int, list[Any]] = {}
        for end, x in zip(self.of_step.outputs, results, strict=True):
            parts.setdefault(end.whole, []).append((end.part, x))
        found = []
        for i, sharding in enumerate(self.out_shardings):
            if parts[i][0][0] is None:
                found.append(parts[i][0][1])
                continue
            of_part = dict(parts[i])
            arrays = [*of_part.values()]
            shards = {s.device: s.data for x in arrays for s in x.addressable_shards}
            length = sum(x.shape[0] for x in arrays)
            shape = (length, *arrays[0].shape[1:])
            like = jax.ShapeDtypeStruct(shape, arrays[0].dtype)
            x = assembled(like, sharding, [shards[d] for d in here(sharding)])
            self._remember(x, of_part)
            found.append(x)
        return found

    def _remember(self, whole: Any, parts: dict[int, Any]) -> None:
        at = id(whole)
        dropped = weakref.ref(whole, lambda _: self._made.pop(at, None))
        self._made[at] = dropped, parts

    def _part_of(self, whole: Any, part: int) -> Any:
        """Return a remembered part of a result of an earlier step, or None."""
        of, parts = self._made.get(id(whole), (None, {}))
        return parts.get(part) if of is not None and of() is whole else None


def stacks_of(plan: PlanData) -> list[LayerStack]:
    """Return the layer stacks among a plan's arguments: those split over stages."""
    found: dict[tuple[int, int, int], set[int]] = {}
    for i, leaf in enumerate(plan.inputs):
        if leaf.num_stages > 1:
            at = leaf.stage, leaf.num_stages, leaf.shape[0]
            found.setdefault(at, set()).add(i)
    stacks = []
    for (first, count, length), slots in found.items():
        places = plan.places[first : first + count]
        sizes = tuple(length // sum(places) * n for n in places)
        stacks.append(LayerStack(frozenset(slots), sizes, first))
    return stacks
