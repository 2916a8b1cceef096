"""`shard_map` over the plan's own mesh: held as its specs say, priced per device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import rhino_jax as rhino
from tests.runtime.stand_in import assert_close, normal


MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def product(x: Any, w: Any) -> Any:
    """Rows over "data", the contracted dim over "model", summed by hand."""
    return jax.shard_map(
        lambda x, w: jax.lax.psum(x @ w, "model"),
        mesh=MESH,
        in_specs=(P("data", "model"), P("model", None)),
        out_specs=P("data", None),
    )(x, w)


def gradients(x: Any, w: Any) -> Any:
    return jax.grad(lambda x, w: (product(x, w) ** 2).sum(), argnums=(0, 1))(x, w)


def looped(x: Any, w: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        return product(c, w) @ w.T * 0.01, None

    return jax.grad(lambda x: jax.lax.scan(body, x, None, 3)[0].sum())(x)


def ring(x: Any) -> Any:
    def body(c: Any, _: Any) -> Any:
        c = lax.ppermute(c, "data", [(i, (i + 1) % 4) for i in range(4)])
        return c, c.sum()

    rotated, sums = lax.scan(body, x, None, 3)
    return rotated * sums.sum()


def either(x: Any) -> Any:
    """Sends in one branch, and more in the other."""
    return lax.cond(
        lax.psum(x.sum(), ("data", "model")) > 0,
        lambda: lax.all_gather(x, "data", tiled=True),
        lambda: jnp.tile(lax.psum(x, "data"), (4, 1)),
    )


ROWS, BOTH = P("data", None), P("data", "model")
BODIES: dict[str, tuple[Any, Any, Any]] = {
    "psum": (lambda x: lax.psum(x @ x.T, "model"), BOTH, ROWS),
    "psum over both": (lambda x: lax.psum(x * 2, ("data", "model")), BOTH, P()),
    "pmax": (lambda x: x / lax.pmax(lax.stop_gradient(x), "model"), BOTH, BOTH),
    "pmean": (lambda x: x - lax.pmean(x, "data"), BOTH, BOTH),
    "gather": (lambda x: lax.all_gather(x, "data", tiled=True), BOTH, P(None, "model")),
    "scatter": (
        lambda x: lax.psum_scatter(x, "model", tiled=True), ROWS, P(("data", "model")),
    ),
    "all to all": (
        lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), ROWS, P(None, "data"),
    ),
    "permute in a loop": (ring, BOTH, BOTH),
    "two in turn": (
        lambda x: lax.psum(jnp.sin(lax.psum(x, "model")) * x, "data"), BOTH,
        P(None, "model"),
    ),
}  # fmt: skip


def by_hand(name: str) -> Any:
    body, ins, outs = BODIES[name]
    return jax.shard_map(body, mesh=MESH, in_specs=ins, out_specs=outs, check_vma=False)


def differentiated(name: str) -> Any:
    return lambda x: jax.grad(lambda x: (by_hand(name)(x) ** 2).sum())(x)


@pytest.mark.parametrize("how", [by_hand, differentiated])
@pytest.mark.parametrize("name", BODIES)
def test_what_it_sends_is_planned_as_it_is_compiled(name: str, how: Any) -> None:
    fn, x = how(name), jnp.ones((128, 128))
    plan = rhino.plan(fn, x, mesh=MESH, hardware="v5e:2x4", progress=False)
    assert plan.collectives and not plan.notes
    assert all(
        c.seconds > 0 and "test_by_hand.py" in c.source for c in plan.collectives
    )
    found = plan.verify(fn, x, compile_for="cpu")
    assert found.ok and not found.differences

    def sent(collectives: Any) -> Any:
        found: Counter[Any] = Counter()
        for c in collectives:
            found[c.kind, c.axes, c.source] += c.bytes
        return found

    assert sent(plan.collectives) == sent(found.collectives)


def test_of_two_branches_the_heavier_is_planned() -> None:
    fn = jax.shard_map(
        either, mesh=MESH, in_specs=BOTH, out_specs=P(None, "model"), check_vma=False
    )
    plan = rhino.plan(fn, jnp.ones((128, 128)), mesh=MESH, progress=False)
    sent = {c.kind: c.bytes for c in plan.collectives}
    # A gather of 4 shards against an all-reduce of one, which sends twice 3/4 of it.
    assert sent == {"all-gather": 3 * 32 * 64 * 4, "all-reduce": round(2 * 7 / 8 * 4)}


def test_what_no_shape_says_is_told() -> None:
    def body(x: Any) -> Any:
        return lax.while_loop(
            lambda c: c.sum() > 0, lambda c: lax.psum(c, "model") - 1, x
        )

    def by_groups(x: Any) -> Any:
        return lax.psum(x, "data", axis_index_groups=[[0, 1], [2, 3]])

    for fn in (body, by_groups):
        mapped = jax.shard_map(
            fn, mesh=MESH, in_specs=BOTH, out_specs=BOTH, check_vma=False
        )
        x = jnp.ones((16, 16))
        plan = rhino.plan(lambda x: mapped(x), x, mesh=MESH, progress=False)  # noqa: B023
        (note,) = plan.notes
        assert "not all that shard_map" in note and "test_by_hand.py" in note
        assert not plan.collectives


def test_a_choice_beside_it_pays_for_what_it_sends() -> None:
    def times(count: int) -> float:
        def body(x: Any) -> Any:
            once = lambda c, _: (lax.psum(c, "model"), None)  # noqa: E731
            return lax.scan(once, x, None, count)[0]

        fn = jax.shard_map(
            body, mesh=MESH, in_specs=ROWS, out_specs=ROWS, check_vma=False
        )
        x = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
        plan = rhino.plan(fn, x, mesh=MESH, hardware="v5e:2x4", progress=False)
        (sent,) = plan.collectives
        assert sent.count == count
        return plan.predicted.communication_s

    assert times(4) == pytest.approx(2 * times(2))


def args() -> tuple[Any, Any]:
    return normal(0, 64, 32), normal(1, 32, 16)


@pytest.mark.parametrize("mesh", [MESH, {"data": 4, "model": 2}, None])
def test_specs_are_the_rule(mesh: Any) -> None:
    step = rhino.auto_shard(product, mesh=mesh, progress=False)
    plan = step.plan(*args())
    assert plan.mesh_axes == (("data", 4), ("model", 2))
    assert plan.in_specs == (P("data", "model"), P("model"))
    assert plan.out_specs == P("data")
    assert plan.predicted.flops_per_device == 2 * 64 * 32 * 16 / 8
    assert plan.coverage.ops == 1
    assert not plan.notes
    (sent,) = plan.collectives
    assert (sent.kind, sent.axes, sent.count) == ("all-reduce", ("model",), 1)
    assert sent.bytes == 64 // 4 * 16 * 4 and "test_by_hand.py" in sent.source
    assert_close(step(*args()), product(*args()))


@pytest.mark.parametrize("fn", [gradients, looped])
def test_gradients_and_loops_equal_one_device(fn: Any) -> None:
    want = jax.jit(fn)(*args())
    for pins in ({}, {"x": P(None, "data"), "w": P("data")}):
        step = rhino.auto_shard(fn, mesh=MESH, progress=False, pins=pins)
        assert_close(step(*args()), want)


def test_as_many_results_as_operands_are_not_those() -> None:
    def fn(x: Any, w: Any) -> Any:
        return jax.shard_map(
            lambda x, w: (x @ w, w * 2), mesh=MESH,
            in_specs=(P("data", None), P()), out_specs=(P("data", None), P()),
        )(x, w)  # fmt: skip

    plan = rhino.plan(fn, *args(), mesh=MESH, progress=False)
    assert plan.in_specs == (P("data"), P()) and plan.out_specs == (P("data"), P())
    # "model" does the same twice, and so does all of it with `w`.
    assert plan.predicted.flops_per_device == 2 * 64 * 32 * 16 / 4 + 32 * 16


def test_two_ways_of_one_shape_are_told_apart() -> None:
    def both(x: Any) -> Any:
        def by(spec: Any) -> Any:
            return jax.shard_map(
                jnp.sin, mesh=MESH, in_specs=spec, out_specs=spec
            )(x)  # fmt: skip

        return by(P("data")), by(P(None, "model"))

    plan = rhino.plan(both, normal(0, 16, 16), mesh=MESH, progress=False)
    assert plan.out_specs == (P("data"), P(None, "model"))


def test_axes_that_it_leaves_free() -> None:
    def fn(x: Any) -> Any:
        return jax.shard_map(
            lambda x: x * 2, mesh=MESH, in_specs=P("data"), out_specs=P("data"),
            axis_names={"data"},
        )(x)  # fmt: skip

    step = rhino.auto_shard(fn, mesh=MESH, progress=False)
    assert_close(step(normal(0, 16, 16)), 2 * normal(0, 16, 16))


def test_over_another_mesh_it_is_opaque_and_said_so() -> None:
    with pytest.warns(rhino.RhinoWarning):
        plan = rhino.plan(product, *args(), mesh={"a": 4, "b": 2}, progress=False)
    assert plan.in_specs == (P(), P())
    (note,) = [n for n in plan.notes if "shard_map" in n]
    assert "over another mesh (data=4, model=2)" in note and "test_by_hand.py" in note
