"""XLA for TPU and GPU never holds the logits of a vocabulary whole either."""

from __future__ import annotations

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.ir.transform import CHUNKS, chosen
from rhino_jax.models import registry
from rhino_jax.passes.apply import apply_passes
from rhino_jax.verify.compile import compile_lowered
from tests.verify.extras import mesh_of_target


pytestmark = pytest.mark.compile_only

SIZES = {"vocab": 50304, "seq_len": 256, "batch": 32, "d_model": 128, "remat": True}


def peak_bytes(target: str, count: int, traced: Traced) -> int:
    """Of one device, the batch cut over all of them."""
    mesh = mesh_of_target(target, {"x": count})
    args = []
    for e in traced.program.inputs:
        value = traced.program.values[e.value]
        spec = P("x") if e.path.startswith("batch") else P()
        sharding = NamedSharding(mesh, spec)
        args.append(jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding))
    opened, consts = open_jaxpr(traced.closed_jaxpr), jaxpr_consts(traced.closed_jaxpr)
    jitted = jax.jit(lambda *xs: jax.core.eval_jaxpr(opened, consts, *xs))
    found = compile_lowered(jitted.lower(*args), mesh=mesh)
    assert found.memory is not None
    return int(found.memory.peak_bytes)


@pytest.mark.parametrize(("target", "count"), [("v5e:2x2", 4), ("h100:8", 8)])
def test_peak_falls_by_most_of_the_logits(target: str, count: int) -> None:
    workload = registry.get("gpt-tiny", optimizer="sgd", **SIZES)
    traced = trace(workload.step, workload.abstract_args(), {})
    logits = 4 * SIZES["batch"] * SIZES["seq_len"] * SIZES["vocab"] // count
    whole = peak_bytes(target, count, traced)
    parts = peak_bytes(
        target, count, apply_passes(traced, [chosen(CHUNKS, {"count": 8})])
    )
    print(f"{target}: {whole / 2**20:.0f} MiB whole, {parts / 2**20:.0f} MiB in chunks")
    assert whole > logits
    assert whole - parts > 0.7 * logits
