"""Merged dims kept apart: the same results, and the minor part can be cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import rhino_jax as rhino
from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.frontend.split_dims import emit, split_merged_dims
from rhino_jax.frontend.trace import trace
from tests.cases import covering


B, S, D = 2, 6, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(B, S, D)).astype(np.float32)
W = RNG.normal(size=(D, 5)).astype(np.float32)


def flat(x: Any) -> Any:
    return x.reshape(B * S, *x.shape[2:])


def apart(y: Any) -> Any:
    return y.reshape(B, S, *y.shape[1:])


def indices(y: Any) -> Any:
    """Of each token one of its dims."""
    return (jnp.abs(y[:, 0]) * 10).astype(jnp.int32) % D


def merges(jaxpr: Any) -> int:
    """Reshapes in a jaxpr, those inside it too, that make B·S one dim."""
    count = 0
    for eqn in open_jaxpr(jaxpr).eqns:
        count += sum(map(merges, closed_region_jaxprs(eqn)))
        if eqn.primitive.name == "reshape":
            shape = eqn.outvars[0].aval.shape
            count += B * S in shape and B * S not in eqn.invars[0].aval.shape
    return count


def run(jaxpr: Any, *args: Any) -> list[Any]:
    return jax.core.eval_jaxpr(open_jaxpr(jaxpr), jaxpr_consts(jaxpr), *args)


def check_same(*fns: Callable[..., Any]) -> Any:
    """Results of functions of X with dims apart are their own; gives the jaxprs."""
    before = [jax.make_jaxpr(fn)(X) for fn in fns]
    after = [split_merged_dims(jaxpr) for jaxpr in before]
    for one, other in zip(before, after, strict=True):
        old, new = open_jaxpr(one), open_jaxpr(other)
        assert [v.aval for v in old.invars] == [v.aval for v in new.invars]
        assert [v.aval for v in old.outvars] == [v.aval for v in new.outvars]

    # Compiled together: these are many small programs.
    @jax.jit
    def run_all(x: Any) -> Any:
        return [[run(jaxpr, x) for jaxpr in jaxprs] for jaxprs in (before, after)]

    one, other = map(jax.tree.leaves, run_all(X))
    for a, b in zip(one, other, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    return after


ON_FLAT: dict[str, Callable[[Any], Any]] = {
    "matmul": lambda y: y @ W,
    "matmul from the right": lambda y: (W.T @ y.T).T,
    "contracted": lambda y: y + (y.T @ (2 * y))[0],
    "batch of a matmul": lambda y: jnp.einsum("nd,nd->n", y, y * y)[:, None] + y,
    "bias": lambda y: jax.nn.sigmoid(y + W[:, 0]),
    "mask": lambda y: jnp.where(y > 0, y, 0.5),
    "clamp": lambda y: jnp.clip(y, -0.5, 0.5),
    "sum along": lambda y: y - y.mean(-1, keepdims=True),
    "sum over": lambda y: y - y.sum(0),
    "softmax": lambda y: jax.nn.softmax(y, axis=-1),
    "argmax": lambda y: jax.nn.one_hot(jnp.argmax(y, -1), D) * y,
    "top-k": lambda y: lax.top_k(y, 2)[0],
    "sort": lambda y: jnp.sort(y, axis=1),
    "running sum along": lambda y: jnp.cumsum(y, axis=1),
    "reversed": lambda y: lax.rev(y, (1,)),
    "split": lambda y: sum(jnp.split(y, 2, axis=1)),
    "joined": lambda y: jnp.concatenate([y, y * 2, jnp.ones((B * S, 1))], axis=1),
    "slice": lambda y: y[:, 1:3],
    "slice with steps": lambda y: y[:, ::2],
    "padded": lambda y: jnp.pad(y, ((0, 0), (1, 2))),
    "turned twice": lambda y: (y.T * 2).T,
    "new dims": lambda y: (y[:, None, :] * y[:, :, None]).sum(1),
    "dropped dims": lambda y: y[:, :1].squeeze(1)[:, None] * y,
    "heads": lambda y: y.reshape(B * S, 2, 2).sum(1),
    "heads back": lambda y: (y.reshape(B * S, 2, 2) * 2).reshape(B * S, D),
    "more merged": lambda y: (y.reshape(-1) * 2).reshape(B * S, D),
    "count": lambda y: y + lax.broadcasted_iota(jnp.float32, (B * S, D), 1),
    "looked up": lambda y: jnp.asarray(W)[indices(y)] @ W.T + y,
    "looked up in each": lambda y: jnp.take_along_axis(y, indices(y)[:, None], 1) * y,
    "added to a table": lambda y: y @ jnp.zeros((D, D)).at[indices(y)].add(y),
    "dropped out": lambda y: y * jax.random.bernoulli(jax.random.key(0), 0.5, y.shape),
    "noise": lambda y: y + jax.random.normal(jax.random.key(0), y.shape),
    "the first of each": lambda y: y * y[:, 0][:, None],
    "written to each": lambda y: y.at[:, 1].set(0.5),
    "bits": lambda y: lax.bitcast_convert_type(y, jnp.int32).astype(jnp.float32),
    "losses": lambda y: (
        optax.softmax_cross_entropy_with_integer_labels(y, indices(y))[:, None] * y
    ),
    "jit": lambda y: jax.jit(lambda a: jnp.sin(a) @ W)(y),
    "jit that merges": lambda y: jax.jit(lambda a: flat(apart(a)) * 2)(y),
    "remat": lambda y: jax.checkpoint(lambda a: jnp.sin(a) @ W)(y),
    "custom_jvp": lambda y: jax.nn.relu(y) + jax.nn.silu(y),
    "loop": lambda y: lax.scan(lambda c, w: (jnp.sin(c + w), None), y, W[:, :3].T)[0],
    "loop over the same": lambda y: (
        lax.scan(lambda c, _: (c + (y * y).sum(), None), 0.0, None, length=3)[0] * y
    ),
    "loop that stacks": lambda y: lax.scan(
        lambda c, _: (c * 2, c + 1), y, None, length=3
    )[1].sum(0),
    "barrier": lambda y: lax.optimization_barrier((y, y * 2))[1],
}


@pytest.mark.parametrize("name", ON_FLAT)
def test_ops_on_parts_give_the_same_and_merge_nothing(name: str) -> None:
    def fn(x: Any) -> Any:
        return apart(ON_FLAT[name](flat(x)))

    (after,) = check_same(fn)
    assert merges(after) == 0, after


GRADIENTS = ["matmul", "softmax", "looked up in each", "loop that stacks", "remat"]


@pytest.mark.parametrize("name", covering(ON_FLAT, GRADIENTS))
def test_gradients_of_ops_on_parts_are_the_same(name: str) -> None:
    check_same(jax.grad(lambda x: (apart(ON_FLAT[name](flat(x))) ** 2).sum()))


def test_what_cannot_be_spelled_is_merged_and_nothing_else() -> None:
    """A running sum over tokens needs them in order; the stream beside it does not."""

    def fn(x: Any) -> Any:
        y = flat(x)
        places = jnp.cumsum((y > 0).astype(jnp.float32)[:, :1], axis=0)
        return apart(y @ W * places), places

    (after,) = check_same(fn)
    assert merges(after) == 1
    dot = next(e for e in open_jaxpr(after).eqns if e.primitive.name == "dot_general")
    assert dot.outvars[0].aval.shape == (B, S, 5)


def _attention(x: Any, w: Any) -> Any:
    heads = x.reshape(B, S, 2, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads, heads)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, heads).reshape(B, S, D) @ w


@jax.custom_vjp
def own_derivative(y: Any) -> Any:
    return y * 2


own_derivative.defvjp(lambda y: (y * 2, ()), lambda _, g: (g.reshape(B * S, D),))


UNTOUCHED: dict[str, Callable[..., Any]] = {
    "heads, contracted with a weight": _attention,
    "a step on such a weight": lambda x, w: (
        w - jax.grad(lambda w: _attention(x, w).sum())(w)
    ),
    "merged result": lambda x, w: flat(x) @ w,
    "a derivative of its own": lambda x, w: apart(own_derivative(flat(x))) @ w,
    "other sizes": lambda x, w: (x.reshape(3, 4, D) @ w).reshape(x.shape),
    "nothing": lambda x, w: x @ w,
}


@pytest.mark.parametrize("name", UNTOUCHED)
def test_programs_that_gain_nothing_stay_the_same_object(name: str) -> None:
    before = jax.make_jaxpr(UNTOUCHED[name])(X, W[:, :4])
    assert split_merged_dims(before) is before


def test_derivatives_of_a_program_with_dims_apart() -> None:
    """Also through rules of derivatives that were written for merged shapes."""

    @jax.custom_jvp
    def cube(y: Any) -> Any:
        return y**3

    @cube.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        (y,), (t,) = primals, tangents
        assert y.shape == (B * S, D)
        return cube(y), 3 * y**2 * t.reshape(B * S, D)

    def fn(x: Any) -> Any:
        return apart(cube(flat(x)) @ W).sum(1)

    before = jax.make_jaxpr(fn)(X)
    after = split_merged_dims(before)
    assert after is not before and merges(after) == 0

    def loss(jaxpr: Any) -> Callable[[Any], Any]:
        return lambda x: (run(jaxpr, x)[0] ** 2).sum()

    want, got = jax.grad(loss(before))(X), jax.grad(loss(after))(X)
    np.testing.assert_allclose(want, got, rtol=1e-5)


def test_where_it_fails_the_program_is_planned_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no such dim")

    monkeypatch.setattr(emit, "_apart", fails)
    with pytest.warns(rhino.RhinoWarning, match="ValueError: no such dim"):
        traced = trace(lambda x: apart(flat(x) @ W).sum(1), (X,), {})
    assert merges(traced.closed_jaxpr) == 1


def test_branches_and_loops_inside_keep_their_borders() -> None:
    def fn(x: Any) -> Any:
        def body(state: Any) -> Any:
            k, y = state
            return k + 1, y + apart(flat(y) @ W @ W.T).sum()

        _, y = lax.while_loop(lambda s: s[0] < 3, body, (0, x))
        return lax.cond(
            x[0, 0, 0] > 0, lambda a: apart(jnp.sin(flat(a))), lambda a: a, y
        )

    (after,) = check_same(fn)
    assert merges(after) == 0


@pytest.mark.parametrize("seed", covering(range(1, 9)))
def test_random_chains_give_the_same(seed: int) -> None:
    """Chains of ops that keep the shape, merged and taken apart anywhere."""
    kept = [
        name
        for name, op in ON_FLAT.items()
        if jax.eval_shape(op, flat(X)).shape == (B * S, D)
    ]
    rng = np.random.default_rng(seed)
    chain = [str(name) for name in rng.choice(kept, size=5)]

    def fn(x: Any) -> Any:
        y = flat(x)
        for k, name in enumerate(chain):
            y = y + ON_FLAT[name](y / 4)
            if k == 2:
                y = flat(jnp.tanh(apart(y)))
        return apart(y), y.mean(), y[0]

    check_same(fn)


def _step(is_flat: bool, params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        y = x.reshape(-1, x.shape[-1]) if is_flat else x
        y = y + jax.nn.gelu(y @ params["up"] + params["bias"]) @ params["down"]
        return (y.reshape(x.shape) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def _plan(is_flat: bool, **where: Any) -> tuple[Any, Any, Any]:
    def step(params: Any, x: Any) -> Any:
        return _step(is_flat, params, x)

    shapes = {"up": (64, 128), "bias": (128,), "down": (128, 64)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    args = params, jax.ShapeDtypeStruct((2, 8192, 64), jnp.float32)
    return rhino.plan(step, *args, progress=False, **where), step, args


def test_a_sequence_inside_of_merged_tokens_is_cut_for_nothing() -> None:
    """Two sequences on eight devices: the batch alone is not enough."""
    where = {"mesh": {"x": 8}, "hardware": "v5e:4x2"}
    flat_plan, _, _ = _plan(True, **where)
    plan, _, _ = _plan(False, **where)
    assert flat_plan.predicted.step_time_s == pytest.approx(plan.predicted.step_time_s)
    (tokens,) = [leaf for leaf in flat_plan.inputs if leaf.path == "x"]
    assert tokens.spec == ((), (0,), ())


@pytest.mark.slow
def test_it_compiles_to_what_was_promised_and_runs() -> None:
    plan, step, args = _plan(True, mesh={"x": 8}, hardware="cpu:8")
    verified = plan.verify(step, *args, compile_for="cpu")
    assert verified.ok, verified.table()
    rng = np.random.default_rng(0)
    values = jax.tree.map(lambda a: rng.normal(size=a.shape).astype(a.dtype), args)
    sharded = rhino.auto_shard(step, mesh={"x": 8}, hardware="cpu:8")
    for a, b in zip(
        jax.tree.leaves(sharded(*values)), jax.tree.leaves(step(*values)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def _language_model(is_flat: bool) -> tuple[Any, Any]:
    """A layer of a transformer, and its loss."""
    batch, length, width, heads, vocab = 2, 128, 64, 4, 256

    def loss(params: Any, tokens: Any, labels: Any) -> Any:
        x = params["table"][tokens]
        x = x.reshape(-1, width) if is_flat else x
        y = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        q, k, v = (
            (y @ params[name]).reshape(batch, length, heads, -1) for name in "qkv"
        )
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k), axis=-1)
        a = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
        x = x + a.reshape(*x.shape[:-1], width) @ params["o"]
        x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
        chances = jax.nn.log_softmax(x @ params["table"].T, axis=-1)
        labels = labels.reshape(x.shape[:-1])
        return -jnp.take_along_axis(chances, labels[..., None], -1).mean()

    def step(params: Any, tokens: Any, labels: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens, labels)
        return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    shapes = dict.fromkeys("qkvo", (width, width))
    shapes |= {"table": (vocab, width), "up": (width, 256), "down": (256, width)}
    params = {k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return step, (params, tokens, tokens)


@pytest.mark.slow
def test_a_model_on_flat_tokens_is_planned_as_one_on_sequences() -> None:
    found = []
    for is_flat in (True, False):
        step, args = _language_model(is_flat)
        plan = rhino.plan(
            step, *args, mesh={"x": 2, "y": 4}, hardware="v5e:4x2", progress=False
        )
        found.append(plan.predicted)
    flat_model, model = found
    assert flat_model.step_time_s == pytest.approx(model.step_time_s, rel=2e-3)
    assert flat_model.peak_bytes == pytest.approx(model.peak_bytes, rel=0.02)
