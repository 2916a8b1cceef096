"""Layouts of the values that a submesh sends and receives, with the cost of the link.

A submesh that is planned on its own receives a value replicated at no cost, though
every one of its devices then gets all of it over the link between submeshes: a link
that is often a tenth as fast as those inside of a submesh, over which shards can be
gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.errors import PinError
from rhino_jax.ir.spec import Spec, share_of
from rhino_jax.passes.staged.step import StagedStep, ValueKey, ValueKind
from rhino_jax.planner.staging.planned import PlannedGroup, Refused
from rhino_jax.planner.variant_search import MIN_GAIN


@dataclass(frozen=True, eq=False)
class GroupCrossing:
    """The values that one submesh sends and receives of every micro-batch.

    Attributes:
      step: the tasks of all submeshes.
      keys: the values whose layouts are free.
      bytes_per_s: bandwidth of the link between submeshes, for one device.
      on_all: spec on a submesh → the part of it that is possible on all submeshes.
    """

    step: StagedStep
    keys: Collection[ValueKey]
    bytes_per_s: float
    on_all: Callable[[Spec], Spec]

    @classmethod
    def of(
        cls,
        step: StagedStep,
        group: int,
        known: Collection[ValueKey],
        bytes_per_s: float,
        on_all: Callable[[Spec], Spec],
    ) -> GroupCrossing:
        """Return the values that one submesh exchanges and whose layouts are free.

        Args:
          step: the tasks of all submeshes.
          group: the submesh.
          known: values whose layout another submesh's plan, or a pin, prescribes.
          bytes_per_s, on_all: see the attributes.
        """
        ends = {s.key for s in step.sends if group in (s.source, s.target)}
        keys = [
            key for key in ends if key.kind is ValueKind.INSIDE and key not in known
        ]
        return cls(step, sorted(keys), bytes_per_s, on_all)

    def planned(
        self,
        group: PlannedGroup,
        plan: Callable[[Mapping[ValueKey, Spec], PlannedGroup], PlannedGroup],
    ) -> PlannedGroup:
        """Return the submesh as it is, or with other specs of exchanged values where
        that is faster.

        Args:
          group: the submesh, planned by the time of its own devices.
          plan: plans it again with specs of some of the values.
        """
        if not (specs := self.cheaper(group)):
            return group
        with suppress(Refused, PinError):
            return min(group, plan(specs, group), key=self.seconds)
        return group

    def seconds(self, group: PlannedGroup) -> float:
        """Return the predicted step of a submesh, and the seconds of its transfers."""
        sent = sum(
            self._link_s(group, key, group.specs[key])
            for key in self.keys
            if key in group.specs
        )
        return group.found.step_s + group.waits_s + sent

    def _link_s(self, group: PlannedGroup, key: ValueKey, spec: Spec) -> float:
        aval = self.step.types[key]
        size = aval.size * getattr(aval.dtype, "itemsize", 4)
        share = share_of(self.on_all(spec), tuple(aval.shape), group.sizes)
        return self.step.micro_batches * size * share / self.bytes_per_s

    def cheaper(self, group: PlannedGroup) -> dict[ValueKey, Spec]:
        """Return specs with which a submesh and the link take less time together.

        All other choices stay, so each spec is an improvement on its own.

        Returns:
          Value → spec; empty where it saves less than another search is worth
            (`MIN_GAIN`).
        """
        solved = group.found.solved[0]
        model, labels = solved.mesh_problem.model, solved.solution.labels
        if labels is None or not self.keys:
            return {}
        nodes = self._nodes(group)
        costs = {n: model.problem.costs[n].astype(float) for n in nodes}
        for source, target, table in model.problem.edges:
            if source in costs:
                costs[source] = costs[source] + table[:, labels[target]]
            if target in costs:
                costs[target] = costs[target] + table[labels[source], :]
        found: dict[ValueKey, Spec] = {}
        saved_s = 0.0
        for n, key in nodes.items():
            specs = [s.results[0] for s in model.options[n].strategies]
            total = costs[n] + np.array([self._link_s(group, key, s) for s in specs])
            # A spec that some submesh cannot have would be another one on the link.
            total[[self.on_all(s) != s for s in specs]] = np.inf
            best = int(total.argmin())
            if total[best] < total[labels[n]]:
                found[key] = specs[best]
                saved_s += float(total[labels[n]] - total[best])
        return found if saved_s > MIN_GAIN * group.found.step_s else {}

    def _nodes(self, group: PlannedGroup) -> Mapping[int, ValueKey]:
        """Return the nodes of the submesh's exchanged arguments and results."""
        ends = {NodeKind.INPUT: group.of.arguments, NodeKind.OUTPUT: group.of.results}
        return {
            node.id: ends[node.kind][node.slot]
            for node in group.found.solved[0].mesh_problem.model.graph.nodes
            if node.kind in ends and ends[node.kind][node.slot] in self.keys
        }
