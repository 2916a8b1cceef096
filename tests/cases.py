"""Cases of a parametrized test: a covering few in the short run; the day's seed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import Any

import pytest

from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.target import Target


SLOW = pytest.mark.slow

SEED = int(os.environ.get("RHINO_TEST_SEED", f"{datetime.now(tz=UTC):%Y%m%d}"))
"""Seed of programs drawn every day: RHINO_TEST_SEED, or the date."""


def without_reserve(hardware: str) -> Target:
    """Return hardware of whose memory budgets plans may hold all by prediction."""
    return load_target(hardware).replace(reserve_share=0.0)


def covering(
    cases: Iterable[Any],
    short: int | Iterable[Any] | Callable[[Any], bool] = 1,
    *,
    each: bool = False,
) -> list[Any]:
    """Return cases for `pytest.mark.parametrize`; those outside the short run are slow.

    Args:
      cases: values, tuples of values, or `pytest.param`s.
      short: what stays in the short run: the first so many, the cases equal to these,
        or those for which it is true.
      each: a case is one value, also where it is a tuple.
    """
    cases = list(cases)
    if not callable(short) and not isinstance(short, int):
        short = list(short)
        if missing := [case for case in short if case not in cases]:
            raise ValueError(f"no such cases: {missing}")

    def is_short(index: int, case: Any) -> bool:
        if isinstance(short, int):
            return index < short
        return short(case) if callable(short) else case in short

    return [
        case if is_short(i, case) else _slow(case, each) for i, case in enumerate(cases)
    ]


def _slow(case: Any, each: bool) -> Any:
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, SLOW])
    values = case if isinstance(case, tuple) and not each else (case,)
    return pytest.param(*values, marks=SLOW)
