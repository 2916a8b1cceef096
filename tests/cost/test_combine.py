"""How partial sums are combined."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rhino_jax.cost.combine import combine_route, combine_steps
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import lay_out
from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy
from rhino_jax.hardware.mesh import LaidMesh
from rhino_jax.ir.collectives import ALL_REDUCE, REDUCE_SCATTER
from rhino_jax.ir.traits import OpKind


GPU = lay_out(load_target("h100:2x8"), [("data", 2), ("model", 8)])
TPU = lay_out(load_target("v5e:4x4"), [("data", 4), ("model", 4)])
WHOLE = ((), ())
BY_AXIS = LoweringPolicy(scatters_by_axis=True)


@pytest.mark.parametrize(
    ("done", "mesh", "steps", "route"),
    [
        (((), ()), GPU, [(ALL_REDUCE, (0, 1))], ()),
        (((0, 1), ()), GPU, [(REDUCE_SCATTER, (0, 1))], ()),
        # Fast links first, while the value is large.
        (((0,), (1,)), GPU, [(REDUCE_SCATTER, (1,)), (REDUCE_SCATTER, (0,))],
         (((), (1,)),)),
        (((0,), ()), GPU, [(REDUCE_SCATTER, (0,)), (ALL_REDUCE, (1,))], ()),
        (((0, 1), ()), TPU, [(REDUCE_SCATTER, (0,)), (REDUCE_SCATTER, (1,))],
         (((0,), ()),)),
    ],
)  # fmt: skip
def test_partial_sums_over_two_axes(
    done: tuple, mesh: LaidMesh, steps: list, route: tuple
) -> None:
    found = combine_steps(WHOLE, done, (0, 1), 1024.0, mesh)
    assert [(s.kind, s.axes) for s in found] == steps
    assert combine_route(WHOLE, done, mesh.lowering) == route


def test_every_scatter_leaves_less_to_the_next() -> None:
    first, second = combine_steps(WHOLE, ((0,), (1,)), (0, 1), 1024.0, GPU)
    assert (first.local_bytes, second.local_bytes) == (1024.0, 128.0)


def test_one_axis_over_a_whole_slice_is_all_reduced_on_tpu() -> None:
    done = ((0,), ())
    for topology, size, kind in (
        ("v5e:4x4", 16, ALL_REDUCE),
        ("v5e:2x4", 8, REDUCE_SCATTER),
        ("v5p:2x2x2", 8, ALL_REDUCE),
    ):
        mesh = lay_out(load_target(topology), [("data", size)])
        (step,) = combine_steps(WHOLE, done, (0,), 1024.0, mesh)
        assert step.kind == kind


def test_told_only_the_end_compilers_all_reduce_the_whole() -> None:
    done = ((0,), (1,))
    torus = lay_out(load_target("v5p:4x4x4"), [("data", 16), ("model", 4)])
    for mesh in (GPU, torus):
        told_less = replace(mesh, lowering=mesh.lowering.without_waypoints())
        (step,) = combine_steps(WHOLE, done, (0, 1), 1024.0, told_less)
        assert (step.kind, step.axes, step.local_bytes) == (ALL_REDUCE, (0, 1), 1024.0)
        (step,) = combine_steps(WHOLE, ((0,), ()), (0,), 1024.0, told_less)
        assert step.kind == REDUCE_SCATTER
    kinds = {
        s.kind
        for s in combine_steps(
            WHOLE,
            done,
            (0, 1),
            1024.0,
            replace(TPU, lowering=TPU.lowering.without_waypoints()),
        )
    }
    assert kinds == {REDUCE_SCATTER}


def test_some_compilers_are_told_where_partial_sums_are_made() -> None:
    done = ((0,), ())
    conv = OpKind.CONVOLUTION
    assert combine_route(WHOLE, done, BY_AXIS, conv) == (WHOLE,)
    assert combine_route(WHOLE, done, AS_WRITTEN, conv) == ()
    assert combine_route(WHOLE, WHOLE, BY_AXIS, conv) == ()
    both = combine_route(WHOLE, ((0, 1), ()), BY_AXIS, conv)
    assert both == (WHOLE, ((0,), ()))
    assert combine_route(WHOLE, done, AS_WRITTEN, OpKind.LOOKUP) == (WHOLE,)


def test_vectors_are_all_reduced_on_tpu() -> None:
    for mesh, kind in ((TPU, ALL_REDUCE), (GPU, REDUCE_SCATTER)):
        (step,) = combine_steps(((),), ((1,),), (1,), 1024.0, mesh)
        assert step.kind == kind
