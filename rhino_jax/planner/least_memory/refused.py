"""The error where the budget is below the smallest peak of all allowed variants."""

from __future__ import annotations

import math

from rhino_jax.errors import InfeasiblePlanError, InternalError
from rhino_jax.planner.least_memory.freed import freed
from rhino_jax.planner.least_memory.variants import LeastMemory
from rhino_jax.planner.search.minimum_memory import divided_peak, refused
from rhino_jax.planner.variants import VariantCandidate
from rhino_jax.units import format_bytes


def error_of(least: LeastMemory, best: VariantCandidate) -> InfeasiblePlanError:
    """Return the error of the variant with the smallest peak, with the reason why
    further variants were refused and the keyword that allows them.

    Args:
      least: the completed search for the smallest peak.
      best: its result.
    """
    search = best.search
    try:
        refused(best.found, search.request).plan()
    except InfeasiblePlanError as error:
        told = error
    else:
        raise InternalError(
            f"A plan of `{search.traced.name}` over its memory budget was read back.",
            numbers=f"peak {format_bytes(best.peak_bytes)}",
        )
    where, fixes = [told.where], list[str]()
    if least.refused is not None:
        couples = "; ".join(filter(None, [least.refused.where, least.refused.numbers]))
        where.append(f"no micro-batches: {least.refused.what} {couples}")
        fixes = _freed(least, best)
    if not least.may_cut or not least.may_recompute:
        fixes.append(_left_open(least))
    others = ", ".join(f"{t.name} {format_bytes(t.peak_bytes)}" for t in least.tried)
    numbers = f"{told.numbers}; smallest peaks: {others}"
    divided = math.ceil(divided_peak(best.found))
    if divided > search.request.memory_budget_bytes:
        numbers += (
            f"; evenly divided over all devices {format_bytes(divided)}, which stages"
            " do not lower"
        )
    return InfeasiblePlanError(
        told.what,
        where="; ".join(where),
        numbers=numbers,
        fix="; or ".join([*fixes, told.fix]),
        smallest_peak_bytes=told.smallest_peak_bytes,
        divided_peak_bytes=divided,
    )


def _freed(least: LeastMemory, best: VariantCandidate) -> list[str]:
    """Return the keyword that decouples the batch, where that lowers the peak."""
    found = freed(least)
    if found is None:
        return []
    places, freely = found
    lower = min(t.peak_bytes for t in freely.tried)
    if lower >= best.peak_bytes:
        return []
    names = repr(places[0]) if len(places) == 1 else repr(places)
    return [
        f"take these sums over each micro-batch: per_microbatch={names} (smallest peak"
        f" then {format_bytes(lower)})"
    ]


def _left_open(least: LeastMemory) -> str:
    names = ["microbatches='auto'"] * (not least.may_cut)
    names += ["recompute='auto'"] * (not least.may_recompute)
    return f"leave it to the planner: {' and '.join(names)}"
