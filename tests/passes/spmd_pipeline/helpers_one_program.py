"""Steps with their layers in a loop, and all stages of them run beside one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from rhino_jax._compat import in_current_mesh, open_jaxpr
from rhino_jax.frontend.trace import Traced, trace
from rhino_jax.ir.transform import ONE_PROGRAM, chosen
from rhino_jax.passes.apply import apply_passes
from rhino_jax.passes.microbatch import cut_in
from tests.passes.interpreter import interpret_on_ranks


LAYERS, WIDTH, ROWS = 4, 16, 16


def on_one_stage(traced: Traced, stages: int, count: int) -> Traced:
    return apply_passes(
        traced, [cut_in(count), chosen(ONE_PROGRAM, {"stages": stages})]
    )


def _is_on_stage(traced: Traced, on_stage: Traced, of: str) -> list[bool]:
    """Return which of a program's "inputs" or "outputs" every stage has a part of."""
    return [
        traced.program.values[a.value].shape != on_stage.program.values[b.value].shape
        for a, b in zip(
            getattr(traced.program, of), getattr(on_stage.program, of), strict=True
        )
    ]


def run_all(traced: Traced, on_stage: Traced, arrays: Sequence[Any]) -> list[Any]:
    """Interpret all stages; what all of them have is the same on each."""
    stages = on_stage.program.transforms[-1].chosen["stages"]
    is_part = _is_on_stage(traced, on_stage, "inputs")
    each = [
        np.split(np.asarray(x), stages) if part else [x] * stages
        for part, x in zip(is_part, (*arrays, *traced.consts), strict=True)
    ]
    found = interpret_on_ranks(on_stage.closed_jaxpr, [*zip(*each, strict=True)])
    results = []
    is_part = _is_on_stage(traced, on_stage, "outputs")
    for part, xs in zip(is_part, zip(*found, strict=True), strict=True):
        if not part:
            for x in xs[1:]:
                np.testing.assert_array_equal(x, xs[0])
        results.append(np.concatenate(xs) if part else xs[0])
    return results


def run_all_compiled(
    traced: Traced, on_stage: Traced, arrays: Sequence[Any]
) -> list[Any]:
    """Run on as many devices as there are stages."""
    stages = on_stage.program.transforms[-1].chosen["stages"]
    kinds = (AxisType.Auto,)
    mesh = jax.make_mesh(
        (stages,), ("stage",), axis_types=kinds, devices=jax.devices()[:stages]
    )

    def specs(of: str) -> list[P]:
        is_part = _is_on_stage(traced, on_stage, of)
        return [P("stage") if part else P() for part in is_part]

    def local(*xs: Any) -> list[Any]:
        here = open_jaxpr(in_current_mesh(on_stage.closed_jaxpr))
        return jax.core.eval_jaxpr(
            here, xs[len(here.invars) :], *xs[: len(here.invars)]
        )

    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=tuple(specs("inputs")),
        out_specs=specs("outputs"),
        check_vma=False,
    )
    return jax.jit(run)(*arrays, *traced.consts)


def assert_equal(traced: Traced, got: Sequence[Any], expected: Sequence[Any]) -> None:
    for end, a, b in zip(traced.program.outputs, got, expected, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        bound = 1e-4 * np.abs(b).max(initial=0) + 1e-7
        assert np.abs(a - b).max(initial=0) <= bound, end.path


def traced_step(
    layer: Callable[[Any, Any], Any], **options: Any
) -> tuple[Traced, list[Any]]:
    """As `train_step`, traced, and its arrays."""
    step, args = train_step(layer, **options)
    return trace(step, args, {}, donate_argnums=(0, 1)), jax.tree.leaves(args)


def train_step(
    layer: Callable[[Any, Any], Any],
    *,
    start: Callable[[Any, Any], Any] = lambda x, key: x,
    end: Callable[[Any], Any] = lambda carry: carry,
    tx: optax.GradientTransformation | None = None,
    loops: int = 1,
    unroll: int = 1,
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A training step of a scan over `layer(carry, weights) -> carry`.

    Args:
      layer: of the carry and of {"w": [WIDTH, WIDTH], "b": [WIDTH]}.
      start: the first carry, of inputs [ROWS, WIDTH] and a key.
      end: outputs [ROWS, WIDTH] of the last carry.
      tx: the optimizer; SGD where not given.
      loops: how often all layers are gone through, one time after the other.
      unroll: as of `lax.scan`.
    """
    tx = optax.sgd(0.1) if tx is None else tx

    def loss_of(params: Any, x: Any, y: Any, key: Any) -> Any:
        carry = start(x @ params["in"], key)
        for _ in range(loops):
            carry, _ = lax.scan(
                lambda c, w: (layer(c, w), None), carry, params["layers"], unroll=unroll
            )
        # The embedding is tied: it is read before and after all layers.
        return jnp.mean((end(carry) @ params["in"].T - y) ** 2)

    def step(params: Any, state: Any, x: Any, y: Any, key: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, x, y, key)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    params = {
        "in": normal(WIDTH, WIDTH) / 4,
        "layers": {
            "w": normal(LAYERS, WIDTH, WIDTH) / 4,
            "b": np.zeros((LAYERS, WIDTH), np.float32),
        },
    }
    x, y = normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    args = params, tx.init(params), x, y, jax.random.key(1)
    return step, args
