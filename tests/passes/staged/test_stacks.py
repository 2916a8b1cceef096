"""Loops over layers in parts: the same numbers, and stacks that are never whole."""

from __future__ import annotations

import numpy as np
import pytest

from rhino_jax._compat import open_jaxpr
from rhino_jax.passes.staged.layers import layers_of
from rhino_jax.passes.staged.stacks import LayerStack, unstacked
from tests.cases import covering
from tests.passes.interpreter import interpret
from tests.passes.zoo import compiled, of_zoo


def cut(x, end, sizes):
    if end.part is None:
        return x
    start = sum(sizes[: end.part])
    return x[start : start + sizes[end.part]]


def in_parts(traced, *shares):
    """All layers in parts like these, in the order of their loops."""
    found = layers_of(traced.program)
    stacks = [
        LayerStack(of.slots, tuple(of.length // sum(mine) * n for n in mine))
        for of, mine in zip(found, shares, strict=True)
    ]
    return unstacked(traced.closed_jaxpr, traced.program, stacks)


SHARES_OF_T5 = [(1, 2), (1, 1, 1)]


@pytest.mark.parametrize(
    ("name", "overrides", "shares", "is_compiled"),
    covering(
        [
            ("gpt-tiny", {"optimizer": "adamw", "clip_norm": 0.5}, [(1, 1)], False),
            ("t5-tiny", {"layers": "scan", "num_layers": 3}, SHARES_OF_T5, False),
            ("gpt-tiny", {"num_layers": 4, "optimizer": "adamw"}, [(1, 2, 1)], False),
            ("gpt-tiny", {}, [(1, 1)], True),
            ("t5-tiny", {"layers": "scan", "num_layers": 3}, SHARES_OF_T5, True),
            ("llama-tiny", {"remat": True}, [(1, 1)], False),
        ],
        2,
    ),
    ids=str,
)
def test_numbers_are_those_of_one_loop(name, overrides, shares, is_compiled):
    traced, arrays = of_zoo(name, **overrides)
    made = in_parts(traced, *shares)
    assert {*made.sizes.values()} == {*shares}
    given = [cut(arrays[e.whole], e, made.sizes.get(e.whole)) for e in made.inputs]
    run = compiled if is_compiled else interpret
    got, expected = run(made.closed, given), run(traced.closed_jaxpr, arrays)
    for end, x in zip(made.outputs, got, strict=True):
        sizes = made.sizes.get(traced.program.outputs[end.whole].state_of)
        y = np.asarray(cut(expected[end.whole], end, sizes), np.float64)
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6 * np.abs(y).max())


def test_no_stack_is_put_together():
    traced, _ = of_zoo("gpt-tiny", optimizer="adamw")
    made = in_parts(traced, (1, 1))
    names = [eqn.primitive.name for eqn in open_jaxpr(made.closed).eqns]
    assert names.count("scan") == 4
    assert "concatenate" not in names
    parts = [e for e in made.inputs if e.part is not None]
    assert parts and len(parts) == len([e for e in made.outputs if e.part is not None])
    paths = [made.program.inputs[i].path for i, e in enumerate(made.inputs) if e.part]
    assert all(path.endswith("[1:2]") for path in paths)


def test_an_encoder_and_a_decoder_are_two_loops_of_the_same_length():
    traced, _ = of_zoo("t5-tiny", layers="scan", optimizer="adamw")
    decoder, encoder = layers_of(traced.program)
    paths = [entry.path for entry in traced.program.inputs]
    for of, name in ((decoder, "decoder"), (encoder, "encoder")):
        stacks = {i for i, path in enumerate(paths) if f"['{name}']" in path}
        tables = {i for i in stacks if "position_bias" in paths[i]}
        assert of.slots == stacks - tables and of.length == 2
        assert len(of.loops) == 2
    assert decoder.after == {1} and not encoder.after


def test_steps_without_a_loop_have_no_layers():
    traced, _ = of_zoo("gpt-tiny-unrolled")
    assert layers_of(traced.program) == ()
