"""The collectives of a choice, and their seconds."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from rhino_jax.analysis.graph import Edge, Graph, Node, NodeKind, Port
from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.cost.reshard import ReshardStep, reshard_steps
from rhino_jax.hardware.lowering import OBSERVED
from rhino_jax.hardware.mesh import size_of
from rhino_jax.ir.collectives import ALL_REDUCE, KINDS, REDUCE_SCATTER
from rhino_jax.ir.printer import format_type
from rhino_jax.ir.spec import Spec, format_spec, padding_of
from rhino_jax.model.build import MeshModel
from rhino_jax.model.op_collectives import (
    is_rounded_halo,
    own_steps,
    sent_value,
)
from rhino_jax.model.packing import are_combined, find_sum_sizes, latency_share
from rhino_jax.model.strategies import Strategy
from rhino_jax.plan.records import Collective
from rhino_jax.planner.search.read_back.reasons import Reasons
from rhino_jax.planner.search.symmetry import Symmetry
from rhino_jax.solver.lookups import Lookups
from rhino_jax.solver.problem import Labels
from rhino_jax.utils.union_find import groups, number_objects, number_rows


_REDUCTIONS = ALL_REDUCE, REDUCE_SCATTER


class CostedStep(NamedTuple):
    """A collective, and its seconds in one run of its op or edge."""

    step: ReshardStep
    seconds: float


class SendSite(NamedTuple):
    """A place where a collective may be sent.

    Attributes:
      every: a node, after its compute, or an edge, and those that send the same.
      source, target: positions in the labels of the nodes whose options decide; for a
        node both are its own.
    """

    every: Sequence[Node] | Sequence[Edge]
    source: int
    target: int

    @property
    def at(self) -> Node | Edge:
        """The first of `every`."""
        return self.every[0]

    @property
    def runs(self) -> int:
        """Number of runs in a step, of all of `every` together."""
        return len(self.every) * self.at.count


@dataclass
class ChoiceTraffic:
    """The collectives of a model's choices, cached by node options and by reshard.

    Attributes:
      model: the cost model.
      sites: all nodes and edges, or one of each orbit.
    """

    model: MeshModel
    sites: list[SendSite]
    _own: dict[tuple[int, int], tuple[CostedStep, ...]] = field(default_factory=dict)
    _moves: dict[tuple[Spec, Spec, int, bool], tuple[CostedStep, ...]] = field(
        default_factory=dict
    )

    @cached_property
    def _reasons(self) -> Reasons:
        return Reasons(self.model)

    @cached_property
    def _combined(self) -> frozenset[int]:
        combined = are_combined(self.model.analysis)
        edges = zip(self.model.graph.edges, combined, strict=True)
        return frozenset(id(e) for e, is_so in edges if is_so)

    @cached_property
    def _sums(self) -> Mapping[int, Mapping[tuple[int, ...], int]]:
        return find_sum_sizes(self.model.analysis, self.model.options)

    @classmethod
    def of(cls, model: MeshModel) -> ChoiceTraffic:
        """Return the traffic of choices of all nodes."""
        sites = [SendSite([n], n.id, n.id) for n in model.graph.nodes]
        sites += [SendSite([e], e.source.node, e.target) for e in model.graph.edges]
        return cls(model, sites)

    @classmethod
    def folded(cls, model: MeshModel, symmetry: Symmetry) -> ChoiceTraffic:
        """Return the traffic of choices of orbits: each orbit is looked at once."""
        graph, orbits, columns = model.graph, symmetry.orbits, model.graph.columns
        sites = [
            SendSite([graph.nodes[n] for n in members.tolist()], c, c)
            for c, members in enumerate(groups(orbits))
        ]
        # Edges between the same orbits with the same table send the same.
        source = orbits[columns.maker[columns.source]]
        target = orbits[columns.target]
        tables = number_objects([e.table for e in model.problem.edges])
        for members in groups(number_rows(source, target, tables)):
            edges, k = [graph.edges[k] for k in members.tolist()], members[0]
            sites.append(SendSite(edges, int(source[k]), int(target[k])))
        return cls(model, sites)

    def seconds(self, labels: Labels) -> float:
        """Return the seconds of all collectives of a choice, hidden or not."""
        return sum(
            place.runs * priced.seconds
            for place, steps in self._sending(labels)
            for priced in steps
        )

    def flops(self, labels: Labels) -> float:
        """Return the floating-point operations of a choice on one device."""
        lookups, counts = self._flops
        return float(counts @ lookups.entries(labels))

    @cached_property
    def _flops(self) -> tuple[Lookups, np.ndarray]:
        nodes = [(p, at) for p in self.sites if isinstance(at := p.at, Node)]
        sources = [p.source for p, _ in nodes]
        flops = [self.model.options[at.id].flops for _, at in nodes]
        return Lookups.of(sources, sources, flops), np.array([p.runs for p, _ in nodes])

    def collectives(self, labels: Labels) -> tuple[Collective, ...]:
        """Return all collectives of a choice, the most expensive first."""
        chosen = labels.tolist()
        found = [
            self._record(at, priced, chosen[place.source], chosen[place.target])
            for place, steps in self._sending(labels)
            for at in place.every
            for priced in steps
        ]
        return tuple(sorted(found, key=lambda c: (-c.seconds, c.kind, c.op, c.reason)))

    def _sending(
        self, labels: Labels
    ) -> Iterator[tuple[SendSite, tuple[CostedStep, ...]]]:
        """Yield the sites with collectives, and these."""
        model, chosen = self.model, labels.tolist()
        for place in self.sites:
            at, source, target = place.at, chosen[place.source], chosen[place.target]
            if isinstance(at, Node):
                steps = self._after(at, source)
            else:
                have, want = model.spec(at.source, source), model.wanted(at, target)
                steps = self._move(at, have, want) if have != want else ()
            if steps:
                yield place, steps

    def _after(self, node: Node, label: int) -> tuple[CostedStep, ...]:
        """Return the collectives of a node after its compute."""
        options, model = self.model.options[node.id], self.model
        # Nodes with equal options share one object.
        key = id(options), label
        found = self._own.get(key)
        if found is None:
            strategy = options.strategies[label]
            sum_size = self._sum_size(node, strategy)
            steps = own_steps(
                model.graph.program, node.op, strategy, model.mesh, sum_size
            )
            share = latency_share(model.analysis, node, strategy, sum_size)
            found = self._own[key] = self._price(steps, share, _REDUCTIONS)
        return found

    def _sum_size(self, node: Node, strategy: Strategy) -> int:
        """Return the number of ops whose partial results are reduced as one sum."""
        return self._sums.get(node.id, {}).get(strategy.partial, 1)

    def _move(self, edge: Edge, have: Spec, want: Spec) -> tuple[CostedStep, ...]:
        model, mesh = self.model, self.model.mesh
        value = sent_value(model.graph, edge, mesh.lowering)
        padding = 1.0
        if not model.builder.sizes.padded_dims.isdisjoint(value.shape):
            padding = max(padding_of(s, value.shape, mesh.sizes) for s in (have, want))
        change = have, want, round(value.bytes * padding)
        is_combined = id(edge) in self._combined
        key = *change, is_combined
        found = self._moves.get(key)
        if found is None:
            steps = reshard_steps(*change, mesh.sizes, mesh.lowering)
            share = OBSERVED.combined_latency if is_combined else 1.0
            found = self._moves[key] = self._price(steps, share)
        return found

    def _price(
        self,
        steps: tuple[ReshardStep, ...],
        share: float,
        kinds: Container[str] = KINDS,
    ) -> tuple[CostedStep, ...]:
        """Estimate the seconds of collectives, of which some kinds pay only a share of
        their latency."""
        mesh = self.model.mesh
        found = []
        for step in steps:
            axes = mesh.over(step.axes)
            seconds = collective_s(step.kind, step.local_bytes, axes)
            latency_s = collective_s(step.kind, 0.0, axes)
            saved_s = (1 - share) * latency_s if step.kind in kinds else 0.0
            found.append(CostedStep(step, step.runs * (seconds - saved_s)))
        return tuple(found)

    def _record(
        self, at: Node | Edge, priced: CostedStep, source: int, target: int
    ) -> Collective:
        """Return the record of a collective for the plan.

        Args:
          at, priced: the node or edge that sends it, and the collective with its
            seconds.
          source, target: the labels at both ends.
        """
        model, step = self.model, priced.step
        if isinstance(at, Node):
            strategy = model.options[at.id].strategies[source]
            is_rounded = at.op is not None and is_rounded_halo(
                model.graph.program, at.op, step, model.mesh
            )
            op, reason = at.op, self._reasons.of_op(at, strategy, step)
            sum_size = self._sum_size(at, strategy)
            if sum_size > 1 and step.kind in _REDUCTIONS:
                reason += f", one of {sum_size} reduced together"
        else:
            nodes = model.graph.nodes
            op = nodes[at.target].op or nodes[at.source.node].op
            have, want = model.spec(at.source, source), model.wanted(at, target)
            names = model.mesh.names
            reason = (
                f"{KINDS[step.kind].reshards or step.kind}"
                f" {self._reasons.name(at.source)}:"
                f" {format_spec(have, names)} → {format_spec(want, names)}"
            )
            sent = sent_value(model.graph, at, model.mesh.lowering)
            is_rounded = sent != model.graph.program.values[at.value]
        per_run = wire_bytes(
            step.kind, step.local_bytes, size_of(model.mesh, step.axes)
        )
        line = "" if op is None else str(op.source)
        if op is not None and op.manual is not None and isinstance(at, Node):
            sent_by_hand = step.kind, len(step.axes), step.local_bytes, step.runs
            for c in op.manual.collectives:  # The user's line in a `shard_map`.
                key = c.kind, len(c.axes), float(c.local_bytes), c.runs
                if key == sent_by_hand:
                    line = str(c.source)
                    break
        return Collective(
            kind=step.kind,
            # In mesh order, as the compiler prints them: the order has no meaning.
            axes=tuple(model.mesh.axes[a].name for a in sorted(step.axes)),
            bytes=round(per_run * step.runs * at.count),
            count=step.runs * at.count,
            seconds=priced.seconds * at.count,
            op="" if op is None else f"{op.name} #{op.id}",
            source=line,
            reason=reason,
            is_rounded=is_rounded,
        )


def name_of(graph: Graph, port: Port, saved: Container[Port]) -> str:
    """Return the name of a port's value for the table of live values.

    Inputs by their path; all else by what makes it, and its type, such as `residuals of
    the scan f32[24,8,128]`. Values of one name are told apart by their source line.

    Args:
      graph: the graph of the program.
      port: a result of one of its nodes.
      saved: `read_backward` of the graph.
    """
    node = graph.nodes[port.node]
    if node.kind is NodeKind.INPUT:
        return graph.program.inputs[node.slot].path
    if node.kind is NodeKind.COPY:
        made = "copy"
    elif node.op is None:
        made = "value"
    elif node.kind is NodeKind.OP:
        made = node.op.name
    elif node.kind is NodeKind.STACK and port in saved:
        made = f"residuals of the {node.op.name}"
    else:
        made = f"{node.op.name} {_BORDERS.get(node.kind, node.kind.value)}"
    return f"{made} {format_type(graph.program.values[node.value])}"


_BORDERS = {
    NodeKind.CONST: "constant",
    NodeKind.SLICE: "input of one iteration",
    NodeKind.STACK: "stacked outputs",
    NodeKind.JOIN: "result",
}


def read_backward(graph: Graph) -> frozenset[Port]:
    """Return the values of the forward pass that the backward pass reads."""
    is_backward = [n.op is not None and n.op.source.is_backward for n in graph.nodes]
    return frozenset(
        edge.source
        for edge in graph.edges
        if is_backward[edge.target] and not is_backward[edge.source.node]
    )
