"""The grouped matmul of GPUs, compiled for them: no temporaries, FLOPs as planned."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax.cost.grouped import group_tile, tiled_rows
from rhino_jax.hardware.compile_only import compiler_options
from rhino_jax.runtime.grouped import by_matrices, by_rows
from rhino_jax.verify.hlo.module import parse_module
from rhino_jax.verify.hlo.work import WorkReader
from tests.verify.extras import mesh_of_target


pytestmark = [pytest.mark.compile_only, pytest.mark.slow]

SHAPES = [(32_768, 2048, 512, 256), (4096, 200, 72, 8), (16, 2048, 512, 4)]


def compiled_for(mesh: Any, run: Any, *args: Any) -> Any:
    """Compile a kernel, which asks the mesh around it for its GPU."""
    P = PartitionSpec()
    on_mesh = jax.shard_map(
        run, mesh=mesh, in_specs=(P,) * len(args), out_specs=P, check_vma=False
    )
    return jax.jit(on_mesh).lower(*args).compile(compiler_options(mesh))


@pytest.mark.parametrize("hardware", ["h100:1", "a100:1", "b200:1"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_compile(hardware: str, dtype: Any, shape: Any) -> None:
    rows, width, hidden, groups = shape
    mesh = mesh_of_target(hardware, {"x": 1})
    sharding = NamedSharding(mesh, PartitionSpec())
    S = partial(jax.ShapeDtypeStruct, sharding=sharding)
    x, y = S((1, 1, rows, width), dtype), S((1, 1, rows, hidden), dtype)
    w, sizes = S((1, groups, width, hidden), dtype), S((1, 1, groups), jnp.int32)
    for run, a, b, of_matrices in (
        (partial(by_rows, dtype=dtype), x, w, False),
        (partial(by_rows, dtype=dtype, is_turned=True), y, w, False),
        (partial(by_matrices, dtype=dtype), x, y, True),
    ):
        compiled = compiled_for(mesh, run, a, b, sizes)
        assert compiled.memory_analysis().temp_size_in_bytes < 1 << 16
        work = WorkReader(parse_module(compiled.as_text()), lambda w: 0.0).program()
        tile = group_tile(rows, groups, jnp.dtype(dtype).itemsize, of_matrices)
        flops = round(2 * tiled_rows(rows, groups, tile) * width * hidden)
        (kernel,) = (w for w in work.items if w.flops)
        assert (kernel.flops, kernel.dtype) == (flops, jnp.dtype(dtype).name)
        assert kernel.ops[0][2] == "ragged_dot_general"
        assert not work.notes


def test_sets_of_rows_are_one_kernel() -> None:
    rows, width, hidden, groups, sets = 4096, 256, 512, 16, 2
    mesh = mesh_of_target("h100:1", {"x": 1})
    sharding = NamedSharding(mesh, PartitionSpec())
    S = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=sharding)
    x, y = S((1, sets, rows, width)), S((1, sets, rows, hidden))
    w = S((1, groups, width, hidden))
    sizes = jax.ShapeDtypeStruct((1, sets, groups), jnp.int32, sharding=sharding)
    for run, b, of_matrices in ((by_rows, w, False), (by_matrices, y, True)):
        run = partial(run, dtype=jnp.bfloat16)
        compiled = compiled_for(mesh, run, x, b, sizes)
        work = WorkReader(parse_module(compiled.as_text()), lambda w: 0.0).program()
        tile = group_tile(rows, groups, 2, of_matrices)
        multiplied = sets * tiled_rows(rows, groups, tile)
        assert work.flops == 2 * multiplied * width * hidden
