"""An op that is registered in one call joins every pass, as a built-in one does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import ad, batching, mlir

import rhino_jax as rhino
from rhino_jax._compat import new_primitive
from rhino_jax.errors import TokenSliceError
from rhino_jax.frontend import registry
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.sequence_slices.sliced import sliced
from tests.passes.deferred_reductions.pricing import delayed_everywhere, normal, ran
from tests.passes.remat.saved import saved_values


sys.path += [str(Path(__file__).parent / d) for d in ("microbatch", "sequence_slices")]

from helpers_microbatch import check
from helpers_slices import (
    TRIL,
    S,
    attention_step,
    check as check_slices,
    mixed,
    scores_of,
)


TRAITS = rhino.Traits(rhino.OpKind.ELEMENTWISE, linear=((0,),))

gate_p = new_primitive("test_gate")


def gate(x: jax.Array, w: jax.Array) -> jax.Array:
    """x sin(w), linear in x."""
    return gate_p.bind(x, jnp.broadcast_to(w, x.shape))


def _gate(x: jax.Array, w: jax.Array) -> jax.Array:
    return x * jnp.sin(w)


gate_p.def_impl(_gate)
gate_p.def_abstract_eval(lambda x, w: x)
mlir.register_lowering(gate_p, mlir.lower_fun(_gate, multiple_results=False))
ad.defjvp(
    gate_p,
    lambda t, x, w: gate_p.bind(t, w),
    lambda t, x, w: x * t * jnp.cos(w),
)
ad.primitive_transposes[gate_p] = lambda ct, x, w: (gate_p.bind(ct, w), None)
batching.defbroadcasting(gate_p)


@pytest.fixture
def traits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    for table in ("_RULES", "_TRAITS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    monkeypatch.setattr(registry, "_USER_RULES", set())
    found = getattr(request, "param", TRAITS)
    rhino.register_rule(gate_p, registry.lookup("mul"), traits=found)


UNKNOWN = rhino.Traits(rhino.OpKind.ELEMENTWISE)


def gated_sum(w: jax.Array, x: jax.Array) -> jax.Array:
    return gate(jnp.tanh(x).sum(0), w) + (x * x).sum(0)


@pytest.mark.parametrize("traits", [TRAITS, UNKNOWN], indirect=True)
def test_micro_batches_accumulate_behind_it_where_it_is_linear(traits: None) -> None:
    args = normal([(6,), (12, 6)])
    (cut,) = check(gated_sum, args, counts=(3,))
    is_linear = registry.traits_of("test_gate") is TRAITS
    assert len(cut.loops[0].leaving) == 2 - is_linear


@pytest.mark.parametrize("traits", [TRAITS, UNKNOWN], indirect=True)
def test_sums_are_deferred_past_it_where_it_is_linear(traits: None) -> None:
    def fn(a: Any, b: Any, c: Any, d: Any, w: Any) -> Any:
        return gate(a @ b, w) + c @ d

    args = normal([(8, 32), (32, 16), (8, 32), (32, 16), (8, 16)])
    traced, again, found = delayed_everywhere(fn, args)
    assert bool(found) == (registry.traits_of("test_gate") is TRAITS)
    np.testing.assert_allclose(ran(again, args)[0], ran(traced, args)[0], rtol=1e-4)


def test_masked_pairs_stay_masked_through_it(traits: None) -> None:
    def attend(q: Any, k: Any, v: Any, batch: Any) -> Any:
        scores = jnp.where(TRIL, scores_of(q, k), -1e9)
        return mixed(gate(jax.nn.softmax(scores), jnp.float32(0.7)), v)

    check_slices(*attention_step(attend), (S // 2, S // 2))


@pytest.mark.parametrize("traits", [UNKNOWN], indirect=True)
def test_pairs_that_may_be_unmasked_are_refused(traits: None) -> None:
    def attend(q: Any, k: Any, v: Any, batch: Any) -> Any:
        scores = jnp.where(TRIL, scores_of(q, k), -1e9)
        return mixed(gate(jax.nn.softmax(scores), jnp.float32(0.7)), v)

    apart, _ = attention_step(attend)
    with pytest.raises(TokenSliceError):
        sliced(apart, (S // 2, S // 2))


@pytest.mark.parametrize(
    "traits", [TRAITS, replace(TRAITS, has_effects=True)], indirect=True
)
def test_it_is_rematerialized_unless_it_has_effects(traits: None) -> None:
    def loss(ws: Any, x: Any) -> Any:
        def layer(h: Any, w: Any) -> Any:
            return jnp.square(gate(h @ w, w[0])), None

        return lax.scan(layer, x, ws)[0].sum()

    args = normal([(3, 4, 4), (8, 4)])
    program = trace(jax.value_and_grad(loss), args, {}).program
    recomputed = [value for value in saved_values(program) if value.lines]
    assert bool(recomputed) == (not registry.traits_of("test_gate").has_effects)


def test_it_fuses_with_its_readers(traits: None) -> None:
    rhino.register_rule(gate_p, "a b, a b -> a b")
    program = trace(gate, normal([(8, 4), (8, 4)]), {}).program
    (op,) = [op for op in program.ops if op.name == "test_gate"]
    assert op.is_fusible
    assert op.traits is TRAITS
