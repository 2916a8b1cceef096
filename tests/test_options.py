"""Options of the entry points come from one record."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

import rhino_jax as rhino
from rhino_jax.options import DEFAULTS, UserOptions
from rhino_jax.planner.options import PlanOptions
from rhino_jax.planner.variants import trials


TAKE_OPTIONS = [
    rhino.auto_shard,
    rhino.plan,
    rhino.audit,
    rhino.sweep,
    rhino.plan_together,
]
OF_SWEEPS = {"devices", "batch", "workers"}


def options_of(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


@pytest.mark.parametrize("function", TAKE_OPTIONS)
def test_signatures_show_options_of_the_record(function: Callable[..., Any]) -> None:
    found = options_of(function)
    assert found.keys() <= DEFAULTS.keys() | OF_SWEEPS | {"weights"}
    if function is not rhino.sweep:  # whose options are lists, and None
        shared = found.keys() & DEFAULTS.keys()
        assert len(shared) > 7
        assert {n: found[n] for n in shared} == {n: DEFAULTS[n] for n in shared}


def test_every_option_is_described_where_it_is_asked_for() -> None:
    page = inspect.getdoc(rhino.auto_shard) or ""
    arguments, _, _ = page.partition("\nReturns:")
    assert [n for n in UserOptions.__annotations__ if f"{n}:" not in arguments] == [
        "in_shardings",
        "donate_argnums",
        "donate_argnames",
        "static_argnums",
    ], "those described together with the next"
    read = {f.name for f in fields(PlanOptions)} - {"what"}
    assert read <= UserOptions.__annotations__.keys()


def test_what_is_left_to_the_planner_may_be_changed_in_a_plan() -> None:
    tried = {t.option for _, t in trials() if t.option}
    assert tried <= inspect.signature(rhino.Plan.with_).parameters.keys()


def test_an_unknown_option_is_refused_with_a_suggestion() -> None:
    with pytest.raises(TypeError, match="option 'hardwares'. Did you mean 'hardware'"):
        rhino.auto_shard(hardwares="v5e:2x2")  # type: ignore[call-arg]
