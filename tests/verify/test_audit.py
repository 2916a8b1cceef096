"""Hand-sharded programs: what they move, which line is to blame, what rhino gains."""

from __future__ import annotations

import inspect
import math
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import rhino_jax as rhino
from rhino_jax.models import registry
from rhino_jax.verify.hlo.records import OutOfMemory
from rhino_jax.verify.results.audit import Audit
from tests.verify.audited import (
    BATCH,
    DIM,
    F32,
    HIDDEN,
    MESH,
    audit,
    mlp_args,
    mlp_step,
    moved,
    pin,
    shape,
)
from tests.verify.extras import skipped_without_extra


def test_data_parallel_moves_both_gradients_once() -> None:
    axes = P(("data", "model"))
    found = audit(mlp_step, *mlp_args(P(), P(), axes), donate_argnums=0)
    whole = ("data", "model")
    gradients = 2 * DIM * HIDDEN * F32
    loss = 4
    assert moved(found) == {
        ("all-reduce", whole): round(2 * 7 / 8 * (gradients + loss))
    }
    assert found.compiled is not None and found.memory is not None
    assert found.compiled.flops_per_device == pytest.approx(
        5 * 2 * BATCH / 8 * DIM * HIDDEN, rel=0.05
    )
    # What is donated is held once.
    assert found.memory.alias_bytes == gradients
    # A few rows on eight devices: keeping the weights where they are is far cheaper.
    assert found.gain is not None and found.gain > 1.5
    assert found.rhino is not None and found.rhino.ok


@cache
def megatron(**options: Any) -> Audit:
    """Return the audit of the MLP that Megatron's recipe shards."""
    args = mlp_args(P(None, "model"), P("model"), P("data"))
    return audit(mlp_step, *args, **options)


def test_megatron_sums_what_its_second_matmul_leaves_partial() -> None:
    found = megatron()
    by_kind = moved(found)
    activations = BATCH // 2 * DIM * F32
    assert by_kind["all-reduce", ("model",)] == round(2 * 3 / 4 * activations)
    gradients = 2 * DIM * HIDDEN // 4 * F32
    assert by_kind["all-reduce", ("data",)] == pytest.approx(
        2 * 1 / 2 * gradients, rel=1e-3
    )
    assert not any(kind == "all-gather" for kind, _ in by_kind)
    line = "jnp.mean((h @ p"
    source = f"audited.py:{line_of(mlp_step, line)} (loss)"
    (cost,) = [c for c in found.costs if ("all-reduce", ("model",)) in dict(c.moves)]
    assert cost.source == source
    assert any("partial sums" in why for why in cost.why)


def line_of(fn: Any, text: str) -> int:
    lines, first = inspect.getsourcelines(fn)
    (at,) = [i for i, line in enumerate(lines) if text in line]
    return first + at


def needless(params: Any, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params["w1"])
    h = jnp.sin(h)
    h = pin(h, "data")
    h = jnp.cos(h)
    return jnp.sum(h @ params["w2"])


def test_a_needless_gather_is_laid_to_the_line_that_asks_for_it() -> None:
    """Megatron's hidden activations, pinned whole over the model axis."""
    params, data = mlp_args(P(None, "model"), P("model"), P("data"))
    found = audit(needless, params, data["x"])
    gathered = [c for c in found.collectives if c.kind == "all-gather"]
    assert gathered and {c.axes for c in gathered} == {("model",)}
    said = " ".join(found.costs[0].why)
    line = line_of(needless, "pin(")
    assert f"from test_audit.py:{line} (needless) asks for it" in said
    assert found.gain is not None and found.gain > 1
    assert found.rhino is not None
    assert all(c.bytes < gathered[0].bytes for c in found.rhino.collectives)


def test_without_the_pin_that_line_is_not_blamed() -> None:
    params, data = mlp_args(P(None, "model"), P("model"), P("data"))

    def free(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ params["w1"]) @ params["w2"])

    found = audit(free, params, data["x"])
    assert not any("constraint" in why for c in found.costs for why in c.why)


def deep(params: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: jax.Array) -> Any:
        return jnp.tanh(h @ w), None

    return jnp.sum(jax.lax.scan(layer, x, params)[0])


def test_fsdp_in_a_scan_gathers_every_layer_and_names_the_weights() -> None:
    """Weights over the batch's axis, nothing said about activations."""
    params = shape(6, DIM, DIM, spec=P(None, None, "model"))
    found = audit(deep, params, shape(BATCH * 64, DIM, spec=P("model")))
    assert found.costs
    runs = max(c.count for c in found.collectives)
    assert runs == 6
    said = " ".join(why for c in found.costs for why in c.why)
    assert "`params` is sharded over model" in said
    assert "6 times a step" in said


def test_an_involuntary_rematerialisation_is_named_where_it_is_asked_for() -> None:
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)

    def reordered(x: jax.Array) -> jax.Array:
        flat = NamedSharding(mesh, P(("a", "b", "c")))
        x = jax.lax.with_sharding_constraint(jnp.sin(x), flat)
        y = jnp.cos(x).reshape(8, 8, 64)
        other = NamedSharding(mesh, P(None, ("b", "a"), "c"))
        return jnp.sum(jnp.sin(jax.lax.with_sharding_constraint(y, other)))

    found = audit(reordered, shape(64, 64, spec=P(), mesh=mesh))
    assert len(found.rematerialised) == 1
    line = f"test_audit.py:{line_of(reordered, 'reshape(8')}"
    (cost,) = [c for c in found.costs if c.source.startswith(line)]
    assert any("involuntary full rematerialisation" in why for why in cost.why)
    assert "rematerialised involuntarily: 1" in found.table()
    assert found.rhino is not None and found.rhino.rematerialised == ()


def test_uneven_dims_are_audited() -> None:
    def uneven(w: jax.Array, x: jax.Array) -> jax.Array:
        h = jax.lax.with_sharding_constraint(
            x @ w, NamedSharding(MESH, P("data", "model"))
        )
        return jnp.sum(h**2)

    found = audit(uneven, shape(16, 18, spec=P()), shape(8, 16, spec=P("data")))
    assert found.compiled is not None
    # 18 columns over 4 devices: 5 each, the last 3.
    assert any("model" in axes for _, axes in moved(found))
    assert found.rhino is not None and found.rhino.ok


def test_a_jit_object_is_compiled_with_its_own_shardings_and_donation() -> None:
    params, data = mlp_args(P(None, "model"), P("model"), P("data"))
    shardings = jax.tree.map(lambda x: x.sharding, (params, data))
    jitted = jax.jit(mlp_step, in_shardings=shardings, donate_argnums=0)
    bare = jax.tree.map(lambda x: shape(*x.shape), (params, data))
    found = audit(jitted, *bare)
    named = megatron(donate_argnums=0)
    assert moved(found) == moved(named)
    assert found.memory == named.memory


def test_arrays_are_audited_without_running() -> None:
    args = jax.tree.map(
        lambda x: jax.device_put(jnp.ones(x.shape), x.sharding),
        mlp_args(P(None, "model"), P("model"), P("data")),
    )
    found = audit(mlp_step, *args, donate_argnums=0)
    assert moved(found) == moved(megatron())
    assert not any(x.is_deleted() for x in jax.tree.leaves(args))


def test_shard_map_is_kept_and_said_so() -> None:
    def summed(x: jax.Array) -> jax.Array:
        def body(x: jax.Array) -> jax.Array:
            return jax.lax.psum(x, "data")

        spec = P("data")
        return jax.shard_map(body, mesh=MESH, in_specs=spec, out_specs=P())(x)

    found = audit(summed, shape(16, 32, spec=P("data")))
    assert moved(found) == {("all-reduce", ("data",)): 8 * 32 * F32}
    assert any("shard_map" in note for note in found.notes)
    assert found.rhino is not None and found.rhino.ok
    assert not found.rhino.differences  # what it sends itself is planned, too


def test_a_program_that_fits_nowhere_is_a_result() -> None:
    found = audit(
        mlp_step, *mlp_args(P(), P(), P("data")), memory_budget_bytes=100 * 1024
    )
    assert found.compiled is not None and found.compiled.peak_bytes > 100 * 1024
    assert found.plan is None and found.rhino is None and found.gain is None
    assert any("no plan that fits" in note for note in found.notes)
    assert "over the budget" in found.table()


def test_gain_where_one_side_does_not_fit() -> None:
    found = megatron()
    out = OutOfMemory(needed_bytes=2**35, available_bytes=2**34, message="HbmOom")
    theirs = replace(found, compiled=None, out_of_memory=out, costs=(), collectives=())
    assert theirs.gain == math.inf
    assert "out of memory" in str(theirs) and "32.0 GiB" in theirs.table()
    assert found.rhino is not None
    ours = replace(found, rhino=replace(found.rhino, compiled=None))
    assert ours.gain == 0.0 and "rhino's does not fit" in str(ours)
    assert replace(theirs, rhino=None).gain is None


def test_tables_lines_and_html() -> None:
    params, data = mlp_args(P(None, "model"), P("model"), P("data"))
    found = audit(needless, params, data["x"])
    assert str(found).count("\n") == 0 and "gain with rhino" in str(found)
    text = found.table(full=True)
    assert all(len(line) <= 100 for line in text.splitlines())
    for word in ("which lines cost most", "why", "rhino's plan", "memory"):
        assert word in text
    html = found._repr_html_()
    assert html.startswith('<div class="rhino-report">') and "http" not in html


@pytest.mark.slow
def test_a_scanned_gpt_over_data_alone_is_audited() -> None:
    work = registry.get("gpt-tiny")
    *state, batch = work.abstract_args()
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(MESH, P())
        ),
        state,
    )
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(MESH, P("data"))
        ),
        batch,
    )
    found = audit(work.step, *state, batch, donate_argnums=work.donate_argnums)
    assert {k for k, _ in moved(found)} == {"all-reduce"}
    assert {a for _, a in moved(found)} == {("data",)}
    assert found.gain is not None and found.gain > 0.95


@pytest.mark.compile_only
@pytest.mark.parametrize("hardware", ["v5e:2x4", "h100:8"])
def test_compile_only_meshes_are_audited(hardware: str) -> None:
    with skipped_without_extra():
        mesh = rhino.compile_target(hardware, {"data": 2, "model": 4})

    def pinned(params: Any, x: jax.Array) -> jax.Array:
        h = jnp.tanh(x @ params["w1"])
        h = jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("data")))
        return jnp.sum(h @ params["w2"])

    specs = {"w1": P(None, "model"), "w2": P("model")}
    params = {
        name: shape(4096, 4096, spec=spec, mesh=mesh) for name, spec in specs.items()
    }
    found = audit(pinned, params, shape(2048, 4096, spec=P("data"), mesh=mesh))
    assert found.hardware.partition(":")[0] == hardware.partition(":")[0]
    assert found.compiled is not None and found.gain is not None and found.gain > 1
    said = " ".join(why for c in found.costs for why in c.why)
    assert f"test_audit.py:{line_of(pinned, 'with_sharding_constraint')}" in said
