"""What compiled programs send: as planned, with sums left open, and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.hardware.files import load_target
from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.resolved_pins import resolve_pins
from rhino_jax.planner.cuts import with_deferred_reductions
from rhino_jax.planner.search.records import Request
from rhino_jax.planner.variant_search import Search, VariantCandidate
from rhino_jax.runtime.spmd import SpmdExecutable
from rhino_jax.verify.compile import compile_lowered
from rhino_jax.verify.hlo.module import parse_module
from tests.passes.deferred_reductions.cases import Case
from tests.verify.hlo.collectives_of import read_collectives


@dataclass(frozen=True)
class Planned:
    """A case's plan as it was, and with sums left open."""

    traced: Traced
    first: PlanData
    again: Traced
    best: PlanData


def planned(case: Case, axes: Sequence[tuple[str, int]], hardware: str) -> Planned:
    """Plan a case both ways."""
    target = load_target(hardware)
    traced = trace(case.fn, case.args, {})

    pins = resolve_pins(case.pins, traced.program, axes)
    request = Request(
        memory_budget_bytes=target.device.hbm_bytes,
        pins=pins.inputs,
        output_pins=pins.outputs,
        value_pins=pins.values,
        level="fast",
    )
    search = Search(traced, None, [tuple(axes)], target, request, case.pins, 0, "test")
    first = search.find()
    best = with_deferred_reductions(VariantCandidate(search, first))
    again = best.search
    return Planned(traced, first.plan(), again.running, again.plan(best.found))


def sent_by_plan(traced: Traced, plan: PlanData, mesh: Mesh) -> float:
    """Bytes that a device sends in one step of a plan, as compiled."""
    executable = SpmdExecutable(traced, plan, mesh)
    opened = open_jaxpr(traced.closed_jaxpr)
    shapes = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding)
        for v, sharding in zip(
            [*opened.invars, *opened.constvars], executable.in_shardings, strict=True
        )
    ]
    return _sent(executable.lower(shapes), mesh)


def sent_by_hand(case: Case, mesh: Mesh) -> float:
    """The same of the program that is written by hand."""

    def placed(spec: P, shapes: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes
        )

    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    args = jax.tree.map(placed, case.specs, case.args, is_leaf=is_spec)
    fn = jax.shard_map(
        case.by_hand,
        mesh=mesh,
        in_specs=case.specs,
        out_specs=case.results,
        check_vma=False,
    )
    return _sent(jax.jit(fn).lower(*args), mesh)


def _sent(lowered: Any, mesh: Mesh) -> float:
    text = compile_lowered(lowered, mesh=mesh).hlo_text
    axes = tuple(zip(mesh.axis_names, mesh.devices.shape, strict=True))
    return float(sum(c.bytes for c in read_collectives(parse_module(text), axes)))
