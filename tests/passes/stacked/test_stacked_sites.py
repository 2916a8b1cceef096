"""Isomorphic chains that are found, and the numbers of programs that stack them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rhino_jax as rhino
from rhino_jax._compat import open_jaxpr
from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.ir.transform import STACKED, chosen
from rhino_jax.passes.apply import PASSES, apply_passes
from rhino_jax.passes.program_pass import ChoiceLimits
from rhino_jax.passes.stacked.emit import find_sites
from rhino_jax.passes.stacked.sites import StackSite
from tests.passes.stacked import updates


SQUARE, WIDE, TALL = (8, 8), (8, 12), (12, 8)

MUON = updates.step_of(updates.orthogonalized)


def traced_step(step: Callable[..., Any], layers: int = 2) -> tuple[Traced, Any]:
    w = updates.weights(layers)
    args = w, jax.tree.map(np.ones_like, w), updates.batch(), np.float32(1)
    return trace(step, args, {}), args


def sites_of(step: Callable[..., Any], layers: int = 2) -> list[StackSite]:
    traced, _ = traced_step(step, layers)
    return find_sites(traced.closed_jaxpr, traced.program)


def ends(site: StackSite) -> tuple[int, list[Any], list[Any]]:
    """Return the number of copies, and the shapes of arrays that enter and leave."""
    of = site.region.avals
    rows = (site.inputs(), site.outputs())
    enter, leave = ([of[v].shape for v, *_ in row if of[v].shape] for row in rows)
    return site.copies, enter, leave


def each_shape(copies: int = 2) -> list[Any]:
    return [(copies, [s], [s]) for s in (TALL, SQUARE, WIDE)]


FOUND: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    # Tall matrices are transposed, and are then as wide ones.
    "muon": (MUON, [(4, [WIDE], [WIDE]), (2, [SQUARE], [SQUARE])]),
    "in a loop": (updates.step_of(updates.in_a_loop), each_shape()),
    "until it converges": (updates.step_of(updates.until_it_converges), each_shape()),
    "shampoo": (updates.step_of(updates.shampoo), each_shape()),
    "soap": (updates.step_of(updates.soap), each_shape()),
    # Norms over all weights are between: what comes after one is no part of a chain.
    "clipped": (updates.clipped, [(4, [WIDE], [WIDE]), (2, [SQUARE], [SQUARE])]),
    # The work of one step never joins that of the other.
    "twice": (
        updates.twice,
        2 * [(4, [WIDE], [WIDE])] + 2 * [(2, [SQUARE], [SQUARE])],
    ),
    # The loss, and its gradient: weights enter, gradients leave.
    "regularized": (updates.regularized, each_shape()),
}


@pytest.mark.parametrize("name", FOUND)
def test_numbers_stay(name: str) -> None:
    step, expected = FOUND[name]
    traced, args = traced_step(step)
    sites = find_sites(traced.closed_jaxpr, traced.program)
    assert [*map(ends, sites)] == expected
    # With padding and without.
    sizes = [site.copies + 3 * (k % 2) for k, site in enumerate(sites)]
    new = apply_passes(traced, [chosen(STACKED, {"sizes": sizes})])
    assert len(new.program.ops) < len(traced.program.ops)
    flat = [jnp.asarray(x) for x in jax.tree.leaves(args)]
    before, after = (
        jax.jit(lambda *xs, t=t: jax.core.eval_jaxpr(open_jaxpr(t), (), *xs))(*flat)
        for t in (traced.closed_jaxpr, new.closed_jaxpr)
    )
    for a, b in zip(before, after, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4)
    assert [v.aval for v in open_jaxpr(traced.closed_jaxpr).outvars] == [
        v.aval for v in open_jaxpr(new.closed_jaxpr).outvars
    ]


def test_a_stack_that_stays() -> None:
    traced, _ = traced_step(MUON)
    some = apply_passes(traced, [chosen(STACKED, {"sizes": [0, 2]})])
    both = apply_passes(traced, [chosen(STACKED, {"sizes": [4, 2]})])
    assert len(both.program.ops) < len(some.program.ops) < len(traced.program.ops)
    with pytest.raises(MicrobatchError, match="2 sets of isomorphic work"):
        apply_passes(traced, [chosen(STACKED, {"sizes": [4]})])


def one_product(g: jax.Array, scale: Any) -> jax.Array:
    return scale * (g @ g.T) @ jnp.ones_like(g)


def pinned(g: jax.Array, scale: Any) -> jax.Array:
    return scale * rhino.pin(g @ g.T, jax.P()) @ g


def of_random_signs(g: jax.Array, scale: Any) -> jax.Array:
    signs = jax.random.rademacher(jax.random.key(0), g.shape, g.dtype)
    return scale * (g @ signs.T) @ (g * signs)


def in_two_places(g: jax.Array, scale: Any) -> jax.Array:
    """Two products with one, whose operands differ."""
    gram = g @ g.T
    return scale * gram @ g + gram @ (g + 1)


@pytest.mark.parametrize("update", [lambda g, scale: scale * g, pinned])
def test_no_chains(update: updates.Update) -> None:
    """Gradients of weights alone are none, nor are chains that a pin divides."""
    assert not sites_of(updates.step_of(update))


def test_a_value_in_two_roles() -> None:
    """The first chain reads one value where the others read two."""

    def step(a: Any, b: Any, c: Any) -> Any:
        return [((x @ y) * c) @ x for x, y in ((a, a), (a, b), (b, a))]

    traced = trace(step, [np.ones((4, 4), np.float32)] * 3, {})
    assert not find_sites(traced.closed_jaxpr, traced.program)


def test_equal_work_is_no_stack() -> None:
    def step(x: Any) -> Any:
        return [(x @ x) @ x + k for k in range(3)]

    traced = trace(step, [np.ones((4, 4), np.float32)], {})
    assert not find_sites(traced.closed_jaxpr, traced.program)


def test_pinned_values_keep_their_dims() -> None:
    traced, _ = traced_step(MUON, 4)
    wide, _ = find_sites(traced.closed_jaxpr, traced.program)
    pinned = [wide.region.makes[wide.rows[9][1]][0]]
    limits = ChoiceLimits(counts=[8], pinned=pinned)
    (choice,) = PASSES[STACKED].choices(traced, limits)
    assert choice.chosen["sizes"] == [0, 8]


@pytest.mark.parametrize("update", [of_random_signs, in_two_places])
def test_chains_of_few_products(update: updates.Update) -> None:
    found = sites_of(updates.step_of(update))
    assert [site.copies for site in found] == [2, 2, 2]
    names = {s.region.ops[i].op.name for s in found for i in s.ops}
    assert not names & {"random_bits", "threefry2x32"}


def test_padding_is_at_most_as_much_again() -> None:
    def sizes(layers: int, *counts: int) -> Any:
        traced, _ = traced_step(MUON, layers)
        found = PASSES[STACKED].choices(traced, ChoiceLimits(counts=counts))
        return [each.chosen["sizes"] for each in found]

    assert sizes(4, 2, 4, 8) == [[8, 8]]
    assert sizes(3, 8) == [[8, 0]]
    assert sizes(5, 4, 16) == [[16, 8]]
    assert sizes(1, 8) == []  # two copies
    assert sizes(2) == []  # one device
