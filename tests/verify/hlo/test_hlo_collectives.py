"""Programs whose collectives are known in closed form, compiled for CPU."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from rhino_jax.plan.records import Traffic, traffic_of
from tests.plan.samples import sample_plan
from tests.verify.hlo.collectives_of import read_collectives


MESHES = {
    "8": (("x", 8),),
    "2x4": (("x", 2), ("y", 4)),
    "2x2x2": (("x", 2), ("y", 2), ("z", 2)),
}
CASES = [(mesh, axis) for mesh, axes in MESHES.items() for axis in range(len(axes))]


def make_mesh(name: str):
    axes = MESHES[name]
    sizes, names = [s for _, s in axes], [n for n, _ in axes]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(axes))


def compiled_text(mesh, fn, *args) -> str:
    """HLO of `fn(constrain, *arrays)`; each argument is (shape, spec)."""

    def constrain(x, *spec):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))
        for s, spec in args
    ]
    return jax.jit(lambda *a: fn(constrain, *a)).lower(*shapes).compile().as_text()


def counted(mesh: str, fn, *args) -> dict:
    text = compiled_text(make_mesh(mesh), fn, *args)
    totals = traffic_of(read_collectives(text, MESHES[mesh]))
    return {key: (t.count, t.bytes) for key, t in totals.items()}


@pytest.mark.parametrize(("mesh", "axis"), CASES)
def test_a_sharded_contraction_is_one_all_reduce(mesh: str, axis: int) -> None:
    name, n = MESHES[mesh][axis]
    found = counted(
        mesh,
        lambda c, a, b: c(a @ b),
        ((16, 32), (None, name)),
        ((32, 64), (name, None)),
    )
    assert found == {("all-reduce", (name,)): (1, 2 * (n - 1) * 16 * 64 * 4 // n)}


@pytest.mark.parametrize(("mesh", "axis"), CASES)
def test_a_replicating_constraint_is_one_all_gather(mesh: str, axis: int) -> None:
    name, n = MESHES[mesh][axis]
    found = counted(mesh, lambda c, a: c(a * 2.0), ((32, 16), (name,)))
    assert found == {("all-gather", (name,)): (1, (n - 1) * 32 * 16 * 4 // n)}


@pytest.mark.parametrize(("mesh", "axis"), CASES)
def test_moving_the_cut_to_another_dim_is_one_all_to_all(mesh: str, axis: int) -> None:
    name, n = MESHES[mesh][axis]
    found = counted(mesh, lambda c, a: c(a, None, name), ((32, 16), (name, None)))
    local_bytes = 32 * 16 * 4 // n
    assert found == {("all-to-all", (name,)): (1, (n - 1) * local_bytes // n)}


@pytest.mark.parametrize(("mesh", "axis"), CASES)
@pytest.mark.parametrize("length", [3, 5])
def test_a_scan_counts_its_length(mesh: str, axis: int, length: int) -> None:
    name, n = MESHES[mesh][axis]

    def fn(constrain, x, ws):
        def body(x, w):
            return constrain(jnp.tanh(constrain(x, None, name) @ w)), None

        return jax.lax.scan(body, x, ws)[0]

    found = counted(mesh, fn, ((4, 32), ()), ((length, 32, 32), (None, name)))
    each = 2 * (n - 1) * 4 * 32 * 4 // n
    assert found == {("all-reduce", (name,)): (length, length * each)}


def test_nested_scans_multiply() -> None:
    def fn(constrain, x, ws):
        def inner(x, w):
            return constrain(jnp.tanh(constrain(x, None, "y") @ w)), None

        def outer(x, _):
            return jax.lax.scan(inner, x, ws)[0], None

        return jax.lax.scan(outer, x, None, length=3)[0]

    found = counted("2x4", fn, ((4, 32), ()), ((5, 32, 32), (None, "y")))
    assert found["all-reduce", ("y",)][0] == 15


def test_a_fori_loop_counts_its_trips() -> None:
    def fn(constrain, x, w):
        def body(_, x):
            return constrain(jnp.tanh(constrain(x, None, "x") @ w))

        return jax.lax.fori_loop(2, 9, body, x)

    found = counted("8", fn, ((4, 32), ()), ((32, 32), ("x", None)))
    assert found["all-reduce", ("x",)][0] == 7


def test_a_loop_that_depends_on_data_is_counted_once_and_said_so() -> None:
    def fn(constrain, x, w):
        def body(x):
            return constrain(jnp.tanh(constrain(x, None, "x") @ w))

        return jax.lax.while_loop(lambda x: x[0, 0] > 1.0, body, x)

    text = compiled_text(make_mesh("8"), fn, ((4, 32), ()), ((32, 32), ("x", None)))
    (found,) = (
        c for c in read_collectives(text, MESHES["8"]) if c.op.endswith("dot_general")
    )
    assert (found.kind, found.count) == ("all-reduce", 1)
    assert "depends on data" in found.reason


def test_of_the_branches_the_one_that_moves_most_counts() -> None:
    def fn(constrain, p, a, b):
        small = lambda a, b: constrain(jnp.zeros((16, 64)) + constrain(a[0]))  # noqa: E731
        return jax.lax.cond(p > 0, lambda a, b: constrain(a @ b), small, a, b)

    found = counted("8", fn, ((), ()), ((16, 64), (None, "x")), ((64, 64), ("x", None)))
    assert found["all-reduce", ("x",)] == (1, 2 * 7 * 16 * 64 * 4 // 8)


def test_two_axes_at_once() -> None:
    found = counted("2x2x2", lambda c, a: c(a * 2.0), ((32, 16), (("x", "z"),)))
    assert sum(b for _, b in found.values()) == 3 * 32 * 16 * 4 // 4
    assert {kind for kind, _ in found} == {"all-gather"}
    assert set().union(*(axes for _, axes in found)) == {"x", "z"}


def test_a_shifted_array_is_a_permute() -> None:
    mesh = make_mesh("2x4")

    def fn(_, a):
        def shift(a):
            return jax.lax.ppermute(a, "y", [(i, (i + 1) % 4) for i in range(4)])

        return jax.shard_map(shift, mesh=mesh, in_specs=P("y"), out_specs=P("y"))(a)

    text = compiled_text(mesh, fn, ((32, 16), ("y",)))
    (found,) = read_collectives(text, MESHES["2x4"])
    assert (found.kind, found.axes) == ("collective-permute", ("y",))
    assert found.bytes == 32 * 16 * 4 // 4


def test_a_reduce_scatter_counts_its_operand() -> None:
    mesh = make_mesh("2x4")

    def fn(_, a):
        def scatter(a):
            return jax.lax.psum_scatter(a, "y", tiled=True)

        return jax.shard_map(
            scatter, mesh=mesh, in_specs=P(), out_specs=P("y"), check_vma=False
        )(a)

    text = compiled_text(mesh, fn, ((32, 16), ()))
    (found,) = read_collectives(text, MESHES["2x4"])
    assert (found.kind, found.axes) == ("reduce-scatter", ("y",))
    assert found.bytes == 3 * 32 * 16 * 4 // 4


def test_what_stays_on_a_device_is_no_collective() -> None:
    assert counted("2x4", lambda c, a: c(a * 2.0, "x"), ((32, 16), ("x",))) == {}


def test_collectives_know_their_operation_and_line() -> None:
    text = compiled_text(
        make_mesh("8"),
        lambda c, a, b: c(a @ b),  # the line that is named
        ((16, 32), (None, "x")),
        ((32, 64), ("x", None)),
    )
    (found,) = read_collectives(text, MESHES["8"])
    assert found.op.endswith("dot_general")
    assert re.fullmatch(r"test_hlo_collectives\.py:\d+ \(.*\)", found.source)


def test_devices_in_another_order() -> None:
    devices = jax.devices()
    order = [3, 0, 7, 1, 6, 2, 5, 4]
    mesh = jax.sharding.Mesh(
        [[devices[i] for i in order[:4]], [devices[i] for i in order[4:]]], ("x", "y")
    )
    text = compiled_text(
        mesh, lambda c, a, b: c(a @ b), ((16, 32), (None, "y")), ((32, 64), ("y", None))
    )
    (found,) = read_collectives(text, MESHES["2x4"])
    assert found.axes == ("y",)


ASYNC = (Path(__file__).parent / "async.hlo").read_text()


def test_asynchronous_combined_and_fused_collectives_count_once() -> None:
    found = read_collectives(ASYNC, MESHES["2x4"])
    assert [(c.kind, c.axes, c.bytes, c.count) for c in found] == [
        ("all-gather", ("y",), 3 * 16, 1),
        ("all-reduce", ("x",), 80, 1),
        ("collective-permute", ("y",), 64, 1),
        ("reduce-scatter", ("x", "y"), 56, 1),
        ("reduce-scatter", ("y",), 24, 1),
    ]


def test_part_of_an_axis_is_told() -> None:
    found = read_collectives(ASYNC, MESHES["8"])
    assert found[0].axes == ("x",)
    assert found[0].bytes == 48
    assert found[0].reason == "over groups of 4"


def test_plans_are_counted_the_same_way() -> None:
    assert traffic_of(sample_plan().collectives) == {
        ("all-reduce", ("data",)): Traffic(2, 1536, 1.5e-3),
        ("all-gather", ("model",)): Traffic(1, 700, 0.8e-3),
    }
