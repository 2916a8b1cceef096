"""Tables of probes: the worst programs, and figures by family and by variation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rhino_jax.bench.probe.run import Probe
from rhino_jax.bench.tables.figures import relative_error
from rhino_jax.bench.tables.table import markdown_table
from rhino_jax.units import format_bytes, format_seconds, format_share
from rhino_jax.verify.verdict import TIME_FACTOR


CHANGED = 1.1
"""Ratios that changed by this factor since an earlier run are listed."""


def report(
    found: Sequence[Probe], before: Mapping[str, Probe] | None, num_worst: int
) -> str:
    """Return the probes as Markdown, those predicted worst first.

    Args:
      found: the probes.
      before: by name, those of an earlier run to compare with; None: none.
      num_worst: number of programs in the table of the worst.
    """
    compiled = sorted((p for p in found if not p.error), key=lambda p: -factor(p))
    parts = []
    if compiled:
        parts += [_worst(compiled[:num_worst])]
        parts += [_groups(compiled, "family"), _groups(compiled, "variation")]
        parts += [summary(compiled)]
    failed = [f"- {p.name}: {p.error}" for p in found if p.error]
    if failed:
        parts.append("\n".join(["Not compiled:", "", *failed]))
    if before is not None:
        parts.append(_changes(compiled, before))
    return "\n\n".join(parts) + "\n"


def factor(probe: Probe) -> float:
    """Return by what factor a prediction is off, either way: at least 1."""
    return max(probe.ratio, 1 / probe.ratio)


def summary(compiled: Sequence[Probe]) -> str:
    """Return the figures of all in a line."""
    held = sum(factor(p) <= TIME_FACTOR for p in compiled)
    return (
        f"{len(compiled)} programs, {held} within {TIME_FACTOR} times; error of step"
        f" time: {_errors(compiled, _time)}; of peak memory: {_errors(compiled, _peak)}"
    )


def _time(probe: Probe) -> float:
    return abs(probe.ratio - 1)


def _peak(probe: Probe) -> float:
    return relative_error(probe.predicted_peak_bytes, probe.compiled_peak_bytes)


def _errors(probes: Sequence[Probe], of: Callable[[Probe], float]) -> str:
    errors = [of(p) for p in probes]
    high = float(np.quantile(errors, 0.95))
    return (
        f"median {format_share(statistics.median(errors))}, 95th percentile"
        f" {format_share(high)}"
    )


def _worst(probes: Sequence[Probe]) -> str:
    header = ["program", "cause", "predicted", "compiled", "ratio", "peak", "compiled"]
    lines = [
        [
            p.name,
            p.cause,
            format_seconds(p.predicted_s),
            format_seconds(p.compiled_s),
            f"{p.ratio:.2f}",
            format_bytes(p.predicted_peak_bytes),
            format_bytes(p.compiled_peak_bytes),
        ]
        for p in probes
    ]
    return markdown_table(header, lines, left=2)


def _groups(probes: Sequence[Probe], field: str) -> str:
    """Return figures by family or by variation."""
    groups: dict[str, list[Probe]] = {}
    for p in probes:
        groups.setdefault(getattr(p, field), []).append(p)
    header = [field, "programs", "ratio, median", "lowest", "highest"]
    header += ["error", "error of peak"]
    lines = []
    for name, members in groups.items():
        ratios = [p.ratio for p in members]
        middle = statistics.median(ratios)
        line = [f"{x:.2f}" for x in (middle, min(ratios), max(ratios))]
        errors = [statistics.median(map(of, members)) for of in (_time, _peak)]
        line = [name, str(len(members)), *line, *map(format_share, errors)]
        lines.append((middle, line))
    ordered = [line for _, line in sorted(lines, key=lambda x: -max(x[0], 1 / x[0]))]
    return markdown_table(header, ordered, left=1)


def _changes(compiled: Sequence[Probe], before: Mapping[str, Probe]) -> str:
    """Return what changed since an earlier run: first what is predicted worse now."""
    pairs = [(before[p.name], p) for p in compiled if p.name in before]
    pairs = [(old, new) for old, new in pairs if not old.error]
    if not pairs:
        return "No program of the earlier run is among these."
    changed = sorted(
        (factor(new) / factor(old), old, new)
        for old, new in pairs
        if max(new.ratio / old.ratio, old.ratio / new.ratio) > CHANGED
        or max(new.compiled_s, old.compiled_s)
        > CHANGED * min(new.compiled_s, old.compiled_s)
    )[::-1]
    worse = sum(x > 1 for x, _, _ in changed)
    lines = [
        f"Since the earlier run {len(changed)} of {len(pairs)} programs changed by more"
        f" than {format_share(CHANGED - 1)}: {worse} are predicted worse,"
        f" {len(changed) - worse} better. Before:"
        f" {summary([old for old, _ in pairs])}.",
        "",
    ]
    lines += [
        f"- {new.name}: {old.ratio:.2f} → {new.ratio:.2f}, compiled"
        f" {format_seconds(old.compiled_s)} → {format_seconds(new.compiled_s)}"
        for _, old, new in changed
    ]
    return "\n".join(lines)
