"""Scenarios that compare eight devices with one; see `worker`.

Each returns what is wrong. What runs is named on stderr before: a wrong program may end
the process.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import Phase, given, seed, settings, strategies as st

from tests.behaviour.equations import TOGETHER, wrong_strategies
from tests.behaviour.random_steps import wrong_step
from tests.frontend.check.index_ops import (
    Call,
    gather_of,
    indexing,
    scatter_of,
    slice_of,
    slicing,
    update_of,
)
from tests.frontend.rule_cases import CASES
from tests.frontend.rule_cases_data import DATA_CASES
from tests.frontend.rule_cases_windows import WINDOW_CASES


ALL_CASES = {**CASES, **DATA_CASES, **WINDOW_CASES}
"""Name of a primitive → functions that use it."""

SCATTERS = "scatter", "scatter_add", "scatter_max", "scatter_mul", "scatter_min"
INDEXED: dict[str, st.SearchStrategy[Call]] = {
    "gather": indexing((2, 4, 3, 0)).map(gather_of),
    "dynamic_slice": slicing().map(slice_of),
    "dynamic_update_slice": slicing().map(update_of),
    # XLA:CPU loses updates where index vectors are empty (three into one element).
    **{
        kind: indexing((2, 4, 3, 0))
        .filter(lambda case: bool(case["indexed"]))
        .map(lambda case, kind=kind: scatter_of(kind, case))
        for kind in SCATTERS
    },
}
"""Index ops → calls with indices anywhere, of arrays that may be empty."""


def rule(i: int) -> list[str]:
    """Run one case of a rule and its gradient under strategies drawn at random."""
    name, number, most = _request()
    chance, rng = random.Random(number), np.random.default_rng(number)
    fn, args = chance.choice(ALL_CASES[name])(rng)
    return _wrong(fn, args, chance, most)


def indices(i: int) -> list[str]:
    """Run an index op on drawn shapes and indices, each under a few strategies."""
    name, number, most = _request()
    chance, wrong = random.Random(number), []

    @seed(number)
    @settings(max_examples=most, database=None, deadline=None, phases=[Phase.generate])
    @given(INDEXED[name])
    def run(call: Call) -> None:
        fn, args = call
        found = _wrong(fn, args, chance, TOGETHER)
        wrong.extend(f"{text}, arguments {args[1:]}" for text in found)

    run()
    return wrong


def steps(i: int) -> list[str]:
    """Run random train steps from a seed on."""
    kind, first, count = _request()
    wrong = []
    for number in range(first, first + count):
        _running(f"{kind} step {number}")
        if found := wrong_step(kind, number):
            wrong.append(found)
    return wrong


OF_GRADIENTS = frozenset(
    "add add_any broadcast_in_dim cos lt mul neg reduce_sum select_n sin".split()
)
"""Primitives of most gradients, which have cases of their own."""


def _wrong(
    fn: Callable[..., Any], args: tuple[Any, ...], chance: random.Random, most: int
) -> list[str]:
    """Run equations of a function and its gradient; return what is wrong."""
    calls = [(fn, frozenset[str]()), (gradient_of(fn, args), OF_GRADIENTS)]
    return [
        text
        for call, skip in calls
        if call is not None
        for text in wrong_strategies(
            call, args, chance, most=most, skip=skip, before=_running
        )
    ]


def _request() -> tuple[str, int, int]:
    """Return the name of what to run, the seed, and how much of it."""
    return os.environ["NAME"], int(os.environ["SEED"]), int(os.environ["MOST"])


def _running(text: str) -> None:
    print(f"RUNNING {text}", file=sys.stderr, flush=True)


def gradient_of(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the gradient by all arguments that have one; None where none has."""
    places = [p for p, x in enumerate(args) if _is_inexact(x)]
    for chosen in [places, *([p] for p in places)]:
        gradient = _gradient_by(fn, chosen)
        try:
            jax.eval_shape(gradient, *args)
        except (NotImplementedError, TypeError, ValueError):
            continue
        return gradient if chosen else None
    return None


def _gradient_by(fn: Callable[..., Any], places: list[int]) -> Callable[..., Any]:
    def loss(given: Any, args: Any) -> Any:
        full = dict(enumerate(args)) | dict(zip(places, given, strict=True))
        leaves = [x for x in jax.tree.leaves(fn(*full.values())) if _is_inexact(x)]
        real = [
            y
            for x in leaves
            for y in ([x.real, x.imag] if jnp.iscomplexobj(x) else [x])
        ]
        return sum((jnp.sin(y).sum() for y in real), jnp.float32(0))

    def gradient(*args: Any) -> Any:
        return jax.grad(loss)([args[p] for p in places], args)

    return gradient


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact))
