"""Unrolled layers on GPUs: what recomputation waits for, and what it reads as saved."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from rhino_jax._compat import open_jaxpr
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.hardware.files import load_target
from rhino_jax.ir.transform import Transform
from rhino_jax.passes.apply import apply_passes
from rhino_jax.planner.search.mesh_problem import build_mesh_problem
from rhino_jax.planner.search.passes import SOLVE
from rhino_jax.planner.search.records import Request, SolvedMesh
from rhino_jax.planner.search.remat.candidates import candidates_of
from rhino_jax.planner.search.remat.choice import variants
from rhino_jax.solver.incumbents import EFFORTS


B, S, D, H = 8, 128, 64, 4


def _layer(x: Any, w: Any) -> Any:
    q, k, v = jnp.einsum("bsd,dchk->cbshk", x, w["qkv"].astype(x.dtype))
    scores = jnp.einsum("bshk,bthk->bhst", q, k).astype(jnp.float32)
    scores = jnp.where(jnp.tril(jnp.ones((S, S), bool)), scores, -1e30)
    shares = jax.nn.softmax(scores).astype(x.dtype)
    mixed = jnp.einsum("bhst,bthk->bshk", shares, v)
    return x + jnp.einsum("bshk,hkd->bsd", mixed, w["out"].astype(x.dtype))


def _step(params: Any, x: Any) -> Any:
    def loss(params: Any) -> Any:
        y = x
        for w in params:
            y = _layer(y, w)
        return jnp.square(y.astype(jnp.float32)).mean()

    grads = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


@cache
def _planned() -> tuple[Traced, SolvedMesh]:
    w = {
        "qkv": jax.ShapeDtypeStruct((D, 3, H, D // H), jnp.float32),
        "out": jax.ShapeDtypeStruct((H, D // H, D), jnp.float32),
    }
    x = jax.ShapeDtypeStruct((B, S, D), jnp.bfloat16)
    traced = trace(_step, ([w] * 3, x), {}, donate_argnums=(0,))
    analysis = ProgramAnalysis.of(traced.program, load_target("h100:1"))
    request = Request(1e15, {}, {}, level="fast")
    problem = build_mesh_problem(analysis, (("x", 1),), request)
    return traced, SOLVE.run(None, problem, EFFORTS["fast"], request)


def _recomputed(policy: str) -> Any:
    """Return the jaxpr of the step with the residuals of a policy."""
    traced, solved = _planned()
    found = next(variants(candidates_of(solved), policy))
    choice = replace(found.choice, ordered=True)
    changed = apply_passes(traced, [Transform("recompute", 0, 0, str(choice))])
    return open_jaxpr(changed.closed_jaxpr)


def _barriers(jaxpr: Any) -> list[Any]:
    return [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]


def test_what_fuses_is_not_saved_for_a_recomputation() -> None:
    """A softmax in bfloat16 is recomputed from the scores, not from its float32
    exponentials: a barrier would store these, which are twice as large."""
    policies = "products saved", "products of weights saved"
    barriers = [b for policy in policies for b in _barriers(_recomputed(policy))]
    read = [v.aval for b in barriers for v in b.invars]
    kinds = {a.dtype.name for a in read if a.shape == (B, H, S, S)}
    assert kinds == {"bfloat16"}


def test_a_recomputation_waits_for_transposed_gradients() -> None:
    """An op on a weight's gradient before the barrier would move the gradient's matmul,
    and all that it reads, to the end of the step."""
    jaxpr = _recomputed("products of weights saved")
    made = {v: e for e in jaxpr.eqns for v in e.outvars}
    reads = {id(v): e for e in jaxpr.eqns for v in e.invars}
    pairs = [
        (before, reads[id(behind)])
        for barrier in _barriers(jaxpr)
        for before, behind in zip(barrier.invars, barrier.outvars, strict=True)
        if id(behind) in reads and before in made
    ]
    of_out = [
        reader.primitive.name
        for before, reader in pairs
        if made[before].primitive.name == "dot_general"
        and sorted(before.aval.shape) == sorted((H, D // H, D))
    ]
    assert of_out and set(of_out) <= {"transpose", "convert_element_type"}
