"""Where nothing fits, the error names what is too large by line and scope."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino


def loss(params: Any, x: Any) -> Any:
    with jax.named_scope("encoder"):
        h = jnp.exp(x @ params["w1"])
    return jnp.sum((h @ params["w2"]) ** 2)


def step(params: Any, x: Any) -> Any:
    grads = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - g, params, grads)


def test_what_is_held_is_named_by_line_and_scope() -> None:
    f32 = jnp.float32
    params = {
        "w1": jax.ShapeDtypeStruct((64, 128), f32),
        "w2": jax.ShapeDtypeStruct((128, 64), f32),
    }
    x = jax.ShapeDtypeStruct((4096, 64), f32)
    with pytest.raises(rhino.InfeasiblePlanError) as caught:
        rhino.plan(
            step,
            params,
            x,
            mesh={"d": 8},
            memory_budget_bytes="50kB",
            microbatches=1,
            recompute="as written",
            progress=False,
        )
    numbers = re.search(
        r"found (\S+) KiB of (\S+) KiB, (\S+) KiB more;", str(caught.value)
    )
    assert numbers is not None
    peak, limit, more = map(float, numbers.groups())
    assert peak - limit == pytest.approx(more, abs=0.2)
    found = caught.value.numbers.partition("largest at that peak: ")[2].split("; ")
    assert len(found) == 3
    assert all("test_infeasible.py:" in one and "(loss)" in one for one in found)
    assert any("in encoder)" in one for one in found)
    assert any("in the gradient of encoder)" in one for one in found)
    assert any("reading params['w2'])" in one for one in found)
