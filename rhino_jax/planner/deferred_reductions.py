"""Plans with deferred reductions, at sites that a first plan suggests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rhino_jax.cost.collectives import collective_s, wire_bytes
from rhino_jax.cost.combine import combine_steps
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.spec import Spec, replicated, share_of, without
from rhino_jax.ir.traits import OpKind
from rhino_jax.ir.transform import DEFERRED_REDUCTIONS, Transform
from rhino_jax.passes.deferred_reductions import (
    Site,
    SitePrices,
    accumulated,
    as_text,
    sites,
)
from rhino_jax.plan.decisions import Decisions
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.variant_search import (
    MIN_LAYOUT_GAIN,
    VariantCandidate,
    VariantOption,
    Variants,
)


@dataclass(frozen=True)
class PlannedPrices(SitePrices):
    """Read costs off a plan.

    Attributes:
      decisions: the specs of the plan.
      mesh: the mesh, laid out on the hardware.
      target: the hardware.
    """

    decisions: Decisions
    mesh: LaidMesh
    target: Target

    @cached_property
    def cuts(self) -> Mapping[int, tuple[tuple[int, ...], ...]]:
        """Op id → the mesh axes that shard each factor of its rule, as the op reads its
        operands."""
        found = {}
        for op in self.program.ops:
            if op.rule is None:
                continue
            axes_of: dict[int, tuple[int, ...]] = {}
            for i, layout in enumerate(op.rule.operands):
                held = self._spec(op.operands[i])
                spec = self.decisions.operands.get((op.id, i), held)
                if len(spec) == len(layout):
                    for dim, axes in zip(layout, spec, strict=True):
                        if len(dim) == 1 and axes:
                            axes_of[dim[0]] = axes
            every = range(len(op.rule.factors))
            found[op.id] = tuple(axes_of.get(f, ()) for f in every)
        return found

    def _spec(self, value: int) -> Spec:
        rank = self.program.values[value].rank
        spec = self.decisions.values.get(value)
        return spec if spec is not None and len(spec) == rank else replicated(rank)

    def _made(self, value: int, axes: Sequence[int]) -> tuple[Spec, float]:
        """Return the spec of a value while it is unreduced over mesh axes, and its
        bytes on one device."""
        spec = without(self._spec(value), axes)
        whole = self.program.values[value]
        return spec, whole.bytes * share_of(spec, whole.shape, self.mesh.sizes)

    def close(self, value: int, axes: tuple[int, ...]) -> tuple[float, float]:
        """Return the seconds and wire bytes of reducing a value to its own spec."""
        made, local = self._made(value, axes)
        steps = combine_steps(made, self._spec(value), axes, local, self.mesh)
        seconds = sum(
            s.runs * collective_s(s.kind, s.local_bytes, self.mesh.over(s.axes))
            for s in steps
        )
        sent = sum(
            s.runs
            * wire_bytes(
                s.kind, s.local_bytes, math.prod(self.mesh.sizes[a] for a in s.axes)
            )
            for s in steps
        )
        return seconds, sent

    def held_s(self, op: Op, axes: tuple[int, ...]) -> float:
        """Return the added memory and FLOP seconds of an op's unreduced result."""
        value, device = op.results[0], self.target.device
        whole, sizes = self.program.values[value], self.mesh.sizes
        made, local = self._made(value, axes)
        less = whole.bytes * share_of(self._spec(value), whole.shape, sizes)
        memory_s = (local - less) / (device.hbm_bytes_per_s * device.memory_efficiency)
        if not op.traits.is_contraction:
            return memory_s
        shares = [share_of(s, whole.shape, sizes) for s in (made, self._spec(value))]
        peak = device.matmul_efficiency * max(f for _, f in device.peak_flops_per_s)
        return memory_s + op.flops * (shares[0] - shares[1]) / peak


def sites_of(program: Program, found: SearchResult, target: Target) -> list[Site]:
    """Return the sites where a plan could defer a reduction, most useful first."""
    mesh = lay_out(target, found.mesh_axes)
    decisions = found.decisions()
    return sites(program, PlannedPrices(program, mesh.sizes, decisions, mesh, target))


def with_deferred_reductions(written: VariantCandidate) -> VariantCandidate:
    """Plan with deferred reductions, where that is predicted to be faster.

    Reductions of the given plan are deferred where it has them; those of loops in any
    case, since a plan that reduces in every trip has none left to defer.

    Args:
      written: the program, searched; a plan fits.
    Returns:
      The program with deferred reductions, searched at the same level; or the argument.
    """
    search, found = written.search, written.found
    program, sizes = search.running.program, [size for _, size in found.mesh_axes]
    variants = Variants(
        search=search.on(found.mesh_axes).asking(has_recipes=False),
        min_gain=MIN_LAYOUT_GAIN,
    )
    brief = variants.begin(replace(written, found=found.at_fast, done=()))

    def plan(sites: Sequence[Site]) -> VariantCandidate | None:
        """Plan with the reductions of some sites deferred; None where nothing fits,
        where they are estimated to save less than a variant must gain, or were tried
        before."""
        text = as_text(site.group for site in sites)
        done = (Transform(DEFERRED_REDUCTIONS, 0, 0, text),)
        option = VariantOption("deferred reductions", done)
        least_s = variants.min_gain * brief.step_s
        if option in variants.plans or sum(s.saved_s for s in sites) < least_s:
            return None
        found = variants.plan(option)
        return found if found is not None and found.found.fits else None

    plan(sites_of(program, brief.found, search.target))
    count = math.prod(sizes)
    supposed = plan(accumulated(program, [count]))
    if supposed is not None:
        # The mesh axes that shard most of the partial sums stacked in `count` parts, by
        # bytes.
        weights: Counter[tuple[int, ...]] = Counter()
        again = supposed.search.running.program
        specs = supposed.found.decisions().values
        for op in again.ops:
            value = again.values[op.operands[0]] if op.operands else None
            is_sum = op.traits.kind is OpKind.REDUCTION
            if is_sum and value and value.rank and value.shape[0] == count:
                if spec := specs.get(value.id):
                    weights[tuple(sorted(spec[0]))] += value.bytes
        used = weights.most_common(1)[0][0] if weights else ()
        if 0 < math.prod(sizes[a] for a in used) < count:
            plan(accumulated(program, [sizes[a] for a in used]))
    # What level "fast" takes is searched in any case, so that no level is worse.
    taken = [variants.taken()]
    if not found.is_same_choice(brief.found):
        plan(sites_of(program, found, search.target))
        taken.append(variants.taken())
    further = [one.again() for one in dict.fromkeys(taken) if one is not brief]
    return min([written, *further], key=lambda one: one.step_s)
