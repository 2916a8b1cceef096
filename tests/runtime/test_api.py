"""`auto_shard` and `plan` with the real search, on small programs."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec as P

import rhino_jax as rhino
from tests.runtime.stand_in import assert_close, mesh_of, normal


def train_step(params: Any, batch: Any) -> Any:
    def loss_of(p: Any) -> Any:
        hidden = jnp.tanh(batch["x"] @ p["w1"])
        return jnp.mean((hidden @ p["w2"] - batch["y"]) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def args() -> tuple[Any, Any]:
    params = {"w1": normal(0, 16, 32) * 0.2, "w2": normal(1, 32, 8) * 0.2}
    return params, {"x": normal(2, 64, 16), "y": normal(3, 64, 8)}


def shapes() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args())


@rhino.auto_shard(mesh={"data": 2}, level="fast", loops="as written")
def decorated(x: Any) -> Any:
    return x * 2


def test_a_plan_of_a_sharded_function_has_its_options() -> None:
    x = jax.ShapeDtypeStruct((8, 8), "float32")
    found = rhino.plan(decorated, x).origin.plan_options
    assert (found.level, found.loops, found.recompute) == ("fast", "as written", "auto")
    again = rhino.plan(decorated, x, microbatches=1).with_(loops="auto")
    assert (again.origin.plan_options.loops, again.microbatches) == ("auto", 1)
    with pytest.raises(rhino.MeshError, match="`rhino.plan`: a mesh needs axes"):
        rhino.plan(train_step, *shapes(), mesh={})


def test_bare_and_with_keywords() -> None:
    want = jax.jit(train_step)(*args())
    assert_close(rhino.auto_shard(train_step)(*args()), want)
    decorated = rhino.auto_shard(mesh=mesh_of(), donate_argnums=0)(train_step)
    assert_close(decorated(*args()), want)
    assert decorated.__wrapped__ is train_step


def test_the_mesh_in_context_is_used() -> None:
    step = rhino.auto_shard(train_step)
    with jax.set_mesh(mesh_of()) as _:
        assert step.plan(*args()).mesh_axes == (("x", 2), ("y", 4))
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        params, _ = step(*args())
    assert params["w1"].sharding.mesh.axis_types == (AxisType.Explicit,) * 2


def test_rhino_chooses_the_mesh() -> None:
    plan = rhino.plan(train_step, *shapes())
    assert isinstance(plan.mesh, Mesh) and plan.mesh.size == 8
    assert len(plan.meshes) > 1


@pytest.mark.parametrize(
    ("mesh", "kind"),
    [
        ({"a": 2, "b": 2}, Mesh),
        ({"a": 16, "b": 16}, AbstractMesh),
        (AbstractMesh((4, 4), ("a", "b")), AbstractMesh),
    ],
)
def test_meshes_of_every_kind(mesh: Any, kind: type) -> None:
    plan = rhino.plan(train_step, *shapes(), mesh=mesh, hardware="v5e")
    assert isinstance(plan.mesh, kind)
    assert plan.hardware.startswith("v5e")


def test_manual_axes_in_context_are_refused() -> None:
    double = rhino.auto_shard(lambda x: x * 2)
    inside = jax.shard_map(double, mesh=mesh_of(), in_specs=P("x"), out_specs=P("x"))
    with pytest.raises(rhino.MeshError, match="Manual axes"):
        inside(normal(0, 8, 8))


def test_too_few_devices_to_run() -> None:
    step = rhino.auto_shard(train_step, mesh={"data": 16})
    with pytest.raises(rhino.MeshError, match="16 devices are needed, 8 are here"):
        step(*args())


def test_pins_hold() -> None:
    pins = {"params['w1']": P("x", "y"), "batch*": P("y")}
    plan = rhino.plan(train_step, *shapes(), mesh=mesh_of(), pins=pins)
    assert plan.in_specs[0]["w1"] == P("x", "y")
    assert plan.in_specs[1] == {"x": P("y"), "y": P("y")}
    assert plan.out_specs[0]["w1"] == P("x", "y")


def test_pins_hold_on_a_mesh_that_rhino_chooses() -> None:
    plan = rhino.plan(train_step, *shapes(), pins={"params['w1']": P("x", "y")})
    assert len(plan.mesh_axes) >= 2
    assert plan.in_specs[0]["w1"] == P("x", "y")
    with pytest.raises(rhino.PinError, match="'q'"):
        rhino.plan(train_step, *shapes(), pins={"params['w1']": P("q")})


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"mesh": 3}, rhino.MeshError, "no mesh"),
        ({"mesh": {}}, rhino.MeshError, "needs axes"),
        ({"mesh": {"a": 0}}, rhino.MeshError, "size of at least 1"),
        ({"mesh": {"a": 2.5}}, rhino.MeshError, "size of at least 1"),
        ({"hardware": "v5"}, rhino.HardwareError, "Did you mean 'v5"),
        ({"level": "quick"}, rhino.RhinoError, "level 'quick'"),
        ({"memory_budget_bytes": 0}, rhino.RhinoError, "must be a positive"),
        ({"pins": {"parms['w1']": P()}}, rhino.PinError, 'Did you mean "params'),
    ],
)
def test_bad_requests_in_four_parts(options: Any, error: Any, match: str) -> None:
    params, batch = args()
    with pytest.raises(error, match=match) as caught:
        rhino.auto_shard(train_step, **options)(params, batch)
    assert caught.value.fix and caught.value.numbers
    assert not params["w1"].is_deleted()


def test_something_that_cannot_be_called() -> None:
    with pytest.raises(rhino.RhinoError, match="cannot be called"):
        rhino.auto_shard(mesh_of())


def test_progress_is_told() -> None:
    told: list[Any] = []
    plan = rhino.plan(
        train_step, *shapes(), mesh=mesh_of(), progress=lambda *now: told.append(now)
    )
    assert plan.search.objective_s > 0
    assert rhino.plan(train_step, *shapes(), mesh=mesh_of(), progress=False)


def test_a_plan_is_saved_loaded_and_run(tmp_path: Any) -> None:
    plan = rhino.plan(train_step, *shapes(), mesh=mesh_of())
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert_close(loaded.jit(train_step)(*args()), jax.jit(train_step)(*args()))
    with pytest.raises(rhino.PlanFileError):
        loaded.jit(lambda params, batch: params)(*args())


def test_a_function_wrapped_twice() -> None:
    once = rhino.auto_shard(train_step, mesh=mesh_of(), donate_argnums=0)
    plan = rhino.plan(once, *shapes(), mesh=mesh_of())
    assert plan.program_name == "train_step"
    params, batch = args()
    rhino.auto_shard(once, mesh=mesh_of())(params, batch)
    assert params["w1"].is_deleted()


def test_functions_are_pickled_by_name_or_as_function_and_options() -> None:
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    assert copy.deepcopy(decorated) is decorated
    sharded = rhino.auto_shard(train_step, mesh=mesh_of(), level="fast")
    plan = sharded.plan(*shapes())
    for fn in (sharded, plan.jit(train_step)):
        again = pickle.loads(pickle.dumps(fn))
        assert again.mesh.shape == fn.mesh.shape
        assert again.plan_options == fn.plan_options
        assert again.plan(*shapes()).in_specs == plan.in_specs


def test_import_starts_no_backend() -> None:
    code = (
        "import sys, rhino_jax; from jax._src import xla_bridge as b;"
        "assert not b.backends_are_initialized(); assert 'ortools' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_plan_where_memory_does_not_bind_needs_no_cp_sat() -> None:
    code = (
        "import sys, jax, rhino_jax; x = jax.ShapeDtypeStruct((64, 64), 'float32');"
        "rhino_jax.plan(lambda x, w: (x @ w).sum(), x, x, hardware='h100:8');"
        "assert 'pandas' not in sys.modules  # 2 s of CPU without stored bytecode"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_was_said_of_a_sharded_function_holds_where_nothing_else_is_said():
    pins = {"params['w1']": P("x", None)}
    step = rhino.auto_shard(
        train_step, mesh=mesh_of(), pins=pins, memory_budget_bytes="1GiB"
    )
    plan = rhino.plan(step, *shapes())
    assert plan.mesh == mesh_of()
    assert plan.memory_budget_bytes == 2**30
    assert plan.in_specs[0]["w1"] == P("x")
    other = rhino.plan(step, *shapes(), pins={"params['w1']": P(None, "x")})
    assert other.in_specs[0]["w1"] == P(None, "x")
    assert other.memory_budget_bytes == 2**30


def test_another_mesh_does_not_keep_to_what_the_first_is_like():
    like = rhino.plan(train_step, *shapes(), mesh=mesh_of())
    step = rhino.auto_shard(train_step, like=like)
    plan = rhino.plan(step, *shapes(), mesh={"x": 8})
    assert plan.mesh_axes == (("x", 8),)
