"""Scenarios of steps in stages over several processes; see `worker`."""

from __future__ import annotations

import os
import signal
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.helpers_causal import causal_step
from tests.helpers_coupled import STEPS, arguments
from tests.processes.worker import patch


D, F, ROWS = 16, 32, 16

SGD = optax.sgd(0.1)
ADAMW = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-3))


def loss_of(params: Any, batch: Any) -> Any:
    x = through(params["layers"], batch["x"])
    return jnp.mean((x @ params["head"] - batch["y"]) ** 2)


def through(layers: Any, x: Any) -> Any:
    for p in layers:
        x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
    return x


def step_of(optimizer: Any) -> Any:
    def train_step(params: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return train_step


def arrays(count: int = 4) -> Any:
    """Parameters of so many layers, and a batch."""
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    layers = [{"up": draw(D, F) / 4, "down": draw(F, D) / 6} for _ in range(count)]
    params = {"layers": layers, "head": draw(D, 8) / 4}
    return params, {"x": draw(ROWS, D), "y": draw(ROWS, 8)}


def stacked_step(params: Any, batch: Any) -> Any:
    """The same model with its layers in a loop, and SGD."""

    def loss(params: Any) -> Any:
        x, _ = jax.lax.scan(
            lambda x, p: (through([p], x), None), batch["x"], params["layers"]
        )
        return jnp.mean((x @ params["head"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


def stacked_arrays(count: int = 4) -> Any:
    params, batch = arrays()
    layers = jax.tree.map(lambda *xs: np.stack(xs[:count]), *params["layers"])
    return {**params, "layers": layers}, batch


def causal_arrays() -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    layers = [{name: draw(D, D) / 8 for name in "qkv"} for _ in range(2)]
    return layers, {"x": draw(4, 12, D), "y": draw(4, 12, D)}


def sums(tree: Any) -> list[float | None]:
    """Of every leaf, its sum of squares; None of those that are elsewhere."""
    found: list[float | None] = []
    for x in jax.tree.leaves(tree):
        parts = {str(s.index): np.asarray(s.data) for s in x.addressable_shards}
        total = sum(float((p.astype(np.float64) ** 2).sum()) for p in parts.values())
        is_whole = sum(p.size for p in parts.values()) == x.size
        found.append(total if is_whole else None)
    return found


def trained(
    optimizer: Any, layers: int = 4, **options: Any
) -> tuple[list[float], list[Any], Any]:
    """Losses, and what this process has of the state afterwards."""
    import rhino_jax as rhino

    params, batch = arrays(layers)
    step = rhino.auto_shard(step_of(optimizer), donate_argnums=(0, 1), **options)
    shapes = jax.eval_shape(optimizer.init, params)
    plan = step.plan(params, shapes, batch)
    params = plan.put(params)
    state = plan.init(optimizer.init, params)
    losses = []
    for _ in range(2):
        before = params
        params, state, loss = step(params, state, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        losses.append(float(loss))
    return losses, sums((params, state)), plan


def mesh(stages: int, *, is_first: bool = True) -> dict[str, int]:
    """Groups of devices in a row, or each with devices of all processes."""
    rest = jax.device_count() // stages
    if is_first:
        return {"stage": stages, "data": rest}
    return {"data": rest, "stage": stages}


def in_two_stages(i: int) -> Any:
    """State is where its stage is, the loss everywhere."""
    losses, state, plan = trained(ADAMW, 2, mesh=mesh(2), microbatches=4)
    assert len(plan.stages) == 2
    return losses, state


def in_two_stages_of_any_mesh(i: int) -> Any:
    return trained(SGD, stages=2)[:2]


def in_unequal_stages(i: int) -> Any:
    """A group of four devices, and two of two."""
    losses, state, plan = trained(ADAMW, stages=[4, 2, 2], microbatches=4)
    assert [len(stage.devices) for stage in plan.stages] == [4, 2, 2]
    return losses, state


def in_slices(i: int) -> Any:
    """Two groups; sequences pass through these in three slices."""
    import rhino_jax as rhino

    params, batch = causal_arrays()
    step = rhino.auto_shard(
        causal_step,
        mesh=mesh(2),
        microbatches=2,
        schedule="token-slices:5,4,3",
        donate_argnums=0,
    )
    plan = step.plan(params, batch)
    assert plan.pipeline.slices == (5, 4, 3)
    placed, losses = plan.put(params), []
    for _ in range(2):
        placed, loss = step(placed, batch)
        losses.append(float(loss))
    return losses, sums(placed)


def in_four_stages(i: int) -> Any:
    return trained(ADAMW, mesh=mesh(4), microbatches=8)[:2]


def in_some_stages(i: int) -> Any:
    """A stack of three layers on three of four stages."""
    import rhino_jax as rhino

    params, batch = stacked_arrays(3)
    step = rhino.auto_shard(
        stacked_step,
        mesh=mesh(4),
        microbatches=4,
        schedule="1f1b",
        pins={"params['head']": 3},
        donate_argnums=0,
    )
    plan = step.plan(params, batch)
    at = {(leaf.stage, leaf.num_stages) for leaf in plan.inputs if leaf.num_stages > 1}
    assert at == {(0, 3)}
    placed, losses = plan.put(params), []
    for _ in range(2):
        before = placed
        placed, loss = step(placed, batch)
        assert all(x.is_deleted() for x in jax.tree.leaves(before))
        losses.append(float(loss))
    return losses, sums(placed)


def with_dropout(i: int) -> Any:
    """A PRNG key goes from group to group; each process feeds the rows that it has."""
    import rhino_jax as rhino

    def step(params: Any, batch: Any, key: Any) -> Any:
        def loss(p: Any) -> Any:
            kept = jax.random.bernoulli(key, 0.9, batch["x"].shape)
            first, second = p["layers"][:1], p["layers"][1:]
            x = through(first, batch["x"] * kept)
            x = through(second, x * kept)
            return jnp.mean((x @ p["head"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    params, batch = arrays(2)
    want = jax.jit(step)(params, batch, jax.random.key(1))
    sharded = rhino.auto_shard(step, donate_argnums=0, mesh=mesh(2))
    plan = sharded.plan(params, batch, jax.random.key(1))
    # The rows are whole on their stage; a process that has nothing gives no rows.
    has = {
        name: bool(s.addressable_devices) for name, s in plan.in_shardings[1].items()
    }
    fed = plan.put({k: x if has[k] else x[:0] for k, x in batch.items()}, local=True)
    params, loss = sharded(plan.put(params), fed, jax.random.key(1))
    return [has, float(want[1]), float(loss), sums(want[0]), sums(params)]


def groups_over_processes(i: int) -> Any:
    return trained(ADAMW, 2, mesh=mesh(2, is_first=False), microbatches=4)[:2]


def contrastive(i: int) -> Any:
    return coupled("contrastive")


def balanced_in_shared_groups(i: int) -> Any:
    """Each group has devices of all processes."""
    return coupled("balanced", is_first=False)


def coupled_arrays(name: str) -> Any:
    """Parameters with as few layers as can be partitioned, and a batch."""
    params, batch = jax.tree.map(np.asarray, arguments())
    count = 4 if name == "contrastive" else 2
    return {**params, "a": params["a"][:count], "b": params["b"][:count]}, batch


def coupled(name: str, *, is_first: bool = True) -> Any:
    """Two steps whose backward passes wait for all forward passes."""
    import rhino_jax as rhino

    params, batch = coupled_arrays(name)
    step = rhino.auto_shard(
        STEPS[name],
        donate_argnums=0,
        mesh=mesh(2, is_first=is_first),
        microbatches=4,
        schedule="gpipe",
    )
    plan = step.plan(params, batch)
    assert plan.schedule == "gpipe" and plan.pipeline.between
    params, losses = plan.put(params), []
    for _ in range(2):
        params, loss = step(params, batch)
        losses.append(float(loss))
    return losses, sums(params)


def killed_in_a_shared_group(i: int) -> Any:
    """Each group has devices of all processes."""
    return failing(i, lambda: os.kill(os.getpid(), signal.SIGKILL), is_first=False)


def killed(i: int) -> Any:
    """The last process dies in the middle of the second step."""
    return failing(i, lambda: os.kill(os.getpid(), signal.SIGKILL))


def stopped(i: int) -> Any:
    return failing(i, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def raises(i: int) -> Any:
    """A task fails once in the last process; then all go on from the same state."""

    def fail() -> None:
        raise FloatingPointError("only here")

    return failing(i, fail, again=True)


@cache
def sharded(is_first: bool) -> tuple[Any, Any, Any]:
    """A step in two stages, its plan and its arguments; compiled once."""
    import rhino_jax as rhino

    params, batch = arrays(2)
    step = rhino.auto_shard(
        step_of(SGD), donate_argnums=(0, 1), mesh=mesh(2, is_first=is_first)
    )
    state = SGD.init({})
    return step, step.plan(params, state, batch), (params, state, batch)


def failing(i: int, fail: Any, *, again: bool = False, is_first: bool = True) -> Any:
    from rhino_jax.errors import ProcessError
    from rhino_jax.passes.staged.step import TaskKind
    from rhino_jax.runtime.tasks.processes import ProcessController

    step, plan, args = sharded(is_first)
    params, state, batch = plan.put(args)
    params, state, first = step(params, state, batch)
    dispatched, count = ProcessController._dispatched, [0]

    def dispatch(self: Any, name: str, *args: Any) -> None:
        if i == jax.process_count() - 1 and name.startswith(TaskKind.BACKWARD):
            count[0] += 1
            if count[0] == 2:
                fail()
        dispatched(self, name, *args)

    patch.setattr(ProcessController, "_dispatched", dispatch)
    try:
        step(params, state, batch)
    except ProcessError as error:
        assert not any(x.is_deleted() for x in jax.tree.leaves(params))
        if not again:
            raise
        params, state, second = step(params, state, batch)
        return [str(error), float(first), float(second), sums(params)]
    return "no error"


def in_one_program(i: int) -> Any:
    """Stages that are an axis of a mesh of all processes."""
    import rhino_jax as rhino

    params, batch = stacked_arrays()
    step = rhino.auto_shard(
        stacked_step,
        mesh={"stage": jax.process_count(), "data": jax.local_device_count()},
        schedule="one-program",
        microbatches=4,
        donate_argnums=0,
    )
    losses = []
    for _ in range(2):
        params, loss = step(params, batch)
        losses.append(float(loss))
    return losses, sums(params)
