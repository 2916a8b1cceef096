"""List what processes compare line by line: programs and plans.

A program includes more here than a plan depends on: literals and the parameters of
primitives, since the compiled program must be the same everywhere. Names of functions
and source lines are ignored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import is_jaxpr, is_literal, open_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs, ops_and_equations
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.printer import format_type
from rhino_jax.ir.program import Op, Program, Region
from rhino_jax.ir.spec import Spec, axes_text, format_spec
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import Pipeline


LONGEST = 300
"""Largest number of characters of a value; the rest of a longer one is hashed."""

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_NAMES = frozenset({"name", "debug", "debug_info", "name_and_src_info", "metadata"})
"""Parameters with names and source locations, which are ignored."""


@dataclass(frozen=True, slots=True)
class AgreedItem:
    """One item that must be equal in all processes.

    Attributes:
      name: name of the item, as `mul %6`, the same in all processes that agree so far.
      value: text that must be equal.
      where: source line or tree path; may differ.
    """

    name: str
    value: str
    where: str = ""


def digest(lines: Sequence[AgreedItem]) -> str:
    """Return the hash of items' names and values."""
    found = hashlib.sha256()
    for line in lines:
        found.update(f"{line.name}\0{line.value}\n".encode())
    return found.hexdigest()


def first_difference(
    one: Sequence[AgreedItem], other: Sequence[AgreedItem]
) -> tuple[AgreedItem, AgreedItem] | None:
    """Return the first pair of items that differ, or None.

    Where one list ends first, an item for its end is paired with the other's.
    """
    end = AgreedItem("nothing", "the end")
    for a, b in itertools.zip_longest(one, other, fillvalue=end):
        if (a.name, a.value) != (b.name, b.value):
            return a, b
    return None


def to_bytes(lines: Sequence[AgreedItem]) -> bytes:
    text = json.dumps([[line.name, line.value, line.where] for line in lines])
    return zlib.compress(text.encode(), 1)


def from_bytes(data: bytes) -> list[AgreedItem]:
    return [AgreedItem(*entry) for entry in json.loads(zlib.decompress(data))]


def of_program(traced: Traced, asked: Mapping[str, str]) -> list[AgreedItem]:
    """List everything that determines the compiled program, in program order.

    Args:
      traced: the traced function.
      asked: the user's options, as name → value.
    """
    program = traced.program
    lines = [AgreedItem(f"{name}=", value) for name, value in asked.items()]
    for entry in program.inputs:
        kind = "captured array" if entry.is_const else "argument"
        value = _type(program, entry.value) + (" donated" if entry.is_donated else "")
        # A tree path is a name that the user gave.
        where = "" if entry.is_const else entry.path
        lines.append(
            AgreedItem(f"{kind} {where or f'%{entry.value}'}", value, entry.path)
        )
    lines += _ops(program, traced.closed_jaxpr, program.body)
    results = open_jaxpr(traced.closed_jaxpr).outvars
    for result, atom in zip(program.outputs, results, strict=True):
        value = f"{_atom(program, result.value, atom)}, replaces {result.state_of}"
        lines.append(AgreedItem(f"result {result.path}", value, result.path))
    return lines


def _ops(program: Program, jaxpr: Any, region: Region) -> Iterator[AgreedItem]:
    for op, eqn in ops_and_equations(program, region, jaxpr):
        operands = [
            _atom(program, value, atom)
            for value, atom in zip(op.operands, eqn.invars, strict=True)
        ]
        results = [_type(program, value) for value in op.results]
        said = {k: _said(v) for k, v in sorted(eqn.params.items()) if k not in _NAMES}
        text = [f"{k}={v}" for k, v in said.items() if v not in ("", "None")]
        value = f"{', '.join(operands)} -> {', '.join(results)} {' '.join(text)}"
        name = _name(op)
        yield AgreedItem(name, _short(value), str(op.source))
        if op.call is not None:
            bodies = closed_region_jaxprs(eqn)
            for body, inner in zip(bodies, op.call.regions, strict=True):
                yield from _ops(program, body, inner)
                kept = ", ".join(
                    _atom(program, value, atom)
                    for value, atom in zip(
                        inner.outputs, open_jaxpr(body).outvars, strict=True
                    )
                )
                yield AgreedItem(f"results inside {name}", kept, str(op.source))


def _name(op: Op) -> str:
    return f"{op.name} %{op.results[0]}" if op.results else op.name


def _atom(program: Program, value: int, atom: Any) -> str:
    if is_literal(atom):
        return f"{_type(program, value)} {_said(atom.val)}"
    return f"%{value}"


def _type(program: Program, value: int) -> str:
    return format_type(program.values[value])


def _said(param: Any) -> str:
    """Return the text of a parameter, equal in all processes.

    Empty for jaxprs, which are listed on their own.
    """
    if is_jaxpr(param):
        return ""
    if isinstance(param, tuple | list):
        return f"({','.join(_said(p) for p in param)})"
    if isinstance(param, set | frozenset):
        return f"{{{','.join(sorted(_said(p) for p in param))}}}"
    if isinstance(param, dict):
        items = sorted((str(k), _said(v)) for k, v in param.items())
        return f"{{{','.join(f'{k}:{v}' for k, v in items)}}}"
    if callable(param) and hasattr(param, "__name__"):
        return ""  # a function, which is listed by its jaxpr
    return _ADDRESS.sub("", repr(param))


def _short(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    rest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{text[:LONGEST]}… ({rest})"


def _of_stages(plan: PlanData, pipeline: Pipeline) -> Iterator[AgreedItem]:
    """List a plan's stages, whose values are not those of the program."""
    cut = f"{pipeline.runs} {pipeline.micro_batches} {pipeline.schedule}"
    cut += f" {pipeline.slices}"
    yield AgreedItem("pipeline", f"{cut} {pipeline.per_microbatch}")
    for i, stage in enumerate(plan.stages):
        yield AgreedItem(f"stage {i}", f"{stage.mesh_axes} on {stage.devices}")
        decisions = stage.decisions
        for name in ("values", "operands", "region_outputs", "waypoints", "through"):
            for key, spec in sorted(getattr(decisions, name).items()):
                yield AgreedItem(f"layout in stage {i}", f"{name} {key} {spec}")
        yield AgreedItem(f"results of stage {i}", str(decisions.outputs))


def of_plan(plan: PlanData, program: Program) -> list[AgreedItem]:
    """List everything that a plan specifies for a program, in order."""
    names = [name for name, _ in plan.mesh_axes]

    def text(spec: Spec) -> str:
        return format_spec(spec, names)

    axes = axes_text(plan.mesh_axes)
    lines = [AgreedItem("mesh", axes), AgreedItem("program", plan.fingerprint)]
    kinds = (("argument", plan.inputs), ("result", plan.outputs))
    for kind, leaves in kinds:
        for leaf in leaves:
            where = f" of {leaf.stages}" if plan.has_tasks else ""
            said = text(leaf.spec) + where
            lines.append(AgreedItem(f"{kind} {leaf.path}", said, leaf.path))
    if plan.has_tasks and plan.pipeline is not None:
        return [*lines, *_of_stages(plan, plan.pipeline)]
    decisions = plan.decisions
    annotated = defaultdict[int, list[str]](list)
    for value, spec in decisions.values.items():
        annotated[value].append(text(spec))
    for value, waypoints in decisions.waypoints.items():
        annotated[value] += [f"over {text(s)}" for s in waypoints]
    read = defaultdict[int, list[str]](list)
    for (op_id, operand), spec in sorted(decisions.operands.items()):
        read[op_id].append(f"reads {operand} as {text(spec)}")
    for (op_id, operand), stops in sorted(decisions.through.items()):
        read[op_id] += [f"reads {operand} over {text(s)}" for s in stops]
    for (op_id, region, out), spec in sorted(decisions.region_outputs.items()):
        read[op_id].append(f"region {region} gives {out} {text(spec)}")
    for op in program.ops:
        texts = [t for value in op.results for t in annotated.pop(value, [])]
        texts += read[op.id]
        lines.append(AgreedItem(_name(op), "; ".join(texts), str(op.source)))
    for value, texts in sorted(annotated.items()):  # those of no op
        lines.append(AgreedItem(f"value %{value}", "; ".join(texts)))
    lowering = decisions.lowering
    how = (lowering.gathers_by_axis, lowering.annotates_waypoints)
    lines.append(AgreedItem("gathers by axis, annotates waypoints", str(how)))
    return lines
