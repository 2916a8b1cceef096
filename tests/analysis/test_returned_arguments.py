"""Copies of arguments that a program returns as they are."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from rhino_jax.analysis.fusing import Fusing
from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.inline_regions import inline_regions
from rhino_jax.analysis.liveness import analyse
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target


GPU = Fusing.of(load_target("h100").device)

X = jnp.ones((64, 64), jnp.float32)


@pytest.mark.parametrize(("donated", "copies"), [((), 1), ((0,), 0), ((1,), 1)])
def test_arguments_that_are_results_are_copied_unless_donated(
    donated: tuple[int, ...], copies: int
) -> None:
    def step(frozen: Any, w: Any) -> Any:
        return frozen, w - frozen @ w

    traced = trace(step, (X, X + 1), {}, donate_argnums=donated)
    graph = inline_regions(traced.program)
    live = analyse(graph, GPU)
    assert [copy.whole_bytes for copy in live.copies] == [4 * 64 * 64] * copies
    for copy in live.copies:
        assert graph.nodes[copy.node].kind in (NodeKind.INPUT, NodeKind.OUTPUT)
        assert live.stack_passes[copy.node] == 2


def test_a_donated_argument_is_one_of_the_results_that_it_is() -> None:
    traced = trace(lambda x: (x, x), (X,), {}, donate_argnums=(0,))
    assert len(analyse(inline_regions(traced.program), GPU).copies) == 1
