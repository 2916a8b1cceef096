"""State made, moved and restored where a plan wants it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import MeshError, RhinoError
from rhino_jax.plan.plan import PlanData
from tests.cases import covering
from tests.runtime.stand_in import assert_close


NAMES = ("params", "opt_state")
OPTIMIZER = optax.adam(1e-2)
PINS = {"params['w1']": P("x", "y"), "opt_state*mu['w1']": P("y"), "batch*": P("x")}


def make_params(key: Any, width: int = 64) -> Any:
    """Parameters that depend on a key, and compile fast."""

    def made(scale: float, *shape: int) -> Any:
        places = (jax.lax.broadcasted_iota(jnp.float32, shape, d) for d in (0, 1))
        seed = jax.random.key_data(key)[-1].astype(jnp.float32)
        return jnp.sin(scale * (next(places) + 7.3 * next(places)) + seed)

    return {
        "w1": made(1.7, 16, width),
        "b1": jnp.zeros(width),
        "w2": made(2.9, width, 8),
    }


def make_state(key: Any, width: int = 64) -> Any:
    params = make_params(key, width)
    return params, OPTIMIZER.init(params)


def step(params: Any, opt_state: Any, batch: Any) -> Any:
    def loss_of(p: Any) -> Any:
        hidden = jax.nn.relu(batch["x"] @ p["w1"] + p["b1"])
        return jnp.mean((hidden @ p["w2"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def batch_of(count: int = 32) -> Any:
    rng = np.random.default_rng(0)
    shapes = {"x": (count, 16), "y": (count, 8)}
    return {k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def plan_on(mesh: Any, pins: Any = None) -> PlanData:
    shapes = jax.eval_shape(make_state, jax.random.key(0))
    return rhino.plan(
        step, *shapes, batch_of(), mesh=mesh, pins=pins, donate_argnums=(0, 1)
    )


@pytest.fixture(scope="module")
def plan() -> PlanData:
    return plan_on({"x": 2, "y": 4}, PINS)


def shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)


@pytest.mark.parametrize("is_loaded", covering([True, False]))
def test_state_is_made_where_it_belongs(
    plan: PlanData, tmp_path: Any, is_loaded: bool
) -> None:
    if is_loaded:
        plan.save(tmp_path / "plan.json")
        plan = rhino.load_plan(tmp_path / "plan.json")
    params, opt_state = plan.init(make_state, jax.random.key(0))
    batch = plan.put(batch_of())
    # A loaded plan makes its mesh when it is needed.
    abstract = plan.abstract_args()
    assert shardings((params, opt_state, batch)) == shardings(abstract)
    assert params["w1"].sharding.spec == P("x", "y")
    sharded = plan.jit(step, donate_argnums=(0, 1))
    sharded.plan(*abstract)
    (bound,) = sharded._bounds.values()
    arguments = sharded._match(bound, (params, opt_state, batch), {})
    assert arguments is not None and not arguments.to_move
    want = jax.jit(step)(*make_state(jax.random.key(0)), batch_of())
    assert_close(sharded(params, opt_state, batch), want)


def test_no_device_holds_a_whole_array_while_it_is_made(
    plan: PlanData, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    jit = jax.jit

    def spying(fn: Any, **options: Any) -> Any:
        def call(*args: Any) -> Any:
            seen.append(jit(fn, **options).lower(*args).compile().as_text())
            return jit(fn, **options)(*args)

        return call

    monkeypatch.setattr(jax, "jit", spying)
    plan.init(make_params, jax.random.key(0))
    (text,) = seen
    assert "f32[8,16]" in text
    assert "f32[16,64]" not in text


def test_one_argument_several_and_a_dict(plan: PlanData) -> None:
    wanted = plan.in_shardings
    key = jax.random.key(0)
    assert shardings(plan.init(make_params, key)) == wanted[0]
    params = make_params(key)
    # Adam's moments look like the parameters; what is nearest to the root is meant.
    assert shardings(plan.init(OPTIMIZER.init, params)) == wanted[1]
    both = plan.init(lambda k: dict(zip(NAMES, make_state(k), strict=True)), key)
    assert shardings(both) == {"params": wanted[0], "opt_state": wanted[1]}
    turned = plan.init(lambda k: make_state(k)[::-1], key)
    assert shardings(turned) == wanted[1::-1]
    moments = plan.put({"mu": params})
    assert shardings(moments) == {"mu": wanted[1][0].mu}
    assert plan.put({"w2": params["w2"]})["w2"].sharding == wanted[0]["w2"]
    sizes = plan.init(make_params, key, width=64)
    assert_close(sizes, params)


@pytest.mark.parametrize(
    ("give", "where"),
    [
        (lambda: batch_of(31), "batch['x']"),
        (lambda: (*make_state(jax.random.key(0)), batch_of(31)), "batch['x']"),
        (lambda: {"x": batch_of()["x"], "y": batch_of(31)["y"]}, "batch['y']"),
        (lambda: batch_of(31)["x"], "batch['x']"),
    ],
    ids=["alone", "among all arguments", "one array of it", "an array by itself"],
)
def test_a_batch_of_other_rows_is_named(plan: PlanData, give: Any, where: str) -> None:
    with pytest.raises(RhinoError, match="an array is not as `step`") as error:
        plan.put(give())
    assert error.value.where == where
    assert "float32[31," in error.value.numbers and "P('x')" in error.value.numbers


def test_rows_of_a_process_are_told_by_their_shape() -> None:
    """Also where parameters have as many dims."""

    def product(w: Any, rows: Any) -> Any:
        return rows @ w

    w, rows = np.ones((16, 8), np.float32), np.ones((32, 16), np.float32)
    pins = {"w": P(), "rows": P("x")}
    plan = rhino.plan(product, w, rows, mesh={"x": 8}, pins=pins)
    assert plan.put(rows, local=True).sharding == plan.in_shardings[1]


def test_what_belongs_nowhere_or_to_several_places_is_refused(plan: PlanData) -> None:
    key = jax.random.key(0)
    with pytest.raises(RhinoError, match="is no argument of `step`") as error:
        plan.init(lambda k: (make_params(k), {"extra": jnp.ones(3)}), key)
    assert "float32[3]" in error.value.numbers
    with pytest.raises(RhinoError, match="an array is not as") as error:
        plan.init(lambda k: make_params(k, width=32), key)
    assert error.value.where == "params['b1']"
    assert "got float32[32], planned float32[64]" in error.value.numbers
    with pytest.raises(RhinoError, match="an array is not as") as error:
        plan.put(jax.tree.map(lambda x: x.astype(jnp.bfloat16), make_params(key)))
    assert "got bfloat16[64], planned float32[64]" in error.value.numbers
    with pytest.raises(RhinoError, match="could be several arguments") as error:
        plan.put(make_params(key)["w1"])
    assert error.value.where.startswith("params['w1'] or opt_state[0].mu['w1']")
    assert "{'params': …}" in error.value.fix
    with pytest.raises(RhinoError, match="a shape in place"):
        plan.put(jax.eval_shape(make_params, key))


def test_arrays_of_another_mesh_and_of_numpy_move(plan: PlanData) -> None:
    other = plan_on({"z": 8})
    args = (*other.init(make_state, jax.random.key(1)), other.put(batch_of()))
    moved = plan.put(args)
    assert shardings(moved) == plan.in_shardings
    assert_close(moved, jax.device_get(args))
    assert not any(x.is_deleted() for x in jax.tree.leaves(args))
    again = plan.put(moved)
    assert jax.tree.map(id, again) == jax.tree.map(id, moved)
    wide = {k: v.astype(np.float64) for k, v in batch_of().items()}
    assert plan.put(wide)["x"].dtype == jnp.float32
    assert plan.put((3, "text")) == (3, "text")


def test_a_process_gives_what_it_holds(plan: PlanData) -> None:
    batch = batch_of()
    placed = plan.put(batch, local=True)
    assert shardings(placed) == plan.in_shardings[2]
    assert_close(placed, batch)
    with pytest.raises(RhinoError, match="another part of the array") as error:
        plan.put(batch_of(31), local=True)
    assert "batch['x']" in error.value.where
    assert "holds (32, 16)" in error.value.numbers


def test_a_plan_for_other_hardware_has_shapes_only() -> None:
    shapes = jax.eval_shape(make_state, jax.random.key(0))
    plan = rhino.plan(step, *shapes, batch_of(), mesh={"x": 64}, hardware="v5e")
    assert plan.abstract_args()[0]["w1"].shape == (16, 64)
    with pytest.raises(MeshError, match="no devices to run on"):
        plan.init(make_state, jax.random.key(0))


def test_keys_and_half_precision_have_their_types() -> None:
    def noisy(key: Any, x: Any) -> Any:
        return x + jax.random.normal(key, x.shape, x.dtype)

    args = jax.random.key(0, impl="rbg"), jnp.ones((8, 8), jnp.bfloat16)
    plan = rhino.plan(noisy, *args, mesh={"x": 8})
    key, x = plan.abstract_args()
    assert (key.dtype, x.dtype) == (args[0].dtype, jnp.bfloat16)
    placed = plan.put(args)
    assert shardings(placed) == plan.in_shardings


@pytest.mark.slow
def test_orbax_saves_on_one_mesh_and_restores_on_another(
    plan: PlanData, tmp_path: Any
) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    other = plan_on({"z": 8}, {"params['w1']": P("z"), "params['w2']": P(None, "z")})
    params, opt_state = plan.init(make_state, jax.random.key(2))
    params, opt_state, _ = plan.jit(step)(params, opt_state, batch_of())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, opt_state))
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", other.abstract_args()[:2])
    assert shardings(restored) == other.in_shardings[:2]
    assert_close(restored, jax.device_get((params, opt_state)), rtol=0, atol=0)
    stepped = other.jit(step)(*restored, batch_of())
    assert_close(stepped, jax.jit(step)(*jax.device_get(restored), batch_of()))


def test_nnx_objects_are_made_and_moved() -> None:
    nnx = pytest.importorskip("flax.nnx")

    def train(model: Any, rngs: Any, x: Any) -> Any:
        model.kernel[...] += x.sum()
        return model(x) + jax.random.normal(rngs.dropout(), (8, 32))

    def make() -> Any:
        return nnx.Linear(16, 32, rngs=nnx.Rngs(0)), nnx.Rngs(dropout=1)

    pins = {"model.kernel": P("x", "y")}
    args = (*make(), jnp.ones((8, 16)))
    plan = rhino.plan(train, *args, mesh={"x": 2, "y": 4}, pins=pins)
    model, rngs = plan.init(make)
    assert model.kernel.sharding == plan.in_shardings[0]["kernel"]
    assert isinstance(rngs, nnx.Rngs)
    moved = plan.put(make()[0])
    assert moved.kernel.sharding == model.kernel.sharding
    assert moved.kernel[...].sharding.spec == P("x", "y")
    state = plan.put(nnx.state(make()[0]))
    assert state["kernel"].sharding == model.kernel.sharding
    with pytest.raises(RhinoError, match="an array is not as `train`"):
        plan.put(nnx.List([nnx.Linear(3, 3, rngs=nnx.Rngs(0))]))


def test_python_scalars_and_keyword_arguments_find_their_place() -> None:
    def count(state: Any, *, batch: Any) -> Any:
        return {"n": state["n"] + 1, "w": state["w"] + batch.sum()}

    w = np.ones((16, 8), np.float32)
    pins = {"state['w']": P("x"), "batch": P(None, "x")}
    plan = rhino.plan(count, {"n": 0, "w": w}, batch=w, mesh={"x": 8}, pins=pins)
    (state,), named = plan.put((({"n": 0, "w": w},), {"batch": w}))
    assert state["n"] == 0 and isinstance(state["n"], int)
    assert state["w"].sharding.spec == P("x")
    assert named["batch"].sharding.spec == P(None, "x")
    assert shardings(plan.put({"batch": w})) == {"batch": named["batch"].sharding}
    made = plan.init(lambda: {"n": 0, "w": jnp.ones((16, 8))})
    assert made["w"].sharding == state["w"].sharding
