"""Collectives say why they are there in the user's words."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import P

import rhino_jax as rhino
from rhino_jax.plan.plan import PlanData


OPTIMIZER = optax.adamw(1e-3)


def loss(params: Any, batch: Any) -> jax.Array:
    h = jax.nn.relu(batch.astype("bfloat16") @ params["up"].astype("bfloat16"))
    return jnp.mean((h @ params["down"].astype("bfloat16")).astype("float32") ** 2)


def train(params: Any, opt_state: Any, batch: Any) -> Any:
    grads = jax.grad(loss)(params, batch)
    updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def shaped(*shape: int, dtype: str = "float32") -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


PARAMS = {"up": shaped(512, 2048), "down": shaped(2048, 512)}
ARGS = (PARAMS, jax.eval_shape(OPTIMIZER.init, PARAMS), shaped(256, 512))


def plan(fn: Any, *args: Any, **pins: Any) -> PlanData:
    return rhino.plan(
        fn, *args, mesh={"data": 4, "model": 2}, pins=pins, progress=False
    )


def reasons(found: PlanData) -> dict[str, set[str]]:
    said: dict[str, set[str]] = {}
    for c in found.collectives:
        said.setdefault(c.reason, set()).add(c.kind)
    return said


def test_gradients_and_gathered_parameters_go_by_their_paths() -> None:
    pins = {f"params['{name}']": P("data", None) for name in ("up", "down")}
    args = (*ARGS[:2], shaped(65536, 512))
    said = reasons(plan(train, *args, **pins, batch=P(("data", "model"), None)))
    for name in ("up", "down"):
        assert f"gradient of params['{name}']: sum over the batch" in said
        assert f"gathers params['{name}']: P('data') → P()" in said


def test_what_is_summed_goes_by_the_dim_of_a_parameter() -> None:
    pins = {"params['up']": P(None, "model"), "params['down']": P("model", None)}
    said = reasons(plan(loss, PARAMS, shaped(256, 512), **pins, batch=P("data", None)))
    assert "sum over dim 0 of params['down']" in said
    assert any(s.startswith("sum over the batch") for s in said)


def test_no_names_that_only_rules_know() -> None:
    pins = {"params['up']": P("data", "model"), "batch": P("data", None)}
    for reason in reasons(plan(train, *ARGS, **pins)):
        assert not re.search(r"%\d|\bk\d*\b(?!\[)|partial result", reason), reason


def test_reductions_name_themselves_and_what_they_run_over() -> None:
    def largest(params: Any, tokens: Any) -> jax.Array:
        return jnp.max(params["embed"][tokens] @ params["head"], axis=-1)

    params = {"embed": shaped(4096, 512), "head": shaped(512, 4096)}
    pins = {"params['head']": P(None, "model"), "params['embed']": P("model", None)}
    tokens = shaped(256, dtype="int32")
    said = reasons(plan(largest, params, tokens, **pins, tokens=P("data")))
    assert "max over dim 1 of params['head']" in said
    assert "look-up over dim 0 of params['embed']" in said


def test_halos_name_the_dim_that_the_window_slides_over() -> None:
    def blur(image: Any, kernel: Any) -> jax.Array:
        dims = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(
            image, kernel, (1, 1), "SAME", dimension_numbers=dims
        )

    image, kernel = shaped(2, 512, 512, 64), shaped(3, 3, 64, 64)
    pins = {"image": P(None, "data"), "out": P(None, "data")}
    said = reasons(plan(blur, image, kernel, **pins))
    window = "borders of the window of conv_general_dilated along dim 1 of image"
    assert said.get(window) == {"collective-permute"}, said


def accumulated(params: Any, batch: Any) -> Any:
    def loss_of(params: Any, x: Any) -> Any:
        h = x * params["scale"] + params["bias"]
        return jnp.mean(jnp.tanh(h @ params["up"] + params["shift"]) ** 2)

    def add(total: Any, x: Any) -> Any:
        grads = jax.grad(loss_of)(params, x)
        return jax.tree.map(jnp.add, total, grads), None

    zero = jax.tree.map(jnp.zeros_like, params)
    grads, _ = jax.lax.scan(add, zero, batch.reshape(4, -1, 512))
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def test_gradients_of_scales_and_biases_are_named_in_an_accumulation_loop() -> None:
    widths = {"scale": (512,), "bias": (512,), "up": (512, 512), "shift": (512,)}
    params = {name: shaped(*dims) for name, dims in widths.items()}
    # So many rows that sums deferred to the end of the loop would gain nothing.
    found = plan(accumulated, params, shaped(262144, 512), batch=P("data", None))
    said = reasons(found)
    assert all("going backward" not in reason for reason in said)
    for name in widths:
        assert any(f"gradient of params['{name}']" in reason for reason in said), said


def test_sums_of_gradients_after_the_loop_over_micro_batches_are_named() -> None:
    def train(params: Any, batch: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(batch @ p["up"]) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    found = rhino.plan(
        train,
        {"up": shaped(512, 512)},
        shaped(65536, 512),
        mesh={"data": 4},
        hardware="h100:4",
        microbatches=4,
        donate_argnums=0,
        progress=False,
    )
    assert "gradient of params['up']: sum over the batch" in reasons(found)


def scanned_step(params: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jax.nn.relu(x @ w), None

    def loss_of(params: Any) -> jax.Array:
        return jnp.mean(jax.lax.scan(layer, batch, params)[0] ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss_of)(params))


@pytest.mark.parametrize(
    "donated, name", [((0,), "gradient of params"), ((), "out")], ids=["tied", "not"]
)
def test_gradients_of_scanned_layers_are_found(
    donated: tuple[int, ...], name: str
) -> None:
    pins = {"batch": P("data", None), "params": P(None, None, "model")}
    args, mesh = (shaped(3, 512, 512), shaped(256, 512)), {"data": 4, "model": 2}
    options: dict[str, Any] = {"progress": False, "donate_argnums": donated}
    said = reasons(rhino.plan(scanned_step, *args, mesh=mesh, pins=pins, **options))
    assert f"{name}: sum over the batch" in said, said
