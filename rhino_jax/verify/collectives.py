"""Every collective of a compiled program: kind, axes, bytes and trip count.

Bytes are what one device puts on the wire, in the convention of a plan's
`Collective`, for a group of n devices:

    all-reduce          2 (n-1)/n × operand
    all-gather            (n-1)/n × result
    reduce-scatter        (n-1)/n × operand
    all-to-all            (n-1)/n × operand
    collective-permute              operand

An asynchronous pair counts once, at its start. Several arrays combined into one
collective are one collective. A collective inside loops counts as often as they
run. Of the branches of a conditional, the one that moves most counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rhino_jax.plan.diff import Traffic, traffic_of
from rhino_jax.plan.records import Collective
from rhino_jax.verify.groups import MeshMap, map_mesh, parse_groups, parse_pairs
from rhino_jax.verify.hlo import Computation, Instruction, Module, parse_module
from rhino_jax.verify.loops import trip_count


KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-broadcast",
}


def read_collectives(
    hlo_text: str,
    mesh_axes: Sequence[tuple[str, int]],
    device_ids: Sequence[int] | None = None,
) -> tuple[Collective, ...]:
    """Read the collectives of a compiled program, in run order.

    Args:
      hlo_text: `compiled.as_text()`.
      mesh_axes: (name, size) of every mesh axis, major first.
      device_ids: ids of the mesh's devices in mesh order, as the program's replica
        groups use them; `jax.jit` numbers them 0, 1, 2, … in mesh order (None).
    Returns:
      One record per instruction, all its trips together. `seconds` is 0: text does
      not tell time. `op` is JAX's name of the operation. `reason` says what is
      unusual: a loop whose count depends on data (counted once), part of an axis.
    Raises:
      ValueError: the text is no HLO module.
      MeshError: the program runs on other devices than the mesh's.
    """
    module = parse_module(hlo_text)
    reader = _Reader(module, map_mesh(mesh_axes, device_ids), {})
    entry = module.computations[module.entry]
    return tuple(reader.read(entry, count=1, is_known=True))


def count_collectives(
    collectives: Iterable[Collective],
) -> dict[tuple[str, tuple[str, ...]], Traffic]:
    """Count, bytes and seconds by (kind, axes): of a compiled program or a plan."""
    return traffic_of(collectives)


@dataclass(frozen=True, slots=True)
class _Reader:
    """Walks the call graph of one module.

    Attributes:
      module: the program.
      mesh: coordinates of its devices.
      moving: memo: computation → whether it, or what it calls, moves data.
    """

    module: Module
    mesh: MeshMap
    moving: dict[str, bool]

    def read(
        self, computation: Computation, *, count: int, is_known: bool
    ) -> Iterator[Collective]:
        for instruction in computation:
            kind = _kind(instruction.opcode)
            if kind:
                found = self._collective(
                    kind, computation, instruction, count, is_known
                )
                if found is not None:
                    yield found
                continue
            called = self._called(instruction)
            if not called:
                continue
            inner, inner_known = count, is_known
            if instruction.opcode == "while":
                trips = trip_count(self.module, computation, instruction)
                inner, inner_known = (
                    count * (1 if trips is None else trips),
                    (is_known and trips is not None),
                )
            branches = [
                tuple(self.read(x, count=inner, is_known=inner_known)) for x in called
            ]
            if instruction.opcode == "conditional":
                branches = [max(branches, key=lambda b: sum(c.bytes for c in b))]
            for branch in branches:
                yield from branch

    def _called(self, instruction: Instruction) -> tuple[Computation, ...]:
        """The computations that an instruction runs and that move data."""
        if instruction.opcode.endswith(("-done", "-update")):
            return ()
        computations = self.module.computations
        names = [n for n in _called_names(instruction) if n in computations]
        return tuple(computations[n] for n in names if self._is_moving(n))

    def _is_moving(self, name: str) -> bool:
        if name not in self.moving:
            self.moving[name] = any(
                _kind(i.opcode)
                or any(
                    self._is_moving(n)
                    for n in _called_names(i)
                    if n in self.module.computations
                )
                for i in self.module.computations[name]
            )
        return self.moving[name]

    def _collective(
        self,
        kind: str,
        computation: Computation,
        instruction: Instruction,
        count: int,
        is_known: bool,
    ) -> Collective | None:
        """The record of one instruction; None where no data leaves a device."""
        operand_bytes = sum(
            computation.instructions[x].bytes for x in instruction.operands
        )
        notes = [] if is_known else ["in a loop whose count depends on data"]
        if kind == "collective-permute":
            pairs = parse_pairs(instruction.attributes)
            moving = [(a, b) for a, b in pairs if a != b]
            axes, wire_bytes = self.mesh.axes_of_pairs(moving), operand_bytes
        else:
            groups = parse_groups(instruction.attributes, self.mesh.num_devices)
            axes, is_whole = self.mesh.axes_of(groups)
            size = max(len(g) for g in groups)
            # The computation's name tells what XLA:TPU fuses into one transfer.
            if kind == "all-reduce" and "all-reduce-scatter" in computation.name:
                kind = "reduce-scatter"
            wire_bytes = _wire_bytes(kind, operand_bytes, size)
            if not is_whole:
                notes.append(f"over groups of {size}")
        if not axes:
            return None
        return Collective(
            kind=kind,
            axes=axes,
            bytes=wire_bytes * count,
            count=count,
            seconds=0.0,
            op=instruction.op_name or instruction.name,
            source=instruction.source,
            reason="; ".join(notes),
        )


def _kind(opcode: str) -> str:
    """The kind of a collective's opcode; empty for a `-done` and all others."""
    return KINDS.get(opcode.removesuffix("-start"), "")


def _wire_bytes(kind: str, operand_bytes: int, size: int) -> int:
    if kind == "all-reduce":
        return round(2 * (size - 1) * operand_bytes / size)
    if kind == "all-gather":
        return (size - 1) * operand_bytes
    if kind == "collective-broadcast":
        return operand_bytes
    return round((size - 1) * operand_bytes / size)


_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)"
    r"=%?([\w.\-]+)"
)
_CALLED_MANY = re.compile(
    r"\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
)


def _called_names(instruction: Instruction) -> list[str]:
    names = _CALLED.findall(instruction.attributes)
    for many in _CALLED_MANY.findall(instruction.attributes):
        names += [x.strip().lstrip("%") for x in many.split(",") if x.strip()]
    return names
