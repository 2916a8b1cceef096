"""Efficiencies and overlap of hardware, fitted to a benchmark's programs.

For every target: peak seconds over the compiler's estimated seconds, summed over all
programs, separately for compute-bound and memory-bound work (where the compiler has
estimates, that is on TPU); and the share of collectives that hide behind compute, of
those that by the plan can overlap with other work, as the median over programs in which
these are many. The error is that of compute with the fitted efficiencies, over
programs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rhino_jax.bench.checks import BenchError
from rhino_jax.bench.records import Result
from rhino_jax.hardware.files import configs_dir
from rhino_jax.verify.hlo.records import Rates


MIN_PROGRAMS = 3
"""Minimum number of programs for a fit."""

MANY = 0.5
"""Minimum share of the collectives' time that could hide for a program to count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Fitted rates of one kind of hardware; None where programs do not determine them.

    Attributes:
      hardware: its name, as "v5e".
      programs: number of different compiled programs.
      matmul_efficiency, memory_efficiency, hidable_share: as in `Device`.
      compute_error: median of |fitted - compiled| / compiled seconds of compute.
      hidable_programs: number of programs of which the share is the median.
      hidable_spread: half of the distance between its quartiles.
    """

    hardware: str
    programs: int
    matmul_efficiency: float | None
    memory_efficiency: float | None
    compute_error: float | None
    hidable_share: float | None
    hidable_programs: int
    hidable_spread: float | None


def fit_results(results: Iterable[Result]) -> tuple[Fit, ...]:
    """Return one fit for each kind of hardware, sorted by name."""
    programs: dict[str, dict[str, Result]] = {}
    for r in results:
        if r.fits and r.rates is not None and r.target.partition(":")[0] != "cpu":
            name = r.target.partition(":")[0]
            programs.setdefault(name, {}).setdefault(r.program or r.key, r)
    return tuple(
        _fit(name, tuple(found.values()))
        for name, found in sorted(programs.items())
        if len(found) >= MIN_PROGRAMS
    )


def _fit(hardware: str, results: Sequence[Result]) -> Fit:
    rates = [r.rates for r in results if r.rates is not None]
    matmul, memory = (_efficiency(rates, work) for work in ("matmul", "memory"))
    error = None
    if matmul is not None and memory is not None:
        errors = [
            abs((r.matmul_peak_s / matmul + r.memory_peak_s / memory) / taken - 1)
            for r in rates
            if (taken := r.matmul_s + r.memory_s)
        ]
        error = float(np.median(errors))
    shares = [s for r in results if (s := _hidden_share(r)) is not None]
    has_shares = len(shares) >= MIN_PROGRAMS
    low, middle, high = np.quantile(shares or (0.0,), (0.25, 0.5, 0.75))
    return Fit(
        hardware=hardware,
        programs=len(results),
        matmul_efficiency=matmul,
        memory_efficiency=memory,
        compute_error=error,
        hidable_share=float(middle) if has_shares else None,
        hidable_programs=len(shares),
        hidable_spread=float(high - low) / 2 if has_shares else None,
    )


def _efficiency(rates: Sequence[Rates], work: str) -> float | None:
    """Return peak seconds over estimated ones of "matmul" or "memory" work."""
    at_peak, taken = (
        sum(getattr(r, f"{work}_{end}") for r in rates) for end in ("peak_s", "s")
    )
    return at_peak / taken if at_peak and taken else None


def _hidden_share(result: Result) -> float | None:
    """Return hidden seconds over those that could hide; None if few could."""
    assert result.rates is not None
    compiled, predicted = result.compiled, result.predicted
    if compiled is None or compiled.communication_s is None or predicted is None:
        return None
    hidden_s, slack_s = result.rates.hidden_s, predicted.slack_s or 0.0
    all_s = hidden_s + compiled.communication_s
    return min(1.0, hidden_s / slack_s) if slack_s > MANY * all_s else None


def to_text(fits: Iterable[Fit]) -> str:
    """Return the fits, a line each."""
    lines = []
    for f in fits:
        said = [f"{f.hardware}: {f.programs} programs"]
        if f.compute_error is not None:
            said.append(
                f"matmul_efficiency {f.matmul_efficiency:.3f}, memory_efficiency"
                f" {f.memory_efficiency:.3f}, median error of compute"
                f" {f.compute_error:.1%}"
            )
        if f.hidable_spread is not None:
            said.append(
                f"hidable_share {f.hidable_share:.2f} ± {f.hidable_spread:.2f}"
                f" ({f.hidable_programs} programs)"
            )
        lines.append("; ".join(said))
    return "\n".join(lines)


def write_fit(fit: Fit, folder: Path | None = None) -> Path:
    """Write a fit into the hardware's file, with its error.

    Args:
      fit: the fit; values that are None are not written, nor is the efficiency of HBM
        where the file states on-chip memory.
      folder: folder of hardware files; None: rhino's own.

    Raises:
      BenchError: an efficiency is above 1; the file has no such line, or cannot be
        written.
    """
    file = (folder or configs_dir() / "hardware") / f"{fit.hardware}.toml"
    if file.exists() and "\non_chip_bytes = " in file.read_text(encoding="utf-8"):
        # Programs' bytes are in both memories.
        fit = replace(fit, memory_efficiency=None)
    by = f"fitted: {fit.programs} programs"
    error = "" if fit.compute_error is None else f", error {fit.compute_error:.0%}"
    values = {
        "matmul_efficiency": (fit.matmul_efficiency, f"{by}{error}"),
        "memory_efficiency": (fit.memory_efficiency, f"{by}{error}"),
        "hidable_share": (
            fit.hidable_share,
            f"fitted: {fit.hidable_programs} programs, ± {fit.hidable_spread or 0:.2f}",
        ),
    }
    try:
        text = file.read_text(encoding="utf-8")
        for key, (value, why) in values.items():
            if value is not None:
                _refuse_beyond_peak(key, value, fit.programs, str(file))
                text = _with_line(text, key, f"{value:.3g}", why, str(file))
        file.write_text(text, encoding="utf-8")
    except OSError as failed:
        raise BenchError(
            f"`fit --write`: {failed.strerror}.",
            where=str(file),
            fix="run it where rhino's configs can be written, or leave out --write.",
        ) from None
    return file


def _refuse_beyond_peak(key: str, value: float, programs: int, file: str) -> None:
    """Refuse a share above 1, which no hardware file may have."""
    if value > 1:
        raise BenchError(
            f"`fit --write`: {key} is above 1.",
            where=file,
            numbers=f"{value:.3g} over {programs} programs",
            fix="fit larger programs, whose arrays do not stay on the chip; or"
            " correct the peak in the file.",
        )


def _with_line(text: str, key: str, value: str, why: str, file: str) -> str:
    line = f"{key} = {value}".ljust(40) + f" # {why}"
    new, count = re.subn(rf"(?m)^{key} = .*$", line, text)
    if count != 1:
        raise BenchError(
            "`fit --write`: the hardware file has no one line to write to.",
            where=file,
            numbers=f"{count} lines {key} = …",
            fix=f"write one line {key} = 1.0",
        )
    return new
