"""The equations that a program's ops were imported from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    user_frames,
)
from rhino_jax.frontend.provenance import is_library_file
from rhino_jax.frontend.regions import closed_region_jaxprs, ops_and_equations
from rhino_jax.ir.program import Op, Program, Region, RegionKind
from rhino_jax.passes.remat.regions import RegionOp


@dataclass(slots=True)
class Equations:
    """Equations and literals of a program, by the ids of its ops and values.

    Attributes:
      of: op id → equation.
      literals: value id → value of a literal, or of a constant of a region.
    """

    of: dict[int, Any] = field(default_factory=dict)
    literals: dict[int, Any] = field(default_factory=dict)

    @contextmanager
    def context(self, line: RegionOp) -> Iterator[None]:
        """Enter the name scopes and source line of an op, enclosing calls included."""
        with ExitStack() as stack:
            for call in line.within:
                eqn = self.of[call.id]
                stack.enter_context(eqn_context(eqn))
                name = eqn.params.get("name")
                if name:
                    stack.enter_context(jax.named_scope(str(name)))
            stack.enter_context(eqn_context(self.of[line.op.id]))
            yield

    def bind(self, line: RegionOp, operands: Sequence[Any]) -> list[Any]:
        """Bind an op's equation, unchanged, to new operands."""
        eqn = self.of[line.op.id]
        with self.context(line):
            return bind_eqn(eqn, operands, eqn.params)


def equations(closed: Any, program: Program) -> Equations:
    """Return the equations of a whole program, by the walk that imported it."""
    found = Equations()

    def walk(jaxpr: Any, region: Region, is_top: bool, call: Any) -> None:
        opened = open_jaxpr(jaxpr)
        consts: dict[Any, Any] = {}
        if not is_top:
            consts = dict(zip(opened.constvars, jaxpr_consts(jaxpr), strict=True))
        for op, eqn in ops_and_equations(program, region, opened):
            eqn = eqn if call is None else _placed(eqn, call)
            found.of[op.id] = eqn
            note(eqn.invars, op.operands, consts)
            enter(op, eqn)
        note(opened.outvars, region.outputs, consts)

    def enter(op: Op, eqn: Any) -> None:
        if op.call is not None:
            jaxprs = closed_region_jaxprs(eqn)
            call = eqn if op.call.kind is RegionKind.CALL else None
            for inner, region in zip(jaxprs, op.call.regions, strict=True):
                walk(inner, region, False, call)

    def note(atoms: Sequence[Any], ids: Sequence[int], consts: dict[Any, Any]) -> None:
        for atom, value in zip(atoms, ids, strict=True):
            if is_literal(atom):
                found.literals[value] = atom.val
            elif atom in consts:
                found.literals[value] = consts[atom]

    walk(closed, program.body, True, None)
    return found


def _placed(eqn: Any, call: Any) -> Any:
    """Return an equation of an inlined call with a user source line.

    Code that a library traced earlier has none of its own: it gets that of its call.
    """
    if any(not is_library_file(file) for file, *_ in user_frames(eqn.source_info)):
        return eqn
    info = eqn.source_info.replace(traceback=call.source_info.traceback)
    return eqn.replace(source_info=info)
