"""XLA for TPU and GPU makes again what was dropped, and holds that much less."""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from rhino_jax import models
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.verify.compile import compile_lowered
from rhino_jax.verify.hlo.records import Compilation
from tests.passes.remat.saved import saved_values
from tests.passes.remat.stepped import as_function, with_choice
from tests.verify.extras import mesh_of_target


pytestmark = pytest.mark.compile_only

SIZES = {
    "num_layers": 3, "d_model": 128, "d_ff": 512, "num_heads": 2, "seq_len": 128,
    "batch": 2048, "vocab": 256, "optimizer": "sgd", "remat": False,
}  # fmt: skip
"""More than the on-chip memory of a TPU holds, which is not in peaks."""

TARGETS = [("v5e:2x2", 4), ("h100:8", 8)]


def step(layers: str) -> Traced:
    """A small GPT's step, without jax.checkpoint."""
    work = models.get("gpt-tiny", layers=layers, **SIZES)
    return trace(work.step, work.abstract_args(), {})


def compiled_for(mesh: Mesh, traced: Traced) -> Compilation:
    """Compiled with the batch cut over all devices."""
    args = [
        jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(mesh, P("x") if e.path.startswith("batch") else P()),
        )
        for x, e in zip(traced.arguments.arrays, traced.program.inputs, strict=False)
    ]
    lowered = jax.jit(as_function(traced)).lower(*args)
    return compile_lowered(lowered, mesh=mesh)


def num_matmuls(found: Compilation) -> int:
    """In the text, loops' bodies once."""
    return len(re.findall(r"= \S+ (?:dot|convolution)\(", found.hlo_text))


def layers_again(traced: Traced, layers: str) -> RematChoice:
    """All but what enters the layers, and what follows them."""
    kept = saved_values(traced.program)
    if layers == "scan":
        return RematChoice(tuple(k.value for k in kept if k.forward is not None))
    made_by = {v: op for op in traced.program.ops for v in op.results}
    stream = [
        v
        for v, op in made_by.items()
        if op.source.function == "block" and op.name == "add"
    ][1::2]
    inside = [k.value for k in kept if k.value < stream[-1] and k.lines]
    return RematChoice(tuple(inside), keep=tuple(stream))


@pytest.mark.parametrize("layers", ["unroll", "scan"])
@pytest.mark.parametrize(("target", "count"), TARGETS)
def test_peak_falls_and_work_rises(target: str, count: int, layers: str) -> None:
    mesh = mesh_of_target(target, {"x": count})
    traced = step(layers)
    choice = layers_again(traced, layers)
    if target.startswith("h100"):
        choice = replace(choice, ordered=True)
    changed = with_choice(traced, choice)
    before, after = (compiled_for(mesh, t) for t in (traced, changed))
    assert before.memory is not None and after.memory is not None
    # Of a layer six products: q k v, scores, mixing, out, up; not down, whose result
    # only the next layer reads.
    again = num_matmuls(after) - num_matmuls(before)
    assert again == (5 if layers == "scan" else 5 * SIZES["num_layers"])
    freed = before.memory.peak_bytes - after.memory.peak_bytes
    assert freed > 0.2 * before.memory.peak_bytes


def test_stacks_wait_on_the_host_of_a_tpu() -> None:
    mesh = mesh_of_target("v5e:2x2", {"x": 4})
    traced = step("scan")
    stacks = [k for k in saved_values(traced.program) if k.forward is not None]
    large = sorted(stacks, key=lambda k: -k.bytes)[:8]
    changed = with_choice(traced, RematChoice(offload=tuple(k.value for k in large)))
    before, after = (compiled_for(mesh, t) for t in (traced, changed))
    assert before.memory is not None and after.memory is not None
    assert "S(5)" in after.hlo_text  # the host's memory space
    assert after.memory.peak_bytes < 0.9 * before.memory.peak_bytes
