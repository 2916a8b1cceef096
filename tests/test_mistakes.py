"""Mistakes that users make: each is answered by an error in four parts, or by JAX's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.errors import (
    CoupledBatchError,
    HardwareError,
    InfeasiblePlanError,
    MeshError,
    MicrobatchError,
    PinError,
    PlanFileError,
    RhinoError,
    StageError,
    TraceError,
)


W, X = np.ones((64, 64), np.float32), np.ones((32, 64), np.float32)
MESH = {"x": 8}


def loss(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def step(w: Any, x: Any) -> Any:
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value


def coupled(w: Any, x: Any) -> Any:
    def worst(w: Any) -> Any:
        return jnp.max(jnp.sum((x @ w)[:, None] * (x @ w)[None], -1))

    return w - jax.grad(worst)(w)


def accumulated(kind: str) -> Callable[..., Any]:
    """A step that adds up gradients itself, of a network whose layers are in a loop."""

    def deep_loss(w: Any, x: Any) -> Any:
        y = jax.lax.scan(lambda y, w: (y + jnp.tanh(y @ w), None), x, w)[0]
        return jnp.mean((y - x) ** 2)

    def fn(w: Any, x: Any) -> Any:
        parts = x.reshape(4, -1, x.shape[1])
        gradient = jax.grad(deep_loss)
        if kind == "scan":
            total = jax.lax.scan(
                lambda total, part: (total + gradient(w, part), None), 0 * w, parts
            )[0]
        elif kind == "map":
            total = jax.lax.map(lambda part: gradient(w, part), parts).sum(0)
        elif kind == "cond":
            total = jax.lax.cond(jnp.isfinite(x).all(), gradient, lambda w, x: w, w, x)
        else:

            def add(i: Any, total: Any) -> Any:
                return total + gradient(w, jax.lax.dynamic_slice_in_dim(x, i * 8, 8))

            total = jax.lax.fori_loop(0, 4, add, 0 * w)
        return w - total

    return fn


def planned_in_stages(kind: str) -> Any:
    return plan(
        accumulated(kind), W[None].repeat(4, 0), X, hardware="h100:16", stages=2
    )


def appended(w: Any, x: Any, kept: list[Any] = []) -> Any:  # noqa: B006
    kept.append(x @ w)
    return jnp.sum(x)


def generated(w: Any, x: Any) -> Any:
    yield x @ w


async def awaited(w: Any, x: Any) -> Any:
    return x @ w


def constrained(axis: str) -> Callable[..., Any]:
    return lambda w, x: jax.lax.with_sharding_constraint(x, P(axis)) @ w


def mapped(w: Any, x: Any) -> Any:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    specs = {"in_specs": (P("x"), P()), "out_specs": P("x")}
    return jax.shard_map(lambda x, w: x @ w, mesh=mesh, **specs)(x, w)


def plan(fn: Any = step, *args: Any, **options: Any) -> Any:
    return rhino.plan(fn, *(args or (W, X)), progress=False, **options)


def run(fn: Any = step, *args: Any, **options: Any) -> Any:
    return rhino.auto_shard(fn, progress=False, **options)(*(args or (W, X)))


class Mistake(NamedTuple):
    """A call, the error that it raises, and what its text says."""

    call: Callable[[], Any]
    error: type[RhinoError]
    says: str


MISTAKES = {
    # Options.
    "an option is misspelt": Mistake(
        lambda: plan(hardwares="h100:8"), TraceError, "Did you mean 'hardware'?"
    ),
    "a level in capitals": Mistake(
        lambda: plan(mesh=MESH, level="Best"), RhinoError, "Did you mean 'best'?"
    ),
    "no level": Mistake(lambda: plan(mesh=MESH, level=None), RhinoError, "level None"),
    "a schedule in capitals": Mistake(
        lambda: plan(stages=2, schedule="1F1B"), RhinoError, "Did you mean '1f1b'?"
    ),
    "a recompute that is not known": Mistake(
        lambda: plan(mesh=MESH, recompute="all"), RhinoError, "recompute 'all'"
    ),
    "a budget in words": Mistake(
        lambda: plan(mesh=MESH, memory_budget_bytes="lots"), RhinoError, "'lots'"
    ),
    "a budget that nothing fits": Mistake(
        lambda: plan(mesh=MESH, memory_budget_bytes="1KiB"),
        InfeasiblePlanError,
        "smallest peak found",
    ),
    "like a number": Mistake(lambda: plan(like=3), RhinoError, "like="),
    "a module that is not there": Mistake(
        lambda: plan(mesh=MESH, microbatches=2, per_microbatch="BatchNrm"),
        RhinoError,
        "'BatchNrm'",
    ),
    "donated beyond the last": Mistake(
        lambda: plan(mesh=MESH, donate_argnums=5), TraceError, "no argument 5"
    ),
    "more stages than ops": Mistake(
        lambda: plan(stages=8, microbatches=4), StageError, "at most"
    ),
    "stages of gradients that a scan adds up": Mistake(
        lambda: planned_in_stages("scan"), StageError, "give `microbatches=`"
    ),
    "stages of gradients by `map`": Mistake(
        lambda: planned_in_stages("map"), StageError, "give `microbatches=`"
    ),
    "stages of gradients in a conditional": Mistake(
        lambda: planned_in_stages("cond"), StageError, "outside of it"
    ),
    # Sums over the batch are in a loop inside of the loop.
    "stages of gradients of rows by their number": Mistake(
        lambda: planned_in_stages("fori"), MicrobatchError, "give `microbatches=`"
    ),
    "rows that need one another": Mistake(
        lambda: plan(coupled, mesh=MESH, microbatches=2),
        CoupledBatchError,
        "test_mistakes.py",
    ),
    # Arguments that are no arrays.
    "the name of a model": Mistake(
        lambda: plan(step, "gpt-tiny", X, mesh=MESH), TraceError, "w is 'gpt-tiny'"
    ),
    "an object": Mistake(
        lambda: plan(step, W, object(), mesh=MESH), TraceError, "ShapeDtypeStruct("
    ),
    "a dict of words, called": Mistake(
        lambda: run(step, {"a": "b"}, X, mesh=MESH), TraceError, "w['a']"
    ),
    "a list of numbers as pins": Mistake(
        lambda: plan(mesh=MESH, pins=[1, 2]), PinError, "these are no pins"
    ),
    "a list of words as pins": Mistake(
        lambda: plan(mesh=MESH, pins=["x"]), PinError, "these are no pins"
    ),
    # Meshes and hardware.
    "hardware that is not known": Mistake(
        lambda: plan(hardware="h1oo"), HardwareError, "Did you mean 'h100'?"
    ),
    "misspelt hardware of a sweep": Mistake(
        lambda: rhino.sweep(
            step, W, X, hardware=["h100", "h1oo"], devices=[4], progress=False
        ),
        HardwareError,
        "Did you mean 'h100'?",
    ),
    "no GPUs": Mistake(lambda: plan(hardware="h100:0"), HardwareError, "got 0"),
    "a slice that is not built": Mistake(
        lambda: plan(hardware="v5e:3x5"), HardwareError, "3x5"
    ),
    "a mesh of no device": Mistake(lambda: plan(mesh={"x": 0}), MeshError, "'x': 0"),
    "a mesh without names": Mistake(lambda: plan(mesh=(2, 4)), MeshError, "tuple"),
    "devices for a mesh": Mistake(
        lambda: plan(mesh=jax.devices()), MeshError, "got list"
    ),
    "more devices than there are": Mistake(
        lambda: run(mesh={"x": 16}), MeshError, "16 devices are needed, 8 are here"
    ),
    # Pins.
    "a pin of an axis that is not there": Mistake(
        lambda: plan(mesh=MESH, pins={"x": P("y")}), PinError, "mesh={'y': …}"
    ),
    "a pin of nothing": Mistake(
        lambda: plan(mesh=MESH, pins={"z": P("x")}), PinError, "'z' matches no"
    ),
    "a pin of too many dims": Mistake(
        lambda: plan(mesh=MESH, pins={"x": P(None, None, "x")}), PinError, "3 dims"
    ),
    "a pin that does not divide": Mistake(
        lambda: plan(step, W, X[:30], mesh=MESH, pins={"x": P("x")}),
        PinError,
        "30 over",
    ),
    "a pin that is text": Mistake(
        lambda: plan(mesh=MESH, pins={"x": "x"}), PinError, "not a PartitionSpec"
    ),
    "an axis twice": Mistake(
        lambda: plan(mesh=MESH, pins={"x": P("x", "x")}), PinError, "twice"
    ),
    "a pin inside to no axis": Mistake(
        lambda: plan(lambda w, x: rhino.pin(x @ w, P("q")), mesh=MESH), PinError, "'q'"
    ),
    "a pin inside to a number": Mistake(
        lambda: plan(lambda w, x: rhino.pin(x @ w, 3), mesh=MESH), PinError, "got 3"
    ),
    "in_shardings of too many arguments": Mistake(
        lambda: plan(mesh=MESH, in_shardings=(None, P("x"), None)),
        PinError,
        "a tuple of 2",
    ),
    "out_shardings of another shape": Mistake(
        lambda: plan(mesh=MESH, out_shardings={"loss": P()}), PinError, "the result"
    ),
    "a constraint without a mesh": Mistake(
        lambda: plan(constrained("x")), MeshError, "there is no mesh"
    ),
    "a constraint to no axis": Mistake(
        lambda: plan(constrained("q"), mesh=MESH), MeshError, "test_mistakes.py"
    ),
    "a shard_map over Explicit axes": Mistake(
        lambda: plan(mapped, mesh=MESH), MeshError, "axis_types="
    ),
    "a shard_map over Explicit axes, and no mesh": Mistake(
        lambda: plan(mapped), MeshError, "mesh of the plan not given"
    ),
    # Functions and arguments.
    "no function": Mistake(lambda: rhino.auto_shard(3), RhinoError, "got int"),
    "a generator": Mistake(lambda: plan(generated), TraceError, "generator function"),
    "a coroutine": Mistake(lambda: plan(awaited), TraceError, "coroutine function"),
    "a list that grows": Mistake(lambda: plan(appended), TraceError, "would be lost"),
    "an unhashable static": Mistake(
        lambda: run(lambda w, x, n: x @ w * n[0], W, X, [2], static_argnums=2),
        TraceError,
        "`n` is no array",
    ),
    "an array for a static": Mistake(
        lambda: run(static_argnums=1), TraceError, "`x` is no array"
    ),
    # Plans.
    "a recipe in capitals": Mistake(
        lambda: plan(mesh=MESH).recipe("FSDP"), RhinoError, "Did you mean 'fsdp'?"
    ),
    "a plan of another function": Mistake(
        lambda: plan(mesh=MESH).jit(lambda w, x: step(w, jnp.sin(x)))(W, X),
        PlanFileError,
        "first op that differs is `sin` -> float32[32,64] at test_mistakes.py",
    ),
    "a plan of other shapes": Mistake(
        lambda: plan(mesh=MESH).jit(step)(W, X[:16]), PlanFileError, "float32[16,64]"
    ),
    "a file that is not there": Mistake(
        lambda: rhino.load_plan("none.json"), PlanFileError, "no such file"
    ),
    "shapes to be checked": Mistake(
        lambda: plan(mesh=MESH).check(step, jax.ShapeDtypeStruct(W.shape, W.dtype), X),
        TraceError,
        "plan.verify takes shapes",
    ),
    "a value that is not there": Mistake(
        lambda: plan(mesh=MESH).why("nope"), PinError, "'nope'"
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_an_error_in_four_parts(name: str) -> None:
    mistake = MISTAKES[name]
    with pytest.raises(mistake.error) as caught:
        mistake.call()
    error = caught.value
    assert mistake.says in str(error)
    assert error.what and error.fix and (error.where or error.numbers)


def test_an_array_that_was_donated_is_named() -> None:
    sharded = rhino.auto_shard(step, mesh=MESH, donate_argnums=0, progress=False)
    w = jnp.asarray(W)
    sharded(w, X)
    with pytest.raises(TraceError, match="deleted arrays: `w`"):
        sharded(w, X)


def test_shardings_as_those_of_jit_are_pins() -> None:
    specs = {"w": P(None, "x"), "b": None}

    def fn(params: Any, x: Any, power: int) -> Any:
        return {"loss": jnp.sum((x @ params["w"] + params["b"]) ** power)}, x

    found = plan(
        fn,
        {"w": W, "b": W[0]},
        X,
        2,
        mesh=MESH,
        static_argnums=2,
        in_shardings=(specs, P("x")),
        out_shardings=(None, P()),
        pins={"x": P(None, "x")},
    )
    laid = {leaf.path: leaf.spec for leaf in (*found.inputs, *found.outputs)}
    assert laid["params['w']"] == ((), (0,))
    assert laid["x"] == ((), (0,))  # pins hold before shardings
    assert laid["out[1]"] == ((), ())


@pytest.mark.parametrize(
    ("written", "name"),
    [("v5litepod-8", "v5e:8"), ("v6e-4", "v6e:4"), ("V5P-128", "v5p:64")],
)
def test_accelerator_types_are_hardware(written: str, name: str) -> None:
    found, expected = rhino.load_target(written), rhino.load_target(name)
    assert found.tiers == expected.tiers and found.num_devices == expected.num_devices


def test_words_that_a_function_does_not_compute_with_are_taken() -> None:
    made = plan(
        lambda w, kind: 2 * w if kind == "double" else w, W, "double", mesh=MESH
    )
    assert made.in_specs[1] is None
