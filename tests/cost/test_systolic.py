"""What products take on systolic arrays: by hand, and by XLA:TPU's estimates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax.cost.compute import array_paddings
from rhino_jax.hardware.files import load_target
from rhino_jax.ir.factor import Rule, parse_rule
from rhino_jax.verify.hlo.module import parse_module
from rhino_jax.verify.hlo.work import WorkReader
from tests.frontend.imported import program_of
from tests.verify.extras import mesh_of_target


def dot(rows: int, summed: int, columns: int, batch: int = 1) -> Rule:
    return parse_rule(
        "b m k, b k n -> b m n",
        [(batch, rows, summed), (batch, summed, columns)],
        [(batch, rows, columns)],
    )


def conv(batch: int, width: int, taps: int, channels: int, features: int) -> Rule:
    return parse_rule(
        "n y~ i, t! i o -> n y~ o",
        [(batch, width, channels), (taps, channels, features)],
        [(batch, width, features)],
        halos={"y": (1, 1)},
    )


def whole(rule: Rule, side: int = 128, exchanged: float = 0.0) -> float:
    pieces = np.ones((1, len(rule.factors)), int)
    (padding,) = array_paddings(rule, pieces, side, exchanged)
    return float(padding)


@pytest.mark.parametrize(
    ("rule", "times"),
    [
        (dot(4096, 4096, 4096), 1),
        (dot(4096, 64, 4096, batch=8), 2),
        # Few rows stream past many columns, whichever operand they are of.
        (dot(64, 4096, 4096), 1),
        (dot(4096, 4096, 64), 1),
        (dot(8, 4096, 4096), 0.4 * 128 / 8),
        (dot(4096, 4096, 8), 0.4 * 128 / 8),
        # Two vectors, and a product that sums nothing, are for the vector units.
        (dot(1, 4096, 1, batch=64), 1),
        (dot(64, 1, 64, batch=4096), 1),
        # Of one window dim taps are summed with the channels, and positions are rows.
        (conv(8, 256, 4, 64, 16), 8),
        (conv(8, 256, 4, 16, 128), 2),
        # The batch in the array, and 64 features streaming past.
        (conv(128, 256, 4, 64, 64), 1),
    ],
)
def test_by_hand(rule: Rule, times: float) -> None:
    assert whole(rule) == pytest.approx(times)
    assert whole(rule, side=0) == 1


def test_dims_of_a_window_but_the_last_are_products_of_their_own() -> None:
    sizes = [(8, 64, 64, 64), (3, 3, 64, 64)], [(8, 64, 64, 64)]
    halos = {"y": (1, 1), "x": (1, 1)}
    rule = parse_rule("n y~ x~ i, t! u! i o -> n y~ x~ o", *sizes, halos=halos)
    assert whole(rule) == pytest.approx(2 * 256 / (3 * 64))


def test_positions_of_a_kernel_are_products_of_their_own() -> None:
    rule = parse_rule(
        "n t~ i, o t~ i -> y! n o",
        [(16, 4096, 32), (32, 4096, 32)],
        [(3, 16, 32)],
        halos={"t": (1, 1)},
        reducers={"t": "sum"},
    )
    assert whole(rule) == pytest.approx(min(4 * 0.4 * 128 / 16, 8 * 0.4 * 128 / 32))


def test_an_image_smaller_than_its_kernel_exchanges_roles_with_it() -> None:
    fn, shapes = _image_gradient, [(32, 4, 4, 192), (16, 16, 3, 192)]
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    (op,) = [o for o, _ in program_of(fn, *args)[0].walk() if o.traits.channels][-1:]
    # Every position meets one of 16 taps; 192 channels, and 32 images in the array.
    assert op.traits.exchanged_taps == 16
    assert whole(op.rule, 128, op.traits.exchanged_taps) == 16 * (256 / 192) * 4
    args[1] = jax.ShapeDtypeStruct((4, 4, 3, 192), jnp.bfloat16)
    (op,) = [o for o, _ in program_of(fn, *args)[0].walk() if o.traits.channels][-1:]
    assert op.traits.exchanged_taps == 0


def test_a_cut_to_slivers_leaves_the_array_idle() -> None:
    """All devices take as long as one did, but for the rows that are cut."""
    rule = conv(8, 256, 9, 128, 128)
    order = [f.name for f in rule.factors]

    each = np.array([[8 if n == name else 1 for n in order] for name in ("o", "n")])
    assert array_paddings(rule, each, 128) / 8 == pytest.approx([1, 1 / 8])


def test_nothing_is_not_padded() -> None:
    assert whole(dot(0, 64, 64)) == 1


def _conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _weight_gradient(x: jax.Array, g: jax.Array) -> jax.Array:
    weight = jnp.zeros((3, 3, x.shape[-1], g.shape[-1]), x.dtype)
    return jax.vjp(lambda w: _conv(x, w), weight)[1](g)[0]


def _image_gradient(g: jax.Array, w: jax.Array) -> jax.Array:
    patch, batch = w.shape[0], g.shape[0]
    image = jnp.zeros(
        (batch, patch * g.shape[1], patch * g.shape[2], w.shape[2]), g.dtype
    )

    def patches(x: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (patch, patch), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    return jax.vjp(patches, image)[1](g)[0]


@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (_image_gradient, [(32, 8, 8, 192), (16, 16, 3, 192)]),
        (_image_gradient, [(128, 6, 6, 256), (8, 8, 3, 256)]),
        (_conv, [(8, 16, 16, 256), (3, 3, 256, 16)]),
        (_conv, [(8, 64, 64, 128), (3, 3, 128, 32)]),
        (_conv, [(8, 64, 64, 32), (3, 3, 32, 32)]),
        (_conv, [(64, 32, 32, 3), (7, 7, 3, 16)]),
        (_weight_gradient, [(64, 16, 16, 256), (64, 16, 16, 16)]),
        (_weight_gradient, [(64, 32, 32, 64), (64, 32, 32, 64)]),
    ],
)
def test_the_compiler_takes_as_long(fn, shapes) -> None:
    """At least half of what XLA:TPU estimates; arithmetic alone says 5 to 65 %."""
    mesh, target = mesh_of_target("v5e:2x2"), load_target("v5e")
    assert target.device.clock_hz is not None
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    program, _ = program_of(fn, *args)
    (op,) = [op for op, _ in program.walk() if op.name == "conv_general_dilated"][-1:]
    assert op.rule is not None
    padding = whole(op.rule, target.device.systolic_array, op.traits.exchanged_taps)
    arithmetic_s = op.flops / target.peak_flops_per_s("bfloat16")
    arithmetic_s /= target.device.matmul_efficiency
    sharding = NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(fn, out_shardings=sharding).lower(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in args)
    )
    module = parse_module(compiled.compile().as_text() or "")
    work = WorkReader(module, lambda work: float(work.cycles or 0)).program()
    cycles = sum((w.cycles or 0) * w.count for w in work.items if w.flops)
    estimated_s = cycles / target.device.clock_hz
    assert 0.5 <= padding * arithmetic_s / estimated_s <= 1.1
    assert arithmetic_s / estimated_s < 0.7
