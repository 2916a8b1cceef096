"""Program → Graph: calls inlined, and values at loop borders made into nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rhino_jax.analysis.graph import AnnotationSite, Graph, Node, NodeKind
from rhino_jax.analysis.shared_copies import share_copies
from rhino_jax.ir.program import Op, Program, Region, RegionKind


def inline_regions(
    program: Program, *, fuses_rotations: bool = False, fuses_scatters: bool = True
) -> Graph:
    """Build the graph of choices of a program.

    Args:
      program: the program.
      fuses_rotations, fuses_scatters: as in `Device.inlining`.
    """
    builder = _GraphBuilder(Graph(program, fuses_rotations, fuses_scatters))
    builder.run()
    graph = builder.graph
    share_copies(graph)
    graph.finish()
    return graph


class _GraphBuilder:
    def __init__(self, graph: Graph) -> None:
        self.program, self.graph = graph.program, graph
        self.time = 0
        self.part = self.num_parts = 0
        # Scalar's value id → its source (`Graph.scalar_reads`), and sources of the
        # predicates of the branches and loops around.
        self.scalars: dict[int, int] = {}
        self.predicates: list[int] = []

    def run(self) -> None:
        graph, program = self.graph, self.program
        inputs: list[Node | None] = []
        for slot, entry in enumerate(program.inputs):
            value = program.values[entry.value]
            if value.rank == 0:
                inputs.append(None)
                continue
            node = graph.add(NodeKind.INPUT, 1, 0, None, slot, value.id)
            graph.held[value.id] = node.ports[0]
            inputs.append(node)
        self.time = 1
        self.region(program.body, 1)
        for slot, output in enumerate(program.outputs):
            value = program.values[output.value]
            site = AnnotationSite("output", (slot,))
            port = graph.held.get(value.id)
            graph.output_ports.append(port)
            if port is None:
                continue
            tied = None if output.state_of is None else inputs[output.state_of]
            if tied is not None:
                # State that is fed back must keep its sharding.
                graph.connect(value.id, tied.id, 0, 1, self.time, site)
            else:
                node = graph.add(NodeKind.OUTPUT, 1, self.time, None, slot, value.id)
                graph.connect(value.id, node.id, 0, 1, self.time, site)
        graph.end = self.time + 1

    def region(self, region: Region, count: int) -> None:
        for op_id in region.ops:
            op = self.program.ops[op_id]
            if op.call is None:
                self.plain(op, count)
            elif op.call.kind is RegionKind.CALL:
                self.call(op, count)
            elif op.call.kind is RegionKind.COND:
                self.cond(op, count)
            else:
                self.loop(op, count)
            self.time += 1

    def apart(self, region: Region, count: int) -> None:
        """Add the nodes of a separately compiled region."""
        outside, self.num_parts = self.part, self.num_parts + 1
        self.part = self.num_parts
        self.region(region, count)
        self.part = outside

    def alias(self, outer: int, inner: int) -> None:
        port = self.graph.held.get(outer)
        if port is not None:
            self.graph.held[inner] = port
        self.compute_scalar(inner, [outer])

    def compute_scalar(self, result: int, operands: Sequence[int]) -> None:
        """Note what a scalar waits for that is computed of others."""
        found = self.scalars
        sources = frozenset([found[v] for v in operands if v in found])
        if len(sources) == 1:
            (found[result],) = sources
        elif sources:
            self.graph.scalars.append((self.time, sources))
            found[result] = ~(len(self.graph.scalars) - 1)

    def wait(self, node: Node, operands: Sequence[int]) -> None:
        """Note which scalars a node waits for."""
        sources = {self.scalars[v] for v in operands if v in self.scalars}
        for source in sources.union(self.predicates):
            self.graph.scalar_reads.append((node.id, source))

    def plain(self, op: Op, count: int) -> None:
        values, graph = self.program.values, self.graph
        if not any([values[v].shape for v in (*op.results, *op.operands)]):
            for result in op.results:
                self.compute_scalar(result, op.operands)
            return
        if len(op.results) > 1 and _passes_values_on(op, self.program):
            for operand, result in zip(op.operands, op.results, strict=True):
                self.alias(operand, result)
            return
        node = graph.add(NodeKind.OP, count, self.time, op, 0, op.results[0])
        for i, operand in enumerate(op.operands):
            graph.connect(operand, node.id, i, count, self.time, part=self.part)
        self.wait(node, op.operands)
        for port, result in zip(node.ports, op.results, strict=True):
            if values[result].shape:
                graph.held[result] = port
            else:
                self.scalars[result] = node.id

    def call(self, op: Op, count: int) -> None:
        assert op.call is not None
        (region,) = op.call.regions
        for outer, inner in zip(op.operands, region.inputs, strict=True):
            self.alias(outer, inner)
        is_apart = op.call.is_apart or op.call.is_program
        run = self.apart if is_apart else self.region
        first = len(self.graph.nodes)
        run(region, count * op.call.trip_count)
        if op.call.is_program:
            inside = range(first, len(self.graph.nodes))
            self.graph.alone.update(dict.fromkeys(inside, self.num_parts))
        for inner, outer in zip(region.outputs, op.results, strict=True):
            self.alias(inner, outer)
        if op.call.is_program:
            held = [self.graph.held.get(v) for v in (*op.operands, *op.results)]
            self.graph.crossing |= {port.id for port in held if port is not None}

    def cond(self, op: Op, count: int) -> None:
        assert op.call is not None
        predicate, regions = op.operands[0], op.call.regions
        for region in regions:
            for outer, inner in zip(op.operands[1:], region.inputs, strict=True):
                self.alias(outer, inner)
            self.decided(predicate, partial(self.apart, region, count))
        for slot, result in enumerate(op.results):
            if not self.program.values[result].rank:
                chosen = [region.outputs[slot] for region in regions]
                self.compute_scalar(result, [predicate, *chosen])
                continue
            node = self.graph.add(NodeKind.JOIN, count, self.time, op, slot, result)
            for r, region in enumerate(op.call.regions):
                inner_value = self.program.values[region.outputs[slot]]
                site = AnnotationSite("region", (op.id, r, slot))
                self.graph.connect(inner_value.id, node.id, 0, count, self.time, site)
            self.graph.held[result] = node.ports[0]

    def decided(self, predicate: int, run: Callable[[], None]) -> None:
        """Add nodes that wait for a predicate."""
        source = self.scalars.get(predicate)
        self.predicates += [] if source is None else [source]
        run()
        del self.predicates[len(self.predicates) - (source is not None) :]

    def loop(self, op: Op, count: int) -> None:
        call = op.call
        assert call is not None
        body = call.regions[-1]
        num_consts, num_carry = call.num_consts, call.num_carry
        borders: list[Node] = []
        start = self.time
        if call.kind is RegionKind.WHILE:
            cond = call.regions[0]
            head = op.operands[: call.num_cond_consts]
            rest = op.operands[call.num_cond_consts :]
            for i, (outer, inner) in enumerate(
                zip(head, cond.inputs[: call.num_cond_consts], strict=True)
            ):
                self.enter(op, i, outer, inner, NodeKind.CONST, count, borders)
        else:
            rest = op.operands
        first = len(op.operands) - len(rest)
        carries: list[Node | None] = []
        for i, (outer, inner) in enumerate(zip(rest, body.inputs, strict=True)):
            kind = (
                NodeKind.CONST
                if i < num_consts
                else NodeKind.CARRY
                if i < num_consts + num_carry
                else NodeKind.SLICE
            )
            node = self.enter(op, first + i, outer, inner, kind, count, borders)
            if kind is NodeKind.CARRY:
                carries.append(node)
        inner_count = count * call.trip_count
        self.time += 1
        if call.kind is RegionKind.WHILE:
            cond_carry = call.regions[0].inputs[call.num_cond_consts :]
            for node, inner in zip(carries, cond_carry, strict=True):
                if node is not None:
                    self.graph.held[inner] = node.ports[0]
            self.region(call.regions[0], inner_count)
            (predicate,) = call.regions[0].outputs
            self.decided(predicate, lambda: self.region(body, inner_count))
        else:
            self.region(body, inner_count)
        last = len(call.regions) - 1
        for i, (inner, outer) in enumerate(zip(body.outputs, op.results, strict=True)):
            value = self.program.values[inner]
            site = AnnotationSite("region", (op.id, last, i))
            if not value.rank and not self.program.values[outer].rank:
                self.alias(inner, outer)
                continue
            if i < num_carry:
                border = carries[i]
                assert border is not None
            else:
                border = self.graph.add(NodeKind.STACK, count, self.time, op, i, outer)
                borders.append(border)
            self.graph.connect(value.id, border.id, 0, inner_count, self.time, site)
            self.graph.held[outer] = border.ports[-1]
        for node in borders:
            self.graph.loop_start[node.id] = start
            self.graph.loop_end[node.id] = self.time

    def enter(
        self,
        op: Op,
        position: int,
        outer: int,
        inner: int,
        kind: NodeKind,
        count: int,
        borders: list[Node],
    ) -> Node | None:
        """Add the border node through which a value enters a loop."""
        values = self.program.values
        if not values[outer].rank and not values[inner].rank:
            self.alias(outer, inner)
            return None
        node = self.graph.add(kind, count, self.time, op, position, inner)
        site = AnnotationSite("operand", (op.id, position))
        self.graph.connect(outer, node.id, 0, count, self.time, site)
        if values[inner].rank:
            self.graph.held[inner] = node.ports[0]
        else:
            self.scalars[inner] = node.id
        borders.append(node)
        return node


def _passes_values_on(op: Op, program: Program) -> bool:
    """Whether each result of an op is the operand at its position and these are
    independent (an optimization barrier over many values): each value then keeps its
    own spec."""
    rule = op.rule
    if rule is None or rule.operands != rule.results:
        return False
    seen: set[int] = set()
    for value, layout in zip(op.operands, rule.operands, strict=True):
        shape = program.values[value].shape
        if any(n > 1 and not dim for n, dim in zip(shape, layout, strict=True)):
            return False  # a dim without factor: the op may do anything to it
        factors = {f for dim in layout for f in dim}
        if factors & seen:
            return False
        seen |= factors
    return True
