"""Shares of the time that the phases of the solver have in these tests."""

from __future__ import annotations

import pytest

from rhino_jax.solver import solve_limited


@pytest.fixture
def short_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the phases before CP-SAT on the whole core a small share of the time."""
    monkeypatch.setitem(solve_limited.INTERVALS_SHARE, True, 0.001)
    monkeypatch.setitem(solve_limited.NEIGHBOURHOODS_SHARE, True, 0.005)
