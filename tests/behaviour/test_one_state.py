"""A train step, an evaluation and a smaller last batch share one state that stays put.

As users of plain pytrees, flax.linen, Equinox and flax.nnx write them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rhino_jax as rhino
from rhino_jax.runtime.bound import Arguments, Bound
from tests.behaviour.compare import assert_same
from tests.cases import covering


OPTIMIZER = optax.adam(1e-2)
WIDTH, HIDDEN = 32, 64


@dataclass(frozen=True)
class Case:
    """`train(*state, batch) -> (*state, loss)`, and `evaluate(seen(*state), batch)`.

    Attributes:
      make: from a key to the state, a tuple.
      seen: what of the state the evaluation takes.
    """

    make: Callable[[jax.Array], tuple[Any, ...]]
    train: Callable[..., Any]
    evaluate: Callable[..., Any]
    seen: Callable[..., Any]


def squares(got: Any, batch: Any) -> Any:
    return jnp.mean((got - batch["y"]) ** 2)


def plain() -> Case:
    def make(key: Any) -> Any:
        one, two = jax.random.split(key)
        params = {
            "w1": 0.1 * jax.random.normal(one, (WIDTH, HIDDEN)),
            "w2": 0.1 * jax.random.normal(two, (HIDDEN, WIDTH)),
        }
        return params, OPTIMIZER.init(params)

    def evaluate(params: Any, batch: Any) -> Any:
        return squares(jax.nn.relu(batch["x"] @ params["w1"]) @ params["w2"], batch)

    def train(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(evaluate)(params, batch)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return Case(make, train, evaluate, lambda params, opt_state: params)


def linen() -> Case:
    nn = pytest.importorskip("flax.linen")
    train_state = pytest.importorskip("flax.training.train_state")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(WIDTH)(nn.relu(nn.Dense(HIDDEN)(x)))

    model = Model()

    def make(key: Any) -> Any:
        params = model.init(key, jnp.ones((1, WIDTH)))
        state = train_state.TrainState.create(
            apply_fn=model.apply, params=params, tx=OPTIMIZER
        )
        return (state,)

    def evaluate(params: Any, batch: Any) -> Any:
        return squares(model.apply(params, batch["x"]), batch)

    def train(state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(evaluate)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    return Case(make, train, evaluate, lambda state: state.params)


def equinox() -> Case:
    eqx = pytest.importorskip("equinox")

    def make(key: Any) -> Any:
        model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, key=key)
        return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))

    def evaluate(net: Any, batch: Any) -> Any:
        return squares(jax.vmap(net)(batch["x"]), batch)

    def train(model: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = eqx.filter_value_and_grad(evaluate)(model, batch)
        params = eqx.filter(model, eqx.is_array)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return eqx.apply_updates(model, updates), opt_state, loss

    return Case(make, train, evaluate, lambda model, opt_state: model)


CASES = {"plain": plain, "linen": linen, "equinox": equinox}


def batch_of(count: int) -> Any:
    rng = np.random.default_rng(count)
    return {k: rng.normal(size=(count, WIDTH)).astype(np.float32) for k in ("x", "y")}


def shardings(tree: Any) -> Any:
    return [x.sharding for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Tree paths of arguments that calls had to move."""
    found: list[str] = []
    place = Bound.place

    def spying(self: Bound, arguments: Arguments) -> Any:
        paths = self.traced.arguments.array_paths
        found.extend(paths[i] for i in arguments.to_move)
        return place(self, arguments)

    monkeypatch.setattr(Bound, "place", spying)
    yield found


def jitted(fn: Any, name: str) -> Any:
    if name == "equinox":
        return pytest.importorskip("equinox").filter_jit(fn)
    return jax.jit(fn)


@pytest.mark.parametrize("name", covering(CASES, ["plain"]))
@pytest.mark.filterwarnings("ignore::rhino_jax.RhinoWarning")
def test_no_state_travels_between_train_eval_and_the_last_batch(
    name: str, moved: list[str]
) -> None:
    case = CASES[name]()
    count = len(case.make(jax.random.key(0)))
    train = rhino.auto_shard(
        case.train,
        mesh={"x": 2, "y": 4},
        # Little memory: state must be cut, and each function would cut it otherwise.
        memory_budget_bytes=30_000,
        level="fast",
        donate_argnums=tuple(range(count)),
        progress=False,
    )
    evaluate = rhino.auto_shard(case.evaluate, like=train, progress=False)
    shapes = case.make(jax.random.key(0))
    plan = train.plan(*shapes, batch_of(32))
    state = plan.init(case.make, jax.random.key(0))
    layout = shardings(state)
    assert any(not s.is_fully_replicated for s in layout)
    single = case.make(jax.random.key(0))
    for size in (32, 32, 12, 32) if name == "plain" else (32, 32, 12, 32, 6):
        *single, want = jitted(case.train, name)(*single, batch_of(size))
        *state, loss = train(*state, batch_of(size))
        assert shardings(state) == layout
        assert_same((single, want), (state, loss), atol=2e-5)
        got = evaluate(case.seen(*state), batch_of(16))
        want = jitted(case.evaluate, name)(case.seen(*single), batch_of(16))
        assert_same(want, got)
    assert {path.split("[")[0] for path in moved} <= {"batch"}
    assert train.last_plan.mesh is evaluate.last_plan.mesh is plan.mesh


@pytest.mark.parametrize("name", covering(CASES, ["plain"]))
def test_one_state_planned_together(name: str, moved: list[str]) -> None:
    case = CASES[name]()
    state = case.make(jax.random.key(0))
    plans = rhino.plan_together(
        {
            "train": (case.train, (*state, batch_of(32))),
            "eval": (case.evaluate, (case.seen(*state), batch_of(64))),
        },
        weights={"train": 10},
        mesh={"x": 2, "y": 4},
        progress=False,
    )
    train = plans["train"].jit(case.train)
    evaluate = plans["eval"].jit(case.evaluate)
    placed = plans["train"].init(case.make, jax.random.key(0))
    *placed, loss = train(*placed, batch_of(32))
    got = evaluate(case.seen(*placed), batch_of(64))
    *single, want = jitted(case.train, name)(*state, batch_of(32))
    assert_same((single, want), (placed, loss), atol=2e-5)
    assert_same(jitted(case.evaluate, name)(case.seen(*single), batch_of(64)), got)
    assert {path.split("[")[0] for path in moved} <= {"batch"}
    assert len(plans.shared) >= 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::rhino_jax.RhinoWarning")
def test_nnx_objects_stay_where_they_are(moved: list[str], tmp_path: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    ocp = pytest.importorskip("orbax.checkpoint")

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
            self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.down(nnx.relu(self.up(x)))

    def make(seed: int = 0) -> Any:
        model = Model(nnx.Rngs(seed))
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    def evaluate(net: Any, batch: Any) -> Any:
        return squares(net(batch["x"]), batch)

    def train(model: Any, optimizer: Any, batch: Any) -> Any:
        loss, grads = nnx.value_and_grad(evaluate)(model, batch)
        optimizer.update(model, grads)
        return loss

    options = {"memory_budget_bytes": 30_000, "level": "fast", "progress": False}
    sharded = rhino.auto_shard(train, mesh={"x": 2, "y": 4}, **options)
    scored = rhino.auto_shard(evaluate, like=sharded, progress=False)
    plan = sharded.plan(*make(), batch_of(32))
    model, optimizer = plan.init(make)
    layout = shardings(nnx.state((model, optimizer)))
    assert any(not s.is_fully_replicated for s in layout)
    alone = make()
    for size in (32, 12):
        want = nnx.jit(train)(*alone, batch_of(size))
        assert_same(want, sharded(model, optimizer, batch_of(size)), atol=2e-5)
        assert shardings(nnx.state((model, optimizer))) == layout
        want = evaluate(alone[0], batch_of(16))
        assert_same(want, scored(model, batch_of(16)), atol=2e-5)
    assert {path.split("[")[0] for path in moved} <= {"batch"}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", nnx.state(model))
    other = rhino.plan(train, *make(), batch_of(32), mesh={"z": 8}, **options)
    target = other.abstract_args()[0]
    assert jax.tree.structure(target) == jax.tree.structure(nnx.state(model))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "model", target)
    again, _ = other.init(make, 1)
    nnx.update(again, restored)
    assert_same(jax.device_get(nnx.state(model)), jax.device_get(nnx.state(again)))
    assert again.up.kernel.sharding == target["up"]["kernel"].sharding
