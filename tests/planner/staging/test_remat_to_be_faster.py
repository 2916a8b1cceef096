"""Stages that fit make values again where it is faster than to write and read them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from tests.verify.extras import skipped_without_extra


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def train_step(params, x):
    """Of what a layer stacks for its backward pass most is elementwise."""

    def layer(h, w):
        up, down = w
        return h + jax.nn.gelu(h @ up) @ down, None

    def loss(params):
        return jnp.mean((jax.lax.scan(layer, x, params)[0] - x) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def planned(rows=8192, **plan_options):
    layers, width = 8, 256
    params = shape(layers, width, 4 * width), shape(layers, 4 * width, width)
    plan_options = {"mesh": {"stage": 2}, "microbatches": 4, **plan_options}
    return rhino.plan(
        train_step,
        params,
        shape(rows, width),
        hardware="h100",
        donate_argnums=0,
        **{"schedule": "1f1b", **plan_options},
    )


@pytest.fixture(scope="module")
def plan():
    return planned()


def test_stacks_that_fit_are_made_again(plan):
    kept = planned(recompute="as written")
    assert not kept.pipeline.is_recomputed
    made = plan.pipeline.remat
    assert len(made) == 2 and all(m.count and m.saved_bytes > 0 for m in made)
    # As much faster as each stage says.
    for said, now, before in zip(
        made, plan.pipeline.costs, kept.pipeline.costs, strict=True
    ):
        took = [c.forward_s + c.backward_s for c in (now, before)]
        assert said.added_s == pytest.approx(took[0] - took[1], rel=0.05)
        assert took[0] < 0.97 * took[1]
    assert plan.predicted.step_time_s < 0.97 * kept.predicted.step_time_s
    assert plan.predicted.peak_bytes < kept.predicted.peak_bytes


@pytest.mark.slow
def test_what_split_passes_cannot_make_again_is_no_reason_to_split():
    # Of tasks that take long, as it takes time to start more of them.
    large = {"rows": 65536, "mesh": {"stage": 4}, "schedule": "auto"}
    # Unrolled layers have no stacks of residuals, and are faster split.
    large["loops"] = "as written"
    auto = planned(**large)
    assert not auto.pipeline.is_split
    # Nor for the first stage, whose backward pass is one task either way.
    assert all(made.count for made in auto.pipeline.remat)
    # As long as nothing is made again, to split is faster.
    kept = planned(**large, recompute="as written")
    assert kept.pipeline.is_split
    assert auto.predicted.step_time_s < 0.97 * kept.predicted.step_time_s


@pytest.mark.slow
def test_stages_that_do_the_same_are_asked_once(monkeypatch):
    from rhino_jax.planner.staging import remat

    asked, as_it_is = [], remat.ask

    def ask(*args, **kwargs):
        asked.append(args)
        return as_it_is(*args, **kwargs)

    monkeypatch.setattr(remat, "ask", ask)
    planned(level="fast", mesh={"stage": 8}, microbatches=8)
    assert len(asked) <= 3


def unrolled(layer):
    """A step of four layers, one by one."""

    def step(params, x):
        def loss(params):
            h = x
            for up, down in params:
                h = h + layer(h @ up) @ down
            return jnp.mean((h - x) ** 2)

        gradients = jax.grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

    params = [(shape(256, 1024), shape(1024, 256))] * 4
    options = {"mesh": {"stage": 2}, "microbatches": 4, "schedule": "1f1b"}
    return rhino.plan(
        step, params, shape(8192, 256), hardware="h100", donate_argnums=0, **options
    )


def test_what_gains_little_is_kept():
    """Of products alone all goes through memory anyway."""
    assert not unrolled(lambda h: h).pipeline.is_recomputed


def test_what_only_crosses_from_task_to_task_is_made_again():
    """Of layers one by one, whose forward pass is compiled apart from what reads it."""
    pipeline = unrolled(jax.nn.gelu).pipeline
    assert all(made.count for made in pipeline.remat)
    assert all(made.added_s < 0 for made in pipeline.remat)


def softmax_step(params, x):
    """A layer of softmax attention, in float32."""

    def loss(params):
        h = x
        for w in params:
            q, k, v = jnp.split(h @ w, 3, -1)
            p = jax.nn.softmax(q @ k.mT / 8, axis=-1)
            h = h + p @ v
        return jnp.mean((h - x) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


@pytest.mark.compile_only
def test_attention_is_compiled_as_fast_as_planned():
    """With its exponentials made again, or kept: within 30 % of what XLA makes."""
    args = [shape(64, 192)] * 4, shape(64, 1024, 64)
    took = {}
    for recompute in ("auto", "as written"):
        plan = rhino.plan(
            softmax_step, *args, mesh={"stage": 2}, microbatches=4,
            hardware="h100:2", schedule="1f1b", donate_argnums=0, recompute=recompute,
        )  # fmt: skip
        assert plan.pipeline.is_recomputed == (recompute == "auto")
        with skipped_without_extra():
            found = plan.verify(softmax_step, *args, compile_for="h100:2")
        took[recompute] = found.compiled.step_time_s
        ratio = took[recompute] / plan.predicted.step_time_s
        assert 1 / 1.3 < ratio < 1.3, (recompute, ratio)
    assert took["auto"] < 0.9 * took["as written"]
