"""The choice of merged dims that are worth splitting.

A walk assumes that every reshape that merges dims keeps their parts split, and follows
each of these flows to its end. Splitting is of use where the parts are used separately:
where a later reshape splits them, where they are summed, or contracted with the same
parts. A flow ends badly where an op cannot be expressed on the parts: there they are
merged after all, and a sharding of the minor part would be gathered. It ends badly,
too, where the parts make the rows of a product short: memory then holds mostly padding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rhino_jax._compat import open_jaxpr, scan_counts
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    closed_region_jaxprs,
    evaluate,
    region_kind,
)
from rhino_jax.frontend.split_dims.forms import (
    SMALL,
    DimParts,
    Form,
    Groups,
    Origin,
    groups_of,
    shape_of,
)
from rhino_jax.frontend.split_dims.ops import spell
from rhino_jax.ir.program import RegionKind


def takes_parts(eqn: Any) -> bool:
    """Whether a call can run on split dims: its parameters do not depend on shapes.

    The derivative of a `custom_vjp` does.
    """
    return not eqn.primitive.name.startswith(("custom_vjp", "custom_vmap", "linear"))


@dataclass(slots=True)
class Flows:
    """The merged dims that are worth splitting.

    Attributes:
      kept: where these dims were merged.
      carries: identity of a scan → groups of its carries.
    """

    kept: set[Origin]
    carries: dict[int, list[Groups]]

    def of(self, groups: Groups) -> Groups:
        """Return these groups with all other dims merged."""
        return tuple(p if p.origins <= self.kept else p.merged for p in groups)


def find_flows(jaxpr: Any) -> Flows:
    """Choose the merged dims of a whole function that are worth splitting."""
    walk, opened = _FlowWalk(), open_jaxpr(jaxpr)
    outs = walk.region(opened, [Form(groups_of(v)) for v in opened.invars])
    for form in outs:
        walk.breaks(form.groups)
    flows = Flows(walk.kept(), {})
    flows.carries = {at: list(map(flows.of, g)) for at, g in walk.carries.items()}
    return flows


@dataclass(slots=True)
class _FlowWalk:
    """The state of the walk over a function.

    Attributes:
      together: origin → another of the same flow, or itself (union-find).
      used: origins of parts that were of use.
      merged: origin → elements of the largest value that was merged there.
      broken: origin → elements of the largest value that had to be merged after all, or
        that is better merged.
      carries: identity of a scan → groups of its carries.
    """

    together: dict[Origin, Origin] = field(default_factory=dict)
    used: set[Origin] = field(default_factory=set)
    merged: dict[Origin, int] = field(default_factory=dict)
    broken: dict[Origin, int] = field(default_factory=dict)
    carries: dict[int, list[Groups]] = field(default_factory=dict)

    def region(self, jaxpr: Any, inputs: Sequence[Form]) -> list[Form]:
        plain = lambda _, atom: Form(groups_of(atom))  # noqa: E731
        return evaluate(jaxpr, jaxpr.constvars, inputs, self.eqn, plain)

    def eqn(self, eqn: Any, operands: list[Form]) -> list[Form]:
        kind = region_kind(eqn)
        if kind is None:
            return self.plain(eqn, operands)
        bodies = [open_jaxpr(j) for j in closed_region_jaxprs(eqn)]
        if eqn.primitive.name in PLAIN_CALLS:
            return self.region(bodies[0], operands)
        if kind is RegionKind.CALL and takes_parts(eqn):
            return self.region(bodies[0], [Form(f.groups) for f in operands])
        if kind is RegionKind.SCAN:
            return self.scan(eqn, bodies[0], operands)
        for form in operands:
            self.breaks(form.groups)
        if kind is not RegionKind.CALL:
            for body in bodies:
                for out in self.region(body, [Form(groups_of(v)) for v in body.invars]):
                    self.breaks(out.groups)
        return [Form(groups_of(v)) for v in eqn.outvars]

    def plain(self, eqn: Any, operands: list[Form]) -> list[Form]:
        found = spell(eqn, operands)
        if found is None:
            for form in operands:
                self.breaks(form.groups)
            return [Form(groups_of(v)) for v in eqn.outvars]
        for form, read in zip(operands, found.operands, strict=True):
            self.breaks(form.groups, read)
        for parts in found.used:
            self.used |= parts.origins
        for parts in found.cramped:
            self.note_broken(parts, math.prod(shape_of(found.results[0])))
        for groups in (*found.operands, *found.results):
            for parts in groups:
                self.join(parts, math.prod(shape_of(groups)))
        return [Form(groups, found.free) for groups in found.results]

    def scan(self, eqn: Any, body: Any, operands: list[Form]) -> list[Form]:
        """Follow the flows through a loop: constants, and carries that leave as they
        enter, stay split."""
        num_consts, num_carry = scan_counts(eqn.params)
        first = num_consts + num_carry
        inside = [Form(f.groups) for f in operands[:first]]
        for form, var in zip(operands[first:], body.invars[first:], strict=True):
            if form.groups[0].is_apart:
                self.breaks(form.groups)
                inside.append(Form(groups_of(var)))
            else:
                inside.append(Form(form.groups[1:]))
        while True:
            outs = self.region(body, inside)
            changed = [
                k
                for k, out in enumerate(outs[:num_carry])
                if inside[num_consts + k].groups != out.groups
                and inside[num_consts + k].is_apart
            ]
            if not changed:
                break
            for k in changed:
                self.breaks(inside[num_consts + k].groups)
                inside[num_consts + k] = Form(groups_of(body.invars[num_consts + k]))
        carries = [form.groups for form in inside[num_consts:first]]
        for groups, out in zip(carries, outs, strict=False):
            self.breaks(out.groups, groups)
            for a, b in zip(groups, out.groups, strict=True):
                if a.is_apart:
                    self.join(DimParts(a.sizes, a.origins | b.origins), 0)
        self.carries[id(eqn)] = carries
        length = DimParts((int(eqn.params["length"]),))
        stacks: list[Groups] = [(length, *out.groups) for out in outs[num_carry:]]
        return [Form(groups) for groups in (*carries, *stacks)]

    def breaks(self, groups: Groups, read: Groups | None = None) -> None:
        """Record the dims that are merged after all: all split ones, or those that
        differ in `read`."""
        elements = math.prod(shape_of(groups))
        for d, parts in enumerate(groups):
            if read is None or parts != read[d]:
                self.note_broken(parts, elements)

    def note_broken(self, parts: DimParts, elements: int) -> None:
        for origin in parts.origins:
            self.broken[origin] = max(self.broken.get(origin, 0), elements)

    def join(self, parts: DimParts, elements: int) -> None:
        """Record that these origins belong to one flow."""
        if not parts.origins:
            return
        roots = [self.root(origin) for origin in parts.origins]
        for root in roots:
            self.together[root] = roots[0]
        for origin in parts.origins:
            self.merged.setdefault(origin, elements)

    def root(self, origin: Origin) -> Origin:
        while (up := self.together.setdefault(origin, origin)) != origin:
            origin = up
        return origin

    def kept(self) -> set[Origin]:
        """Return the origins of flows that are of use and do not end badly: the values
        that have to be merged after all are small relative to those merged at first."""
        flows: dict[Origin, list[Origin]] = {}
        for origin in list(self.together):
            flows.setdefault(self.root(origin), []).append(origin)
        return {
            origin
            for flow in flows.values()
            if not self.used.isdisjoint(flow)
            and max(self.broken.get(o, 0) for o in flow)
            <= SMALL * max(self.merged[o] for o in flow)
            for origin in flow
        }
