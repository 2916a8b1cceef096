"""Loops over layers in parts: the same numbers, and stacks that are never whole."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers_staged import of_zoo, undivided

from rhino_jax._compat import open_jaxpr
from rhino_jax.transform.staged.stacks import unstacked


def cut(x, end, sizes):
    if end.part is None:
        return x
    start = sum(sizes[: end.part])
    return x[start : start + sizes[end.part]]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("gpt-tiny", {}),
        ("gpt-tiny", {"optimizer": "adamw", "clip_norm": 0.5}),
        ("gpt-tiny", {"num_layers": 4, "optimizer": "adamw"}),
        pytest.param("llama-tiny", {"remat": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_numbers_are_those_of_one_loop(name, overrides):
    traced, arrays = of_zoo(name, **overrides)
    shares = (1, 2, 1) if "num_layers" in overrides else (1, 1)
    made = unstacked(traced.closed_jaxpr, traced.program, shares)
    assert made.sizes == shares
    given = [cut(arrays[e.whole], e, made.sizes) for e in made.inputs]
    opened = open_jaxpr(made.closed)
    got = jax.jit(lambda xs: jax.core.eval_jaxpr(opened, (), *xs))(given)
    expected = undivided(traced, arrays)
    for end, x in zip(made.outputs, got, strict=True):
        y = np.asarray(cut(expected[end.whole], end, made.sizes), np.float64)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6 * np.abs(y).max())


def test_no_stack_is_put_together():
    traced, _ = of_zoo("gpt-tiny", optimizer="adamw")
    made = unstacked(traced.closed_jaxpr, traced.program, (1, 1))
    names = [eqn.primitive.name for eqn in open_jaxpr(made.closed).eqns]
    assert names.count("scan") == 4
    assert "concatenate" not in names
    parts = [e for e in made.inputs if e.part is not None]
    assert parts and len(parts) == len([e for e in made.outputs if e.part is not None])
    paths = [made.program.inputs[i].path for i, e in enumerate(made.inputs) if e.part]
    assert all(path.endswith("[1:2]") for path in paths)


def test_steps_without_such_a_loop_stay_as_they_are():
    traced, _ = of_zoo("gpt-tiny-unrolled")
    assert unstacked(traced.closed_jaxpr, traced.program, (1, 1)) is None
    traced, _ = of_zoo("gpt-tiny")  # of two layers
    assert unstacked(traced.closed_jaxpr, traced.program, (2, 1)) is None
