"""State that is stored in blocks: made, moved, read back, and refused elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import RhinoError
from rhino_jax.ir.transform import BLOCKS, stored_in_blocks
from rhino_jax.plan.plan import PlanData
from tests.runtime.stand_in import assert_close


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-3))
PINS = {"*['up']": P(None, "model"), "*['down']": P("model")}


def make_params(key: Any) -> Any:
    """Parameters that depend on a key, and compile fast."""

    def made(scale: float, *shape: int) -> Any:
        places = (jax.lax.broadcasted_iota(jnp.float32, shape, d) for d in (0, 1))
        seed = jax.random.key_data(key)[-1].astype(jnp.float32)
        return 0.15 * jnp.sin(scale * (next(places) + 7.3 * next(places)) + seed)

    return {
        "up": made(1.7, 64, 512),
        "bias": jnp.arange(512.0) / 512,
        "down": made(2.9, 256, 64),
    }


def predict(params: Any, x: Any) -> Any:
    gate, up = jnp.split(x @ params["up"] + params["bias"], 2, -1)
    return (jax.nn.silu(gate) * up) @ params["down"]


def train_step(params: Any, state: Any, batch: Any) -> Any:
    def loss_of(params: Any) -> Any:
        return jnp.mean((predict(params, batch) - 1) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


def batch_of(count: int = 32) -> Any:
    return np.random.default_rng(0).normal(size=(count, 64)).astype(np.float32)


def mesh_of(*sizes: int) -> Any:
    return jax.make_mesh(sizes, ("data", "model"))


def sharded(fn: Any = train_step, sizes: Sequence[int] = (2, 4), **said: Any) -> Any:
    said = {"storage": "blocks", "pins": PINS, "mesh": mesh_of(*sizes), **said}
    return rhino.auto_shard(fn, **said, microbatches=1, level="fast", progress=False)


def shapes() -> Any:
    params = jax.eval_shape(make_params, jax.random.key(0))
    return params, jax.eval_shape(OPTIMIZER.init, params), batch_of()


@cache
def sharded_on(*sizes: int) -> Any:
    """The train step on a mesh of these sizes, compiled once for all tests."""
    return sharded(sizes=sizes)


def plan_of(*sizes: int) -> PlanData:
    return sharded_on(*sizes or (2, 4)).plan(*shapes())


on_one_device = jax.jit(train_step)


def state() -> Any:
    params = make_params(jax.random.key(0))
    return params, OPTIMIZER.init(params)


def assert_equal(tree: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def test_what_is_split_is_stored_in_blocks_with_its_moments() -> None:
    plan = plan_of()
    stored = {
        plan.inputs[i].path: d for i, d in stored_in_blocks(plan.transforms).items()
    }
    names = ["params['{}']", "state[1][0].mu['{}']", "state[1][0].nu['{}']"]
    assert set(stored) == {n.format(k) for n in names for k in ("up", "bias")}
    ((dim, blocks),) = stored["params['up']"]
    assert (dim, blocks.parts, blocks.count) == (1, (256, 256), 4)
    assert any("6 arrays are stored in blocks" in note for note in plan.notes)
    assert "stored in blocks" in plan.table()


def test_as_it_is_written_by_default() -> None:
    plan = sharded(storage="as written").plan(*shapes())
    assert BLOCKS not in [t.name for t in plan.transforms]


def test_a_device_holds_its_share_of_every_part() -> None:
    params, _ = state()
    placed = plan_of().put(params)
    assert placed["up"].shape == params["up"].shape
    shards = {s.index[1].start or 0: s.data for s in placed["up"].addressable_shards}
    assert sorted(shards) == [0, 128, 256, 384]
    written = np.asarray(params["up"])
    for k, shard in enumerate(shards[i] for i in sorted(shards)):
        gate = written[:, 64 * k : 64 * k + 64]
        up = written[:, 256 + 64 * k : 256 + 64 * k + 64]
        np.testing.assert_array_equal(shard, np.concatenate([gate, up], 1))


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray])
def test_put_and_as_written_are_inverse(of: Any) -> None:
    plan, written = plan_of(), jax.tree.map(of, state())
    placed = plan.put(written)
    assert not np.array_equal(placed[0]["up"], written[0]["up"])
    assert_equal(plan.as_written(placed), written)
    assert_equal(plan.put(placed), placed)
    assert_equal(plan.as_written(plan.put(placed[0])), written[0])


def test_init_makes_what_put_moves() -> None:
    plan = plan_of()
    params = plan.init(make_params, jax.random.key(0))
    assert_equal(params, plan.put(state()[0]))
    assert_equal(plan.as_written(params), state()[0])
    moments = plan.init(OPTIMIZER.init, params)
    # What an init function makes of stored arrays is stored as they are.
    copied = plan.init(lambda p: jax.tree.map(lambda x: x + 0.0, p), params)
    assert_equal(copied, params)
    assert_equal(plan.as_written(moments), state()[1])


def test_three_steps_are_those_of_one_device() -> None:
    step, (params, opt_state), batch = sharded_on(2, 4), state(), batch_of()
    plan = step.plan(params, opt_state, batch)
    placed = plan.put((params, opt_state))
    for _ in range(3):
        params, opt_state, loss = on_one_device(params, opt_state, batch)
        *placed, loss_here = step(*placed, batch)
        assert_close(loss_here, loss)
        assert_close(plan.as_written(placed), [params, opt_state])


def test_arrays_of_unknown_order_are_refused() -> None:
    step, written, batch = sharded_on(2, 4), state(), batch_of()
    with pytest.raises(RhinoError, match="not known to be stored") as raised:
        step(*written, batch)
    text = str(raised.value)
    assert "params['bias']" in text
    assert "4 blocks of 256 + 256 along dim 0" in text
    assert "plan.put" in text
    plan = step.plan(*written, batch)
    placed = plan.put(written)
    averaged = jax.tree.map(jnp.copy, placed)
    with pytest.raises(RhinoError, match="not known"):
        step(averaged[0], placed[1], batch)
    with pytest.raises(RhinoError, match=r"plan\.as_written"):
        plan.as_written(averaged)
    known = plan.put(averaged, stored=True)
    assert_equal(plan.as_written(known), written)
    assert np.isfinite(step(*known, batch)[-1])


def test_other_functions_read_them_only_as_they_are() -> None:
    step, written, batch = sharded_on(2, 4), state(), batch_of()
    plan = step.plan(*written, batch)
    params = plan.put(written[0])
    expected = predict(written[0], batch)
    alone = sharded(predict, storage="as written")
    with pytest.raises(RhinoError, match="no blocks|known to be in 4 blocks"):
        alone(params, batch)
    assert_close(alone(plan.as_written(params), batch), expected)
    beside = sharded(predict, like=step, storage="as written", mesh=None, pins=None)
    assert_close(beside(params, batch), expected)
    with pytest.raises(RhinoError, match="not known to be stored"):
        beside(written[0], batch)


def test_a_trace_is_refused() -> None:
    step, written, batch = sharded_on(2, 4), state(), batch_of()
    with pytest.raises(RhinoError, match="inside of a trace"):
        jax.jit(lambda *args: step(*args))(*written, batch)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is planned again")
def test_another_batch_keeps_the_order() -> None:
    step, written = sharded_on(2, 4), state()
    placed = step.plan(*written, batch_of()).put(written)
    params, opt_state, _ = step(*placed, batch_of())
    small = batch_of(16)
    *_, loss = step(params, opt_state, small)
    expected = on_one_device(*written, batch_of())
    assert_close(loss, on_one_device(*expected[:2], small)[-1])


def test_a_saved_plan_stores_alike(tmp_path: Path) -> None:
    plan, written, batch = plan_of(), state(), batch_of()
    plan.save(tmp_path / "plan.json")
    loaded = rhino.load_plan(tmp_path / "plan.json")
    assert loaded.transforms == plan.transforms
    again = loaded.jit(train_step)
    loaded = again.plan(*written, batch)
    placed = loaded.put(written)
    assert_equal(placed, plan.put(written))
    expected = on_one_device(*written, batch)
    assert_close(plan.as_written(again(*placed, batch)[0]), expected[0])


@pytest.mark.slow
def test_a_checkpoint_as_written_is_restored_on_another_mesh(tmp_path: Path) -> None:
    plan, batch = plan_of(), batch_of()
    *placed, _ = sharded_on(2, 4)(*plan.put(state()), batch)
    leaves, tree = jax.tree.flatten(plan.as_written(placed))
    np.savez(tmp_path / "state.npz", *leaves)
    with np.load(tmp_path / "state.npz") as file:
        restored = jax.tree.unflatten(tree, [file[name] for name in file.files])
    other = plan_of(4, 2)
    (_, blocks), *_ = stored_in_blocks(other.transforms)[0]
    assert blocks.count == 2
    again = sharded_on(4, 2)
    *_, loss = again(*other.put(restored), batch)
    expected = on_one_device(*state(), batch)
    assert_close(loss, on_one_device(*expected[:2], batch)[-1])


@pytest.mark.slow
@pytest.mark.parametrize("is_placed", [True, False])
def test_a_plan_is_checked_as_written(is_placed: bool) -> None:
    plan, written = plan_of(), state()
    given = plan.put(written) if is_placed else written
    assert plan.check(train_step, *given, batch_of()).ok


def test_parts_of_processes_are_refused() -> None:
    with pytest.raises(RhinoError, match="local=True"):
        plan_of().put(state()[0], local=True)


def test_other_words_are_refused() -> None:
    with pytest.raises(RhinoError, match="storage"):
        sharded(storage="strided")
