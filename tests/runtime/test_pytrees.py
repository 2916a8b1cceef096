"""Arguments and results that hold more than arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct

from tests.runtime.stand_in import assert_close, mesh_of, normal, shard


# Two devices: what matters is what goes in and comes out.
TWO = mesh_of(sizes=(1, 2))


class Scaled(eqx.Module):
    """Arrays, a function, a string, Python scalars."""

    layer: eqx.nn.Linear
    last: eqx.nn.Linear
    activation: Any
    name: str
    scale: float
    depth: int

    def __call__(self, x: Any) -> Any:
        x = self.activation(jax.vmap(self.layer)(x))
        for _ in range(self.depth):
            x = x * self.scale + jax.vmap(self.last)(x)
        return x


def module() -> Scaled:
    key = jax.random.key(0)
    return Scaled(
        eqx.nn.Linear(16, 16, key=key),
        eqx.nn.Linear(16, 16, key=key),
        jax.nn.tanh,
        "net",
        0.5,
        1,
    )


def test_equinox_modules_go_in_and_come_out() -> None:
    tx = optax.sgd(1e-2, momentum=0.9)

    def step(model: Scaled, opt_state: Any, x: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        updates, opt_state = tx.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    model, x = module(), normal(0, 64, 16)
    opt_state = tx.init(eqx.filter(model, eqx.is_array))
    sharded = shard(step, mesh=TWO, seed=1, donate_argnums=(0, 1))
    on_one_device = eqx.filter_jit(step)
    # Two copies: donated buffers go.
    mine = jax.tree.map(
        lambda a: jnp.asarray(np.array(a)) if eqx.is_array(a) else a,
        (model, opt_state),
    )
    want = on_one_device(*on_one_device(model, opt_state, x)[:2], x)
    got = sharded(*sharded(*mine, x)[:2], x)
    assert isinstance(got[0], Scaled) and got[0].activation is jax.nn.tanh
    assert (got[0].scale, got[0].depth, got[0].name) == (0.5, 1, "net")
    assert_close(
        eqx.filter(got, eqx.is_array), eqx.filter(want, eqx.is_array), rtol=1e-3
    )
    assert sharded.count == 1
    plan = sharded.plan(*got[:2], x)
    assert plan.in_specs[0].layer.weight == plan.out_specs[0].layer.weight
    assert plan.in_specs[0].name is None


def test_a_bool_attribute_is_a_switch() -> None:
    class Dropped(eqx.Module):
        drop: eqx.nn.Dropout
        w: Any

        def __call__(self, x: Any, key: Any) -> Any:
            return self.drop(x @ self.w, key=key)

    model = Dropped(eqx.nn.Dropout(0.5), normal(0, 8, 8))
    sharded = shard(lambda m, x, k: m(x, k), mesh=TWO)
    x, key = normal(1, 8, 8), jax.random.key(1)
    assert_close(sharded(model, x, key), model(x, key))
    off = eqx.nn.inference_mode(model)
    assert_close(sharded(off, x, key), off(x, key))


def test_flax_train_state_keeps_its_step_as_an_array() -> None:
    @struct.dataclass
    class State:
        step: Any
        params: Any
        apply: Any = struct.field(pytree_node=False)

    def step(state: State, x: Any) -> State:
        return state.replace(step=state.step + 1, params=state.params + x)

    sharded = shard(step, donate_argnums=0)
    state = State(0, normal(0, 8, 8), jnp.sin)
    for _ in range(3):
        state = sharded(state, jnp.float32(1))
    assert int(state.step) == 3
    assert sharded.count == 1


def test_nnx_state_goes_in_and_comes_out() -> None:
    model = nnx.Sequential(nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.relu)
    graph, params = nnx.split(model, nnx.Param)

    def step(params: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean(nnx.merge(graph, p)(x) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    x = normal(0, 64, 16)
    sharded = shard(step, mesh=TWO, seed=2)
    got, want = params, params
    for _ in range(2):
        got, got_loss = sharded(got, x)
        want, want_loss = jax.jit(step)(want, x)
    assert_close((got, got_loss), (want, want_loss))
    assert sharded.count == 1


def test_an_nnx_module_as_an_argument() -> None:
    model = nnx.Linear(16, 8, rngs=nnx.Rngs(0))
    x = normal(0, 64, 16)
    assert_close(shard(lambda m, x: m(x), seed=3)(model, x), model(x))


@pytest.mark.slow
def test_optax_states_are_matched() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    params = {"w": normal(0, 16, 16), "b": jnp.zeros(16)}

    def step(params: Any, opt: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"] + p["b"]) ** 2))(params)
        updates, opt = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    sharded = shard(step, seed=4)
    args = (params, tx.init(params), normal(1, 32, 16))
    got = sharded(*sharded(*args), args[2])
    assert_close(got, jax.jit(step)(*jax.jit(step)(*args), args[2]), rtol=1e-3)
    paths = [leaf.path for leaf in sharded.plan(*args).inputs]
    assert "opt[1][0].mu['w']" in paths


def test_tuples_dataclasses_none_and_numpy() -> None:
    class Pair(NamedTuple):
        left: Any
        right: Any

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Box:
        pair: Pair
        nothing: Any
        kind: str = dataclasses.field(metadata={"static": True}, default="box")

    def fn(box: Box, extras: list[Any]) -> Any:
        pair = Pair(box.pair.left + extras[0], box.pair.right * 2)
        return Box(pair, None), {"text": "done", "sum": extras[1] + 1}

    args = (Box(Pair(normal(0, 8, 8), np.ones((4, 4), np.float32)), None), [1.0, 2])
    got = shard(fn)(*args)
    assert got[1]["text"] == "done"
    want = fn(*args)
    assert_close(got[0], jax.tree.map(jnp.asarray, want[0]))
    assert int(got[1]["sum"]) == 3
