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
from rhino_jax.planning.variants import cut_in
from rhino_jax.transform.remade import remade


LAYERS, WIDTH, ROWS = 4, 16, 16


def on_one_stage(traced: Traced, stages: int, count: int) -> Traced:
    return remade(traced, [cut_in(count), chosen(ONE_PROGRAM, {"stages": stages})])


def run_all(traced: Traced, on_stage: Traced, arrays: Sequence[Any]) -> list[Any]:
    """Run on as many devices as there are stages."""
    stages = on_stage.program.transforms[-1].chosen["stages"]
    kinds = (AxisType.Auto,)
    mesh = jax.make_mesh(
        (stages,), ("stage",), axis_types=kinds, devices=jax.devices()[:stages]
    )

    def specs(of: str) -> list[P]:
        whole, own = (getattr(t.program, of) for t in (traced, on_stage))
        shapes = [
            (
                traced.program.values[a.value].shape,
                on_stage.program.values[b.value].shape,
            )
            for a, b in zip(whole, own, strict=True)
        ]
        return [P("stage") if a != b else P() for a, b in shapes]

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

    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "in": jax.random.normal(keys[0], (WIDTH, WIDTH)) / 4,
        "layers": {
            "w": jax.random.normal(keys[1], (LAYERS, WIDTH, WIDTH)) / 4,
            "b": jnp.zeros((LAYERS, WIDTH)),
        },
    }
    x, y = (jax.random.normal(k, (ROWS, WIDTH)) for k in keys[2:])
    args = params, tx.init(params), x, y, jax.random.key(1)
    return step, args
