"""What is written of stages in one program runs, and says what they hold."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.errors import RhinoError
from tests.planner.spmd_pipeline.helpers_one_program import clipped, layer, planned


@pytest.fixture(scope="module")
def written() -> tuple[Any, str, dict[str, Any]]:
    """A plan's arguments, its code, and what that defines."""
    step, args = clipped()
    text = planned(step, args, recompute="as written").code("specs")
    names: dict[str, Any] = {}
    exec(compile(text, "written.py", "exec"), names)
    return args, text, names


def test_it_says_what_stages_hold(written: tuple[Any, str, dict[str, Any]]) -> None:
    args, text, names = written
    said = " ".join(text.split())
    assert "stage 0: layers 0 to 1 on 4 devices; stage 1: layers 2 to 3" in said
    assert "a step takes 5 ticks forward and as many back" in said
    specs = names["in_specs"](*args)
    assert all(s[0] == "stage" for s in jax.tree.leaves(specs[0]["layers"]))
    assert "rhino" not in text.partition('"""\n\nimport')[2]


def test_its_loop_is_the_scan_over_layers(
    written: tuple[Any, str, dict[str, Any]],
) -> None:
    args, _, names = written
    x, stacks = args[2], args[0]["layers"]

    def once(x: Any, w: Any) -> Any:
        return layer(x, w), None

    def whole(stacks: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(once, x, stacks)[0] ** 2)

    def in_ticks(stacks: Any, x: Any) -> Any:
        return jnp.sum(names["pipelined"](once, stacks, x) ** 2)

    expected = jax.value_and_grad(whole, (0, 1))(stacks, x)
    with jax.set_mesh(names["mesh"]):
        run = jax.jit(jax.value_and_grad(in_ticks, (0, 1)))
        text = run.lower(stacks, x).compile().as_text()
        got = run(stacks, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    assert text is not None and "collective-permute" in text


def test_other_styles_are_refused() -> None:
    step, args = clipped()
    with pytest.raises(RhinoError, match="no constraints say") as found:
        planned(step, args).code()
    assert "'specs'" in str(found.value.fix)
    assert found.value.where and found.value.numbers
