"""One of several processes of a test: `python -m tests.processes.worker I N PORT`.

Runs scenarios, functions of this and other modules, that it is sent as lines of JSON
(see `pool`), and reports on each as one line. Ends with its input.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import signal
import sys
import time
import traceback
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytest import MonkeyPatch


def train_step(params: Any, x: Any, y: Any) -> Any:
    def loss_of(p: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ p["w1"]) @ p["w2"] - y) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def arrays() -> Any:
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return rng.normal(size=shape).astype(np.float32)

    params = {"w1": draw(16, 32), "w2": draw(32, 8)}
    return params, draw(64, 16), draw(64, 8)


def shapes() -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays())


def said_of(plan: Any) -> str:
    from rhino_jax.plan.files.schema import plan_to_dict

    return json.dumps(plan_to_dict(plan), sort_keys=True)


def mesh_over_all() -> Any:
    return jax.make_mesh((jax.device_count() // 2, 2), ("data", "model"))


# Scenarios change what they wish by it: what it did is undone after each.
patch = MonkeyPatch()


def slowed(seconds: float) -> None:
    """Let this process's search take so much longer."""
    from rhino_jax.planner.search import folding

    solve_mesh_problem = folding.solve_mesh_problem

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return solve_mesh_problem(*args, **kwargs)

    patch.setattr(folding, "solve_mesh_problem", slow)


def plans(i: int) -> Any:
    """One is busy, and the clock is short: all have one plan."""
    import rhino_jax as rhino

    if i == 0:
        slowed(0.5)
    plan = rhino.plan(train_step, *shapes(), time_limit_s=0.4)
    given = rhino.plan(train_step, *shapes(), mesh=mesh_over_all(), level="fast")
    return [said_of(plan), said_of(given)]


def trains(i: int) -> Any:
    import rhino_jax as rhino

    step = rhino.auto_shard(train_step, mesh=mesh_over_all(), donate_argnums=0)
    params, x, y = arrays()
    losses = []
    for _ in range(5):
        params, loss = step(params, x, y)
        losses.append(float(loss))
    return losses


def another(i: int) -> Any:
    """The last process computes something else."""
    import rhino_jax as rhino

    is_other = i == jax.process_count() - 1

    def step(w: Any, x: Any) -> Any:
        h = x @ w
        h = jnp.sin(h) if is_other else jnp.tanh(h)
        return h.sum()

    sharded = rhino.auto_shard(step, mesh=mesh_over_all())
    return sharded(jnp.ones((16, 16)), jnp.ones((64, 16)))


def killed_while_planning(i: int) -> Any:
    """The first process of the mesh dies while it plans; it is not process 0, with
    which JAX's coordination service would die."""
    import rhino_jax as rhino
    from rhino_jax.planner import variant_search

    devices = [d for d in jax.devices() if d.process_index > 0]
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    if i == 0:
        return None
    if i == 1:
        patch.setattr(variant_search, "find", lambda *_, **__: os.kill(os.getpid(), 9))
    return said_of(rhino.plan(train_step, *shapes(), mesh=mesh))


def killed_before_planning(i: int) -> Any:
    import rhino_jax as rhino

    def step(w: Any) -> Any:
        if i == 1:
            os.kill(os.getpid(), 9)
        return w.sum()

    return said_of(rhino.plan(step, jnp.ones(16), mesh=mesh_over_all()))


def raises_while_tracing(i: int) -> Any:
    import rhino_jax as rhino

    def step(w: Any) -> Any:
        if i == 1:
            raise ValueError("only here")
        return w.sum()

    return said_of(rhino.plan(step, jnp.ones(16), mesh=mesh_over_all()))


def impossible(i: int) -> Any:
    import rhino_jax as rhino

    return said_of(
        rhino.plan(train_step, *shapes(), mesh=mesh_over_all(), memory_budget_bytes=9)
    )


def asks_for_something_else(i: int) -> Any:
    import rhino_jax as rhino

    level = "fast" if i else "best"
    return said_of(rhino.plan(train_step, *shapes(), mesh=mesh_over_all(), level=level))


def refines(i: int) -> Any:
    """Only the first process compiles candidates."""
    import rhino_jax as rhino
    from rhino_jax.verify import refine

    if i:
        patch.setattr(refine, "refine", None)
    plan = rhino.plan(train_step, *shapes(), mesh=mesh_over_all(), refine=2)
    return [len(plan.refined), said_of(plan)]


def comes_late(i: int) -> Any:
    """Slow to trace, and slow to plan, for longer than a lost process is given."""
    import rhino_jax as rhino
    from rhino_jax.runtime.processes import signs

    def step(w: Any) -> Any:
        if i == 1:
            time.sleep(2.5)
        return w.sum()

    patch.setattr(signs, "BEAT_S", 0.2)
    if i == 0:
        slowed(2.5)
    plan = rhino.plan(step, jnp.ones(16), mesh=mesh_over_all())
    return said_of(plan)


def plans_alone(i: int) -> Any:
    import rhino_jax as rhino

    if i == 1:
        return None
    return said_of(rhino.plan(train_step, *shapes(), mesh=mesh_over_all()))


def first_is_killed(i: int) -> Any:
    import rhino_jax as rhino
    from rhino_jax.planner import variant_search

    if i == 0:
        patch.setattr(variant_search, "find", lambda *_, **__: os.kill(os.getpid(), 9))
    return said_of(rhino.plan(train_step, *shapes(), mesh=mesh_over_all()))


def first_is_stopped(i: int) -> Any:
    import rhino_jax as rhino
    from rhino_jax.planner import variant_search

    if i == 0:
        stop = partial(os.kill, os.getpid(), signal.SIGSTOP)
        patch.setattr(variant_search, "find", lambda *_, **__: stop())
    return said_of(rhino.plan(train_step, *shapes(), mesh=mesh_over_all()))


def checks(i: int) -> Any:
    """Each process compares what it holds."""
    import rhino_jax as rhino

    plan = rhino.plan(train_step, *shapes(), mesh=mesh_over_all())
    found = plan.check(train_step, *arrays())
    return [found.ok, len(found.leaves), dict(found.not_compared)]


def plans_together(i: int) -> Any:
    import rhino_jax as rhino

    def evaluate(params: Any, x: Any) -> Any:
        return (jnp.tanh(x @ params["w1"]) @ params["w2"]).sum()

    params, x, y = shapes()
    programs = {"train": (train_step, (params, x, y)), "eval": (evaluate, (params, x))}
    plans = rhino.plan_together(programs, mesh=mesh_over_all())
    return [said_of(plans["train"]), said_of(plans["eval"])]


def plans_together_in_a_hurry(i: int) -> Any:
    """One is busy, the clock is short and no mesh is given: all have one layout."""
    import rhino_jax as rhino
    from rhino_jax.planner.search import together
    from rhino_jax.runtime.processes.meeting import Meeting

    search_layout, wait = together.search_layout, Meeting.wait

    def late(self: Any, key: str, *args: Any) -> bytes:
        # The machine is busy: what the first process made has been there for a while.
        time.sleep(0.5 if key == "made" else 0)
        return wait(self, key, *args)

    def differently(*args: Any, **options: Any) -> Any:
        # As the clock may: the sharding that was best by then, and another mesh.
        found = search_layout(*args, **options)
        specs = tuple(dict.fromkeys(one, ((), ())) for one in found.specs)
        axes = args[3]
        objective_s = float(len(axes)) if i else -float(len(axes))
        return dataclasses.replace(
            found, specs=specs if i else found.specs, objective_s=objective_s
        )

    patch.setattr(together, "search_layout", differently)
    patch.setattr(Meeting, "wait", late)
    params, x, y = shapes()
    programs = {
        "train": (train_step, (params, x, y)),
        "eval": (evaluate, (params, x, y)),
    }
    plans = rhino.plan_together(programs, time_limit_s=2)
    return [said_of(plan) for plan in plans.values()]


def together_with_another(i: int) -> Any:
    """The last process evaluates something else."""
    import rhino_jax as rhino

    def scored(params: Any, x: Any, y: Any) -> Any:
        loss = evaluate(params, x, y)
        return jnp.sin(loss) if i else jnp.tanh(loss)

    programs = {"train": (train_step, shapes()), "eval": (scored, shapes())}
    return len(rhino.plan_together(programs, mesh=mesh_over_all()))


def local_mesh(i: int) -> Any:
    """A mesh of this process's devices waits for nobody: the other never plans."""
    import rhino_jax as rhino

    if i == 1:
        return None
    mesh = jax.sharding.Mesh(np.array(jax.local_devices()), ("data",))
    params, x, y = arrays()
    _, loss = rhino.auto_shard(train_step, mesh=mesh)(params, x, y)
    abstract = rhino.plan(train_step, *shapes(), mesh={"a": 64}, hardware="v5e:8x8")
    return [float(loss), abstract.mesh_axes]


def kept_plans_differ(i: int) -> Any:
    """Each process has a plan of its own, and one of them another."""
    from jax.sharding import PartitionSpec as P

    import rhino_jax as rhino

    pins = {"params['w1']": P(None, "model") if i else P("model", None)}
    axes = {"data": jax.device_count() // 2, "model": 2}
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    plan = rhino.plan(train_step, *shapes(), mesh=mesh, hardware="cpu", pins=pins)
    step = plan.with_mesh(mesh_over_all()).jit(train_step)
    return float(step(*arrays())[1])


def evaluate(params: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"] - y) ** 2)


def one_state(i: int) -> Any:
    """State is made where it belongs, rows are fed by process, evaluation follows."""
    from jax.sharding import PartitionSpec as P

    import rhino_jax as rhino

    pins = {"params['w1']": P(None, "model"), "x": P("data"), "y": P("data")}
    mesh = mesh_over_all()
    step = rhino.auto_shard(train_step, mesh=mesh, pins=pins, donate_argnums=0)
    plan = step.plan(*shapes())
    seed, x, y = arrays()
    params = plan.init(lambda scale: jax.tree.map(lambda w: scale * w, seed), 1.0)
    half = slice(32 * i, 32 * (i + 1))
    x, y = plan.put({"x": x[half], "y": y[half]}, local=True).values()
    shapes_here = [s.data.shape for s in x.addressable_shards]
    losses = []
    for _ in range(5):
        params, loss = step(params, x, y)
        losses.append(float(loss))
    scored = rhino.auto_shard(evaluate, like=step)
    losses.append(float(scored(params, x, y)))
    plans = rhino.plan_together(
        {"train": (train_step, shapes()), "eval": (evaluate, shapes())}, mesh=mesh
    )
    again = plans["eval"].jit(evaluate)
    losses.append(float(again(plans["eval"].put(params), x, y)))
    return [losses, shapes_here, said_of(plans["eval"])]


def serve(i: int, n: int, port: int) -> None:
    """Run scenarios, as they come, in process i of n."""
    from rhino_jax.runtime.processes import meeting, signs

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", n, i)
    jax.devices()
    for line in sys.stdin:
        request = json.loads(line)
        module, _, name = request["scenario"].partition(".")
        for key, value in request["settings"].items():
            patch.setenv(key, value)
        # Some scenarios end where the processes have met differently often.
        signs._visits = start = 1000 * request["number"]
        meeting._numbers.clear()
        meeting._numbers.default_factory = partial(itertools.count, start)
        scenario = getattr(importlib.import_module(f"tests.processes.{module}"), name)
        started = time.monotonic()
        try:
            found: dict[str, Any] = {"result": scenario(i)}
        except Exception as error:
            traceback.print_exc()
            found = {"error": type(error).__name__, "text": str(error)}
        found["seconds"] = time.monotonic() - started
        patch.undo()
        print("FOUND " + json.dumps(found), flush=True)
    os._exit(0)  # without waiting for others, which may be lost


if __name__ == "__main__":
    # The module that scenarios import, of which there is one `patch`.
    from tests.processes import worker

    worker.serve(*map(int, sys.argv[1:]))
