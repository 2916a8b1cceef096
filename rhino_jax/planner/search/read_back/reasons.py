"""Reasons of collectives in the user's terms: argument paths, dims, gradients.

A value is named after the argument that it is, perhaps in another type or shape; after
the argument whose gradient it becomes; failing both, after its op, with a line. A dim
that is summed over is the batch or a dim of an argument.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rhino_jax.analysis.dim_classes import Element
from rhino_jax.analysis.graph import Edge, Node, NodeKind, Port
from rhino_jax.cost.reshard import ReshardStep
from rhino_jax.ir.collectives import PERMUTE
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.printer import format_type
from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind
from rhino_jax.model.build import MeshModel
from rhino_jax.model.strategies import Strategy
from rhino_jax.planner.search.records import LIMITS


@dataclass(eq=False)
class Reasons:
    """Explain why something is sent under a choice.

    Attributes:
      model: the cost model.
    """

    model: MeshModel
    _paths: dict[int, str | None] = field(default_factory=dict)
    _gradients: dict[int, str | None] = field(default_factory=dict)

    def of_op(self, node: Node, strategy: Strategy, step: ReshardStep) -> str:
        """Explain a collective that an op sends after its compute."""
        op = node.op
        assert op is not None and op.rule is not None
        if op.manual is not None:
            return f"{op.name} says so itself"
        cut = [f for f, axes in enumerate(strategy.cut) if set(axes) & set(step.axes)]
        cut_factors = [op.rule.factors[f] for f in cut]
        if step.kind == PERMUTE and all(f.shift is not None for f in cut_factors):
            return f"borders that {op.name} shifts along {self._over(node, cut)}"
        if step.kind == PERMUTE and all(f.halo != (0, 0) for f in cut_factors):
            return f"borders of the window of {op.name} along {self._over(node, cut)}"
        if any(op.rule.factors[f].kind is FactorKind.MERGE for f in cut):
            return f"merges {op.name} of shards along {self._over(node, cut)}"
        summed = [f for f in range(len(op.rule.factors)) if op.rule.partial_results(f)]
        over = [f for f in cut if f in summed] or [f for f in summed if strategy.cut[f]]
        reducers = [op.rule.factors[f].reducer or "sum" for f in over] or ["sum"]
        how = {"prod": "product"}.get(reducers[0], reducers[0])
        if op.traits.kind is OpKind.LOOKUP:
            how = "look-up"
        how = f"{how} over {self._over(node, over)}"
        gradient = self._gradient(node.ports[0])
        if gradient is not None:
            return f"{gradient}: {how}"
        return f"{how}, going backward" if _is_backward(op) else how

    def name(self, port: Port) -> str:
        """Return the name of a port's value for users."""
        path = self._path(port)
        if path is not None:
            return path
        gradient = self._gradient(port)
        if gradient is not None:
            return gradient
        node = self.model.graph.nodes[port.node]
        if node.op is None:
            if node.kind is NodeKind.COPY:
                return self.name(self.model.graph.incoming[node.id][0].source)
            return f"%{node.value}"
        kind = "" if node.kind is NodeKind.OP else f" ({node.kind.value})"
        place = str(node.op.source).partition(" (")[0]
        array = format_type(self.model.graph.program.values[node.value])
        return f"the result of {node.op.name}{kind} {array} at {place}"

    def _path(self, port: Port) -> str | None:
        """Return the path of the argument that a value is, whatever its type and shape
        now are; None where it is none."""
        graph, first = self.model.graph, port.id
        if first in self._paths:
            return self._paths[first]
        self._paths[first] = None
        for _ in range(LIMITS.most_visited):
            node = graph.nodes[port.node]
            before = graph.incoming[node.id]
            if node.kind is NodeKind.INPUT:
                self._paths[first] = graph.program.inputs[node.slot].path
            elif len(before) == 1 and (
                node.kind in (NodeKind.CONST, NodeKind.SLICE, NodeKind.COPY)
                or (node.kind is NodeKind.OP and node.op and _moves_data_only(node.op))
            ):
                port = before[0].source
                continue
            break
        return self._paths[first]

    def _gradient(self, port: Port) -> str | None:
        """Name the gradient or result that a value of the backward pass becomes; None
        where it is neither."""
        if port.id not in self._gradients:
            self._gradients[port.id] = self._find_gradient(port)
        return self._gradients[port.id]

    def _find_gradient(self, port: Port) -> str | None:
        graph, roles = self.model.graph, self.model.analysis.roles
        made_by = graph.nodes[port.node]
        if made_by.op is None or not self._is_backward(made_by):
            return None
        seen, queue = {port.id}, deque([port])
        while queue and len(seen) < LIMITS.most_visited:
            at = queue.popleft()
            for edge in graph.readers[at.id]:
                reader = graph.nodes[edge.target]
                if reader.kind is NodeKind.INPUT:  # It is this input's next state.
                    if reader.slot in roles.params:
                        path = graph.program.inputs[reader.slot].path
                        return f"gradient of {path}"
                elif reader.kind is NodeKind.OUTPUT:
                    return graph.program.outputs[reader.slot].path
                elif self._passes(edge, reader):
                    queue += [p for p in reader.ports if p.id not in seen]
                    seen |= {p.id for p in reader.ports}
        return None

    def _is_backward(self, node: Node) -> bool:
        """Whether an op is of the backward pass.

        One that a pass added is if it sums or scales results of the backward pass, as
        deferred sums of what a loop accumulates do.
        """
        assert node.op is not None
        if node.op.source.file:
            return _is_backward(node.op)
        graph, seen, queue = self.model.graph, {node.id}, deque([node])
        while queue and len(seen) < LIMITS.most_visited:
            at = queue.popleft()
            if at.kind is NodeKind.OP and at.op is not None:
                if _is_backward(at.op):
                    return True
                if not at.op.is_fusible and at is not node:
                    continue
            before = {e.source.node for e in graph.incoming[at.id]} - seen
            seen |= before
            queue += [graph.nodes[n] for n in before]
        return False

    def _passes(self, edge: Edge, reader: Node) -> bool:
        """Whether a gradient that an op reads may be its result."""
        if reader.kind is not NodeKind.OP:
            return True
        op, values = reader.op, self.model.graph.program.values
        assert op is not None
        if op.traits.kind is OpKind.REDUCTION:  # Of dims of size 1: broadcast biases.
            return math.prod(values[edge.value].shape) == math.prod(
                values[op.results[0]].shape
            )
        if _moves_data_only(op):
            return op.traits.kind is not OpKind.BROADCAST
        shape = values[edge.value].shape
        return op.is_fusible and values[op.results[0]].shape == shape

    def _over(self, node: Node, factors: Sequence[int]) -> str:
        """Name the dims of some factors, as "the batch and dim 1 of tokens"."""
        words = dict.fromkeys(self._dim(node, f) for f in factors)
        *first, last = words or ["its dims"]
        return f"{', '.join(first)} and {last}" if first else last

    def _dim(self, node: Node, factor: int) -> str:
        model, op = self.model, node.op
        assert op is not None and op.rule is not None
        roles = model.analysis.roles
        element = model.dim_classes.factors(node)[factor]
        if element in roles.batch:
            return "the batch"
        near = {self._path(e.source) for e in model.graph.incoming[node.id]}
        known = self._dims_of_inputs.get(element, [])
        if known:
            _, path, dim = max(known, key=lambda k: (k[1] in near, k[0]))
            return f"dim {dim} of {path}"
        for value, dims in zip(op.operands, op.rule.operands, strict=False):
            for d, factors in enumerate(dims):
                if factor in factors:
                    whole = model.graph.program.values[value]
                    return f"dim {d} of {format_type(whole)}"
        return f"a dim of {op.rule.factors[factor].size:,}"

    @cached_property
    def _dims_of_inputs(self) -> dict[Element, list[tuple[bool, str, int]]]:
        """Return dim class → (whether it is a parameter, path, dim) of the arguments
        with that class."""
        found: dict[Element, list[tuple[bool, str, int]]] = {}
        graph = self.model.graph
        params = self.model.analysis.roles.params
        for node in graph.nodes:
            if node.kind is NodeKind.INPUT:
                path = graph.program.inputs[node.slot].path
                for dim, element in enumerate(self.model.dim_classes.results(node, 0)):
                    if element is not None:
                        place = node.slot in params, path, dim
                        found.setdefault(element, []).append(place)
        return found


def _moves_data_only(op: Op) -> bool:
    return op.is_fusible and op.traits.keeps_data


def _is_backward(op: Op) -> bool:
    return "transpose(" in op.source.name_stack
