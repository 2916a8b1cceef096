"""Kernels that XLA:TPU adds: loops over windows, copies of narrow tables, parts of
complex arrays, and reductions of broadcasts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.model.build import MeshModel
from rhino_jax.model.tpu_kernels import padded_copies
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.records import Request


TARGET = load_target("v5e:2x4")
LAUNCH_S = TARGET.device.launch_s


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def model_of(fn: Any, *args: Any, **changes: Any) -> MeshModel:
    analysis = ProgramAnalysis.of(
        trace(fn, args, {}).program, TARGET.replace(**changes)
    )
    request = Request(memory_budget_bytes=1e12, pins={}, output_pins={})
    return build_mesh_problem(analysis, (("x", 8),), request).model


OFF = {"loops_windows": False, "splits_complex": False}


def added(fn: Any, *args: Any, **changes: Any) -> list[tuple[bool, float]]:
    """Return, for every option that takes longer than without the behaviours, whether
    it is sharded, and by how many seconds."""
    models = (model_of(fn, *args, **changes, **more) for more in ({}, OFF))
    found = []
    for a, b in zip(*(m.options for m in models), strict=True):
        for s, more in zip(a.strategies, a.compute_s - b.compute_s, strict=True):
            if more > 1e-12:
                found.append((any(s.cut), float(more)))
    return found


def windows(x: Any, at: Any) -> Any:
    return jax.vmap(lambda p: jax.lax.dynamic_slice(x, (p[0], p[1]), (64, 256)))(at)


def test_windows_are_gathered_one_by_one() -> None:
    table, at = array(1024, 1024), array(512, 2, dtype=jnp.int32)
    assert added(windows, table, at) == [
        (False, pytest.approx(512 * 3 * LAUNCH_S)),
        (True, pytest.approx(64 * 3 * LAUNCH_S)),
    ]
    rows = lambda x, at: x[at]  # noqa: E731
    assert not added(rows, table, array(512, dtype=jnp.int32))


def test_windows_are_added_one_by_one() -> None:
    def gradient(x: Any, at: Any, g: Any) -> Any:
        return jax.linear_transpose(lambda x: windows(x, at), x)(g)[0]

    table, at = array(1024, 1024), array(512, 2, dtype=jnp.int32)
    for is_cut, more in added(gradient, table, at, array(512, 64, 256)):
        assert more == pytest.approx((64 if is_cut else 512) * 4 * LAUNCH_S)


def test_hardware_without_tiles_has_none_of_these() -> None:
    table, at = array(1024, 1024), array(512, 2, dtype=jnp.int32)

    def gradient(x: Any, at: Any, g: Any) -> Any:
        return jax.linear_transpose(lambda x: windows(x, at), x)(g)[0]

    assert added(gradient, table, at, array(512, 64, 256), tile=()) == []


def test_a_compared_window_is_no_index() -> None:
    def fn(x: Any, source: Any) -> Any:
        return jax.lax.select_and_scatter_add_p.bind(
            source, x, select_prim=jax.lax.ge_p, window_dimensions=(1, 2),
            window_strides=(1, 2), padding=((0, 0), (0, 0)),
        )  # fmt: skip

    assert added(fn, array(512, 1024), array(512, 512)) == []


def test_a_narrow_table_is_copied_to_padded_rows() -> None:
    def gradient(x: Any, at: Any, g: Any) -> Any:
        return x.at[at].add(g)

    def most(columns: int) -> float:
        more = added(
            gradient,
            array(2**16, columns),
            array(512, dtype=jnp.int32),
            array(512, columns),
        )
        return max([s for is_cut, s in more if not is_cut], default=0.0)

    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    # The rows padded to 128 columns and as they are, there and back; what is added to
    # them, to padded rows in fast memory.
    copied = 2 * (128 + 8) * 2**16 * 4 + 2 * 8 * 512 * 4
    assert most(8) - most(128) == pytest.approx(copied / rate)
    assert most(128) == pytest.approx(LAUNCH_S, rel=0.01)  # of the indices


def test_rows_of_a_narrow_table_are_looked_up_in_a_copy() -> None:
    at, clock_hz = array(512, dtype=jnp.int32), TARGET.device.clock_hz
    assert clock_hz is not None

    def most(fn: Any, columns: int) -> float:
        more = added(fn, array(2**20, columns), at)
        return max([s for is_cut, s in more if not is_cut], default=0.0)

    copied_s = (128 + 64) * 2**20 / 77 / clock_hz
    twice = lambda x, at: (x[at], x[at + 1])  # noqa: E731
    for fn in (lambda x, at: x[at], twice):
        assert most(fn, 64) == pytest.approx(copied_s)
        assert most(fn, 128) == 0.0
    # Of 32 there would be too much padding: each row is four tiles.
    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    assert most(lambda x, at: x[at], 32) == pytest.approx(512 * 4 * 4096 / rate)
    # A table that the program computes is written with padded rows.
    assert most(lambda x, at: jnp.sort(x, axis=0)[at], 64) == 0.0


def copied(fn: Any, *args: Any, **changes: Any) -> float:
    """Return the bytes of copies to padded rows where nothing is sharded."""
    model = model_of(fn, *args, **changes)
    copies = padded_copies(model.analysis, model.builder.sizes, model.options)
    for copy in copies:
        for s, used in zip(
            model.options[copy.node].strategies, copy.usage, strict=True
        ):
            if not any(s.cut):
                return float(used)
    return 0.0


def test_copies_to_padded_rows_take_memory() -> None:
    get, row = lambda x, at: x[at], 128 * 4
    few, many = (array(n, dtype=jnp.int32) for n in (2**9, 2**20))
    # On the chip; in HBM, where they do not fit there or SparseCores look rows up.
    assert copied(get, array(2**17, 16), few) == 0.0
    assert copied(get, array(2**17, 16), many) == row * 2**20
    both = row * (2**17 + 2**9)
    assert copied(get, array(2**17, 16), few, sparse_cores=True) == both
    assert copied(get, array(2**20, 64), few) == row * 2**20
    # Mostly padding: read where it is.
    assert copied(get, array(2**20, 16), few, sparse_cores=True) == 0.0
    assert copied(get, array(2**20, 128), few) == 0.0
    # The rows and their sums.
    sums = lambda x, s: jax.ops.segment_sum(x, s, 2**18)  # noqa: E731
    assert copied(sums, array(2**20, 16), many) == row * (2**20 + 2**18)


def test_rows_that_sharding_makes_narrow_are_copied_to_padded_rows() -> None:
    def segments(rows: int) -> float:
        fn = lambda x, s: jax.ops.segment_sum(x, s, rows)  # noqa: E731
        x, s = array(2**18, 128), array(2**18, dtype=jnp.int32)
        return max(s for is_cut, s in added(fn, x, s) if is_cut)

    # Columns over eight devices: 16 of 128 lanes each, which do not fit on the chip; of
    # 2**18 rows of the result not either.
    assert TARGET.device.clock_hz is not None
    items_per_s = 77 * TARGET.device.clock_hz
    one, two = segments(4096), segments(2**18)
    assert one == pytest.approx(2**18 * (16 + 128) / items_per_s, rel=0.01)
    assert two == pytest.approx(2 * one, rel=0.01)


def test_complex_arrays_are_taken_apart_and_joined() -> None:
    x = array(256, 256, dtype=jnp.complex64)
    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    passes = sorted(s * rate / x.size / 8 for is_cut, s in added(jnp.sin, x))
    assert passes[-2:] == pytest.approx([2, 3])
    assert not added(jnp.sin, array(256, 256))


def test_a_complex_product_is_three_with_partial_sums_each() -> None:
    def steps_s(dtype: Any) -> float:
        x = array(4096, 2048, dtype=dtype)
        model = model_of(lambda a, b: a.T @ b, x, x)
        (node,) = [n for n in model.graph.nodes if n.is_matmul]
        own = model.options[node.id]
        return max(
            float(c - k)
            for s, c, k in zip(own.strategies, own.cost_s, own.compute_s, strict=True)
            if s.partial == (0,) and not any(s.results[0])
        )

    real_s, complex_s = (steps_s(d) for d in (jnp.float32, jnp.complex64))
    assert complex_s == pytest.approx(3 * real_s, rel=0.1)


def test_an_image_of_few_channels_is_copied_with_the_batch_on_lanes() -> None:
    def patches(x: Any, k: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, k, (8, 8), "VALID", dimension_numbers=dims
        )

    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    more = added(patches, array(64, 64, 128, 3), array(8, 8, 3, 256))
    image = 64 * 64 * 128 * 3 * 4
    # A batch of 64 on 128 lanes, and three channels on four rows.
    assert max(s for _, s in more) == pytest.approx((1 + 2 * 4 / 3) * image / rate)


def test_images_are_copied_at_the_ends_of_the_program() -> None:
    def conv(x: Any, k: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=dims
        )

    rate = TARGET.device.hbm_bytes_per_s * TARGET.device.memory_efficiency
    kernel = array(3, 3, 32, 32)
    # Stored with a row of 128 on the lanes, and convolved with a batch of 64 there, or
    # with 32 channels; four images are folded with positions of the window.
    image = 64 * 128 * 32 * 4 / rate
    for batch, times in ((64, 1 + 2), (4, 10 * (1 + 4))):
        more = [s for _, s in added(conv, array(batch, 64, 128, 32), kernel)]
        assert max(more) == pytest.approx(times * batch * image)
    assert not added(jnp.tanh, array(4, 64, 128, 32))
