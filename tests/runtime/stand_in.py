"""A planner for tests: decisions at random, so that any plan is put to the test."""

from __future__ import annotations

import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from rhino_jax.explain.plan import Plan
from rhino_jax.frontend.parameters import read_parameters
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program, Region
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.plan import Leaf
from rhino_jax.plan.records import Coverage, Predicted, SearchReport
from rhino_jax.plan.stages import StagePlan
from rhino_jax.runtime.meshes import axes_of_mesh
from rhino_jax.runtime.sharded import ShardedFunction, with_trees


SIZES = (2, 4)
NAMES = ("x", "y")


def mesh_of(kind: AxisType = AxisType.Auto, sizes: tuple[int, int] = SIZES) -> Mesh:
    return jax.make_mesh(sizes, NAMES, axis_types=(kind,) * len(SIZES))


def random_spec(shape: tuple[int, ...], rng: random.Random) -> Spec:
    """Some spec that divides."""
    dims: list[list[int]] = [[] for _ in shape]
    axes = list(range(len(SIZES)))
    rng.shuffle(axes)
    for axis in axes:
        dim = rng.randrange(len(shape) + 1)
        if dim < len(shape):
            cut = math.prod(SIZES[a] for a in dims[dim]) * SIZES[axis]
            if shape[dim] % cut == 0:
                dims[dim].append(axis)
    return tuple(map(tuple, dims))


def random_decisions(program: Program, seed: int) -> Decisions:
    """A spec for every value, for many uses, and for what leaves regions."""
    rng = random.Random(seed)
    values = {
        v.id: random_spec(v.shape, rng)
        for v in program.values
        if v.shape and not v.is_literal
    }

    def spec_of(value: int) -> Spec:
        return random_spec(program.values[value].shape, rng)

    operands, region_outputs = {}, {}
    for op in program.ops:
        for i, value in enumerate(op.operands):
            if value in values and rng.random() < 0.3:
                operands[op.id, i] = spec_of(value)
        regions: tuple[Region, ...] = op.call.regions if op.call else ()
        for r, region in enumerate(regions):
            for i, value in enumerate(region.outputs):
                if value in values and rng.random() < 0.3:
                    region_outputs[op.id, r, i] = spec_of(value)
    outputs = []
    for out in program.outputs:
        value = (
            out.value if out.state_of is None else program.inputs[out.state_of].value
        )
        outputs.append(
            values[value]
            if out.state_of is not None and value in values
            else spec_of(value)
        )
    return Decisions(values, operands, region_outputs, tuple(outputs))


def plan_of(traced: Traced, mesh: Any, decisions: Decisions) -> Plan:
    program = traced.program

    def leaf(entry: Any, spec: Spec | None) -> Leaf:
        value = program.values[entry.value]
        spec = ((),) * value.rank if spec is None else spec
        return Leaf(entry.path, value.shape, value.dtype, spec, value.bytes)

    plan = Plan(
        program_name=program.name,
        fingerprint=fingerprint(program, axes_of_mesh(mesh)),
        mesh_axes=axes_of_mesh(mesh),
        hardware="cpu",
        inputs=tuple(leaf(e, decisions.values.get(e.value)) for e in program.inputs),
        outputs=tuple(
            leaf(e, s) for e, s in zip(program.outputs, decisions.outputs, strict=True)
        ),
        stages=(
            StagePlan(
                mesh_axes=axes_of_mesh(mesh),
                devices=tuple(range(mesh.size)),
                decisions=decisions,
                predicted=Predicted(0.0, 0.0, 0.0, 0, 0.0),
            ),
        ),
        predicted=Predicted(0.0, 0.0, 0.0, 0, 0.0),
        collectives=(),
        search=SearchReport("pinned", 0.0, 0.0, 0.0, 0.0, 0),
        coverage=Coverage(1.0, 1.0, 1.0),
        recipes={},
        memory_budget_bytes=0,
    )
    return with_trees(plan, traced, mesh)


def shard(
    fn: Any, *, mesh: Any = None, seed: int = 0, **options: Any
) -> ShardedFunction:
    """`fn` under random plans; counts them in `.count`."""

    def planner(traced: Traced, mesh: Any, before: Plan | None) -> Plan:
        sharded.count += 1
        return plan_of(traced, mesh, random_decisions(traced.program, seed))

    parameters = read_parameters(fn, **options)
    sharded = ShardedFunction(
        parameters, planner, mesh_of() if mesh is None else mesh, "`shard`"
    )
    sharded.count = 0
    return sharded


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def assert_close(got: Any, want: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    """Equal trees; float32, so sums in another order differ a little."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not hasattr(b, "dtype"):
            assert a == b
            continue
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=rtol, atol=atol)
