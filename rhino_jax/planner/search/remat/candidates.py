"""The residuals of a planned step as candidates for rematerialization, with costs.

Values and times are those of the planned model: bytes are per device under the chosen
specs; seconds are those of the ops' strategies with their collectives and the reshards
of their operands, all of which recomputation repeats.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

import numpy as np

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.ir.program import Program
from rhino_jax.passes.remat.late import Halves, ResidualStack, find_stacks, halves_of
from rhino_jax.passes.remat.rerun import Rerun, again
from rhino_jax.planner.search.records import LIMITS, SolvedMesh
from rhino_jax.planner.search.remat.choice import RematQuestion, RematRow, RerunWork
from rhino_jax.rewrite.flat import FlatOp, FlatRegion, may_run_again
from rhino_jax.rewrite.flatten import flatten
from rhino_jax.solver.remat.question import Question


def candidates_of(solved: SolvedMesh, *, may_offload: bool = True) -> RematQuestion:
    """Return the remat problem of a plan: residuals at the program's top level.

    Args:
      solved: the plan, which need not fit.
      may_offload: whether stacks may be offloaded to host memory.
    """
    return ResidualReader(solved, may_offload=may_offload).asked()


class ResidualReader:
    """Read candidates for rematerialization off a model."""

    def __init__(self, solved: SolvedMesh, *, may_offload: bool = True) -> None:
        self.model, self.labels = solved.model, solved.labels
        self.symmetry, self.may_offload = solved.mesh_problem.symmetry, may_offload
        self.device = self.model.analysis.target.device
        self.program: Program = self.model.graph.program
        self.flat = flatten(self.program)
        self.halves = self._halves()
        self.bound = frozenset(self.flat.top.outputs)
        self.block: FlatRegion = self.flat.top
        self.stacks = {s.value: s for s in find_stacks(self.flat, self.halves)}
        self.early_readers: dict[int, list[FlatOp]] = {}
        for line, is_late in zip(self.block.ops, self.halves.is_late, strict=True):
            for v in () if is_late else line.operands:
                self.early_readers.setdefault(v, []).append(line)
        self.node_s = solved.seconds(lambda source, target: target)
        self.nodes: dict[int, list[int]] = defaultdict(list)
        for node in self.model.graph.nodes:
            if node.op is not None:
                self.nodes[node.op.id].append(node.id)

    def _halves(self) -> Halves:
        return halves_of(self.flat.top)

    def asked(self) -> RematQuestion:
        """Return the remat problem."""
        stored = [v for v in self._kept() if self._is_stored(v)]
        sources = self._sources(stored)
        kept = {*stored, *sources, *self.bound}
        followers = {
            v: self._needs(self._again(v, kept - {v}))
            for v in self._kept()
            if v not in kept and v not in self.stacks
        }
        uses: dict[int, set[int]] = {v: set() for v in sources}
        uses |= {v: self._late_times(v) for v in stored}
        for v, needs in followers.items():
            for need in needs:
                if need in uses:
                    uses[need] |= self._late_times(v)
        rows = [self._row(v, kept, uses[v]) for v in (*stored, *sources)]
        rows += self._carried(rows)
        rows.sort(key=lambda row: row.place)
        index = {row.value: i for i, row in enumerate(rows)}
        found = tuple(
            replace(r, needs=tuple(sorted({index[v] for v in r.needs if v in index})))
            for r in rows
        )
        first = min((min(times) for times in uses.values() if times), default=0)
        # The memory of all else, as maxima between the times of candidates.
        profile = np.array(self.model.problem.profile(self.labels), dtype=float)
        for row, c in zip(rows, found, strict=True):
            if c.uses and self._is_in_memory(row.value):
                profile[c.start : c.uses[-1] + 1] -= c.bytes
        times = {0, *(c.start for c in found)}
        times |= {t + d for c in found for t in c.uses for d in (0, 1)}
        bounds = sorted(t for t in times if t < len(profile))
        most = np.maximum.reduceat(np.maximum(profile, 0.0), bounds)
        base = zip(bounds, np.ceil(most).astype(int).tolist(), strict=True)
        return RematQuestion(
            Question(found, tuple(base), first),
            tuple(row.value for row in rows),
            frozenset(sources),
            self._loops(rows),
            {
                # Those that it is computed from, and those computed from it.
                v: tuple(index[n] for n in (*needs, *above) if n in index)
                for v, needs in followers.items()
                for above in [[row.value for row in rows if v in row.makes]]
            },
            tuple(row.work for row in rows),
            self._together_s,
            is_ordered=self.device.defers_gradients,
            parts=LIMITS.loop_parts,
        )

    def _together_s(self, remat: Collection[int], kept: Collection[int]) -> float:
        """Return the seconds to recompute values together; see `RematQuestion`."""
        found = 0.0
        plain = [v for v in remat if v not in self.stacks]
        stay = {*kept, *self.bound}
        made, maker = self.block.ops, self.block.maker
        plain = [v for v in plain if may_run_again(self.program, made[maker[v]].op)]
        lines = again(self.program, self.block, plain, stay).lines
        found += sum(self._line_s(self.block.ops[k]) for k in lines)
        for loop in {s.loop for s in self.stacks.values()}:
            mine = [s for s in self.stacks.values() if s.loop == loop]
            body = self.block.ops[loop].regions[0]
            gone = [s for s in mine if s.value in remat]
            rest = {s.inside for s in mine if s.value in kept}
            lines = again(self.program, body, [s.inside for s in gone], rest).lines
            found += sum(self._line_s(body.ops[k]) for k in lines)
            found -= sum(self._pass_s(s) for s in gone)
        return max(found, 0.0)

    def _loops(self, rows: list[RematRow]) -> dict[int, tuple[int, tuple[int, ...]]]:
        found: dict[int, list[int]] = {}
        at_top = self.halves.late_uses.keys() | self.block.maker.keys()
        for i, row in enumerate(rows):
            if row.value in self.stacks or row.value not in at_top:
                found.setdefault(row.place[0], []).append(i)
        lines = self.block.ops
        return {
            lines[k].op.id: (lines[k].call.trip_count, tuple(members))
            for k, members in found.items()
        }

    def _kept(self) -> list[int]:
        return [v for v in self.halves.late_uses if v not in self.bound]

    def _sources(self, stored: Collection[int]) -> list[int]:
        """Return results of matmuls that are live until the backward pass though none
        of its ops reads them: residuals that are not stored are computed from them
        there, such as the exponentials of a softmax from attention's scores."""
        known = {*stored, *self.bound}
        rest = (v for v in self._kept() if v not in known and v not in self.stacks)
        return self._products(rest, known)

    def _products(self, values: Iterable[int], known: Collection[int]) -> list[int]:
        """Return the stored results of matmuls from which values are recomputed.

        Args:
          values: the values to recompute.
          known: other values that are saved.
        """
        lines = {
            k: self.block.ops[k]
            for v in values
            for k in self._again(v, {*known} - {v}).lines
        }
        return sorted(
            made
            for line in lines.values()
            if line.op.traits.is_contraction
            for made in line.results
            if made not in known and self._is_stored(made)
        )

    def _is_stored(self, value: int) -> bool:
        port = self.model.graph.held.get(value)
        if port is None:
            return False
        is_op = self.model.graph.nodes[port.node].kind is NodeKind.OP
        stored = self.model.analysis.liveness.is_materialised
        return stored[port.id] or not is_op

    def _is_in_memory(self, value: int) -> bool:
        """Whether the plan's memory profile counts the value."""
        return True

    def _again(self, value: int, kept: set[int]) -> Rerun:
        line = self.block.ops[self.block.maker[value]]
        wanted = [value] if may_run_again(self.program, line.op) else []
        return again(self.program, self.block, wanted, kept)

    def _needs(self, remat: Rerun) -> tuple[int, ...]:
        return tuple(dict.fromkeys(chain.from_iterable(remat.inputs.values())))

    def _row(self, value: int, kept: set[int], uses: set[int]) -> RematRow:
        stack = self.stacks.get(value)
        if stack is not None:
            return self._stack_row(stack, uses)
        k = self.block.maker[value]
        remat = self._again(value, kept - {value})
        lines = [self.block.ops[j] for j in remat.lines]
        start = max(
            [self._times(line)[1] for line in self.early_readers.get(value, ())],
            default=self._times(self.block.ops[k])[1],
        )
        like, layer = self._layer(self.model.graph.held[value].node)
        return RematRow(  # Not offloaded: see `passes.remat.frame`.
            self._bytes(value),
            start + 1,
            tuple(sorted(uses)),
            self._needs(remat),
            sum(map(self._line_s, lines)) if lines else None,
            like=like,
            layer=layer,
            place=(k, 0),
            value=value,
            work=self._work(lines),
            makes=remat.values,
        )

    def _stack_row(self, stack: ResidualStack, uses: set[int]) -> RematRow:
        forward = self.block.ops[stack.loop]
        body, call = forward.regions[0], forward.call
        mine = [s for s in self.stacks.values() if s.loop == stack.loop]
        others = {s.inside: s.value for s in mine if s.inside != stack.inside}
        remat = again(self.program, body, [stack.inside], set(others))
        lines = [body.ops[j] for j in remat.lines]
        outside = dict(zip(body.inputs, forward.operands, strict=True))
        carries = call.carries(body.inputs)
        needs = [
            others.get(v, v if v in carries else outside.get(v, v))
            for v in self._needs(remat)
        ]
        can = bool(lines) and stack.inside not in carries
        pass_s, rate = self._pass_s(stack), self.device.host_bytes_per_s
        # Its cost in the plan includes the write into the stack.
        remat_s = max(0.0, sum(map(self._line_s, lines)) - pass_s)
        return RematRow(
            self._bytes(stack.value),
            self._times(forward)[0],  # It is allocated when the loop starts.
            tuple(sorted(uses)),
            tuple(needs),
            remat_s if can else None,
            2 * self._bytes(stack.value) / rate if rate and self.may_offload else None,
            remat_bytes=self._bytes(stack.value) // max(call.trip_count, 1),
            save_s=self.device.stack_passes * pass_s,
            place=(stack.loop, 1 + body.maker.get(stack.inside, -1)),
            value=stack.value,
            work=self._work(lines),
        )

    def _pass_s(self, stack: ResidualStack) -> float:
        """Return the seconds to write a stack whose slices would otherwise stay in
        registers; 0 for values that go through memory anyway, such as results of
        matmuls."""
        port = self.model.graph.held.get(stack.inside)
        if port is None or not self.model.graph.nodes[port.node].is_fusible:
            return 0.0
        return self._memory_s(self._bytes(stack.value))

    def _memory_s(self, size: int) -> float:
        """Return the seconds to write, or to read, `size` bytes."""
        rate = self.device.hbm_bytes_per_s * self.device.memory_efficiency
        return size / rate

    def _carried(self, rows: list[RematRow]) -> list[RematRow]:
        """Return carries of forward loops that would have to be stacked for other
        values to be recomputed from."""
        known = {row.value for row in rows}
        found: dict[int, RematRow] = {}
        for row in rows:
            stack = self.stacks.get(row.value)
            if stack is None:
                continue
            forward = self.block.ops[stack.loop]
            call, body = forward.call, forward.regions[0]
            for v in set(row.needs) & set(call.carries(body.inputs)):
                if v not in known:
                    size = self._bytes(v) * call.trip_count
                    at = (stack.loop, 0)
                    found[v] = RematRow(size, row.start, (), place=at, value=v)
        return list(found.values())

    def _bytes(self, value: int) -> int:
        port = self.model.graph.held.get(value)
        if port is None:  # a scalar
            return self.program.values[value].bytes
        options = self.model.options[port.node].outs[port.result]
        sizes = self.model.builder.sizes
        held = sizes.held_bytes(options, self.program.values[value])
        return int(held[self.labels[port.node]])

    def _line_s(self, line: FlatOp) -> float:
        return sum(
            self.node_s[n]
            for op, _ in self.program.within(line.op)
            for n in self.nodes[op.id]
        )

    def _work(self, lines: list[FlatOp]) -> RerunWork:
        ops = (op for line in lines for op, _ in self.program.within(line.op))
        return max(map(RerunWork.of, ops), default=RerunWork.SMALL)

    def _times(self, line: FlatOp) -> tuple[int, int]:
        """Return the times at which an equation starts and ends."""
        graph = self.model.graph
        times: list[int] = []
        for op, _ in self.program.within(line.op):
            for n in self.nodes[op.id]:
                time = graph.nodes[n].time
                times += [graph.loop_start.get(n, time), graph.loop_end.get(n, time)]
        return (min(times), max(times)) if times else (0, 0)

    def _late_times(self, value: int) -> set[int]:
        found: set[int] = set()
        for k in self.halves.late_uses[value]:
            found.update(self._times(self.block.ops[k]))
        return found - {0} or {self.model.graph.end}

    def _layer(self, node: int) -> tuple[int | None, int]:
        orbits = self.symmetry.orbits
        members = np.flatnonzero(orbits == orbits[node])
        if len(members) < 2:
            return None, 0
        return int(orbits[node]), int(np.searchsorted(members, node))
