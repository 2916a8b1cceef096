"""Changes of compiled steps since an earlier run of a suite."""

from __future__ import annotations

from collections.abc import Iterable

from rhino_jax.bench.records import FINAL, Result
from rhino_jax.bench.tables.figures import geometric_mean


Cell = tuple[str, str, str, str]
"""Workload, regime, target and method, which identify a cell across versions."""


def changes_text(
    results: Iterable[Result], earlier: Iterable[Result], file: str
) -> str:
    """Return lines on the changes since an earlier run.

    First a line per method with compiled step times over the earlier ones, where both
    fit; then cells that fit only now, or no longer, and failures.

    Args:
      results: results of this run.
      earlier: results of the earlier run.
      file: file of the earlier results.
    """
    now, before = ({_cell(r): r for r in rs} for rs in (results, earlier))
    ratios: dict[str, list[tuple[float, str]]] = {}
    lost, won, unknown = [], [], []
    for cell, new in now.items():
        old = before.get(cell)
        if old is None:
            continue
        new_s, old_s = _step_s(new), _step_s(old)
        name = f"{new.workload} on {new.target}"
        if new.status not in FINAL or old.status not in FINAL:
            unknown.append(f"{name}, {new.method}: {new.status}, was {old.status}")
            continue
        if new_s is not None and old_s is not None:
            ratios.setdefault(new.method, []).append((new_s / old_s, name))
        elif old_s is not None:
            lost.append(f"{name}, {new.method}")
        elif new_s is not None:
            won.append(f"{name}, {new.method}")
    lines = [f"Compiled step times over those of {file}, where both fit:"]
    for method, found in ratios.items():
        low, high = min(found), max(found)
        mean = geometric_mean([ratio for ratio, _ in found])
        lines.append(
            f"- `{method}`, {len(found)} rows: geometric mean {mean:.3f}, from"
            f" {low[0]:.3f} ({low[1]}) to {high[0]:.3f} ({high[1]})"
        )
    if not ratios:
        lines.append("- no cell is in both")
    lines += [f"- fits no longer: {x}" for x in lost]
    lines += [f"- fits now: {x}" for x in won]
    lines += [f"- not compared: {x}" for x in unknown]
    return "\n".join(lines)


def _cell(result: Result) -> Cell:
    return result.workload, result.regime, result.target, result.method


def _step_s(result: Result) -> float | None:
    if not result.fits or result.compiled is None:
        return None
    return result.compiled.step_time_s
