"""Groups of devices of unequal size: their meshes, what they get of a step, and what is
refused."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.commands.planning import stages_of
from rhino_jax.planner.meshes import places_of


WIDTH, ROWS, LAYERS = 512, 256, 12


def train_step(params, x):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - x) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def arguments():
    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return [f32(WIDTH, WIDTH)] * LAYERS, f32(ROWS, WIDTH)


@pytest.mark.parametrize(
    ("asked", "axes", "places"),
    [
        ("auto", None, (1,)),
        ("auto", (("stage", 4), ("x", 2)), (1, 1, 1, 1)),
        (2, None, (1, 1)),
        ((4, 4), None, (1, 1)),
        ((4, 2, 2), None, (2, 1, 1)),
        ((5, 3), None, (5, 3)),
        ((4, 2, 2), (("stage", 4), ("x", 2)), (2, 1, 1)),
        ((4, 2, 2), (("stage", 8),), (4, 2, 2)),
        ((8,), None, (1,)),
    ],
    ids=str,
)
def test_groups_have_places_along_the_axis_of_the_stages(asked, axes, places):
    assert places_of(asked, axes, 8) == places


def test_a_larger_group_gets_more_layers():
    plan = rhino.plan(
        train_step,
        *arguments(),
        stages=[4, 2, 2],
        microbatches=8,
        schedule="1f1b",
        hardware="h100",
    )
    assert plan.mesh_axes == (("stage", 4), ("x", 2))
    assert [s.mesh_axes for s in plan.stages] == [
        (("stage", 2), ("x", 2)),
        (("stage", 1), ("x", 2)),
        (("stage", 1), ("x", 2)),
    ]
    assert [s.devices for s in plan.stages] == [(0, 1, 2, 3), (4, 5), (6, 7)]
    layers = [sum(leaf.stage == s for leaf in plan.inputs[:LAYERS]) for s in range(3)]
    assert layers[0] > max(layers[1:]) and sum(layers) == LAYERS
    # 12 matrices of 1 MiB and the rows, 0.5 MiB; a group has as many parts as it has
    # places along `stage`, which is 2 of 4.
    first, *rest = plan.inputs
    halved = replace(first, spec=((0,), ()), bytes_per_device=2**19)
    assert first.stage == 0
    assert "(12.5 MiB in all)" in replace(plan, inputs=(halved, *rest)).table()


@pytest.mark.parametrize(
    ("stages", "mesh", "told"),
    [
        ([4, 2], None, "4 \\+ 2 devices do not use all devices"),
        ([4, 2, 2], {"stage": 2, "x": 4}, "no parts of the mesh along `stage`"),
        ([4, 2, 2], {"x": 8}, "no parts of the mesh along `stage`"),
        (3, None, "stages=\\[3, 3, 2\\]"),
    ],
    ids=str,
)
def test_groups_that_cannot_be_are_refused(stages, mesh, told):
    with pytest.raises(rhino.StageError, match=told) as refused:
        rhino.plan(train_step, *arguments(), stages=stages, mesh=mesh)
    assert refused.value.where and refused.value.numbers and refused.value.fix


@pytest.mark.parametrize(
    ("stages", "hardware", "told", "fix"),
    [
        ([5, 3], "v5e:2x4", "5 and 3 do not divide", "stages=[4, 4]"),
        ([6, 2], "v5e:2x4", "6 does not divide", "stages=[4, 4]"),
        ([3, 3, 2], "v5e:2x4", "3 does not divide", "stages=[2, 4, 2]"),
        ([6, 6, 4], "v5e:4x4", "6 does not divide", "stages=[4, 8, 4]"),
        ([4, 3], "v5e:2x4", "4 + 3 = 7", "stages=[4, 4]"),
        ([4, 4], "h100:2x8", "4 + 4 = 8, and there are 16", "stages=[8, 8]"),
    ],
    ids=str,
)
def test_groups_that_do_not_tile_a_topology_are_told_which_do(
    stages, hardware, told, fix
):
    with pytest.raises(rhino.StageError) as refused:
        rhino.plan(train_step, *arguments(), stages=stages, hardware=hardware)
    assert told in refused.value.numbers and fix in refused.value.fix
    assert refused.value.where == "`stages=`"


def test_gpus_form_groups_of_any_size():
    axes = (("stage", 8),)
    assert places_of((5, 3), axes, 8) == (5, 3)
    with pytest.raises(rhino.StageError, match="do not tile"):
        places_of((5, 3), axes, 8, on_torus=True)


@pytest.mark.parametrize("stages", [[], [4, 0, 4], [4, "2", 2], [4.5, 3.5]], ids=str)
def test_sizes_are_whole_numbers(stages):
    with pytest.raises(rhino.RhinoError, match="stages must be"):
        rhino.plan(train_step, *arguments(), stages=stages)


def test_layers_of_one_loop_need_a_group_of_one_part():
    def step(params, x):
        def loss(params):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)
            return jnp.mean((h - x) ** 2)

        return params - 0.1 * jax.grad(loss)(params)

    _, x = arguments()
    layers = jax.ShapeDtypeStruct((8, WIDTH, WIDTH), jnp.float32)
    with pytest.raises(rhino.StageError, match="layers are in one loop") as refused:
        rhino.plan(step, layers, x, stages=[5, 3], microbatches=4, donate_argnums=0)
    assert "5 + 3" in refused.value.numbers and "params" in refused.value.where


def test_sizes_are_read_from_the_command_line():
    assert stages_of("4,2,2") == [4, 2, 2]
    assert (stages_of("auto"), stages_of("2")) == ("auto", 2)
