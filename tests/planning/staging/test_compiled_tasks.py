"""Steps in stages as compilers make them, beside what was predicted of them.

With `python -m pytest -s -m "slow and compile_only"` both are printed. Nothing was
fitted to these.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import rhino_jax as rhino
from rhino_jax.models import registry
from tests.verify.extras import skipped_without_extra


def mlp_step(params, x):
    def loss(params):
        h = x
        for up, down in params:
            h = h + jnp.tanh(h @ up) @ down
        return jnp.mean((h - x) ** 2)

    gradients = jax.grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


def mlp():
    """Without remaking: products that are read as they are."""

    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    params = [(shape(2048, 8192), shape(8192, 2048))] * 8
    return mlp_step, (params, shape(65536, 2048)), (0,)


def of_zoo(name, **options):
    def made():
        workload = registry.get(name, **options)
        return workload.step, workload.abstract_args(), workload.donate_argnums

    made.__name__ = name
    return made


@pytest.mark.slow
@pytest.mark.compile_only
@pytest.mark.parametrize(
    ("model", "hardware", "stages", "schedule", "most"),
    [
        (of_zoo("gpt-small"), "h100:8", 4, "auto", 1.3),
        (of_zoo("gpt-small"), "h100:8", 4, "zero-bubble", 1.3),
        (of_zoo("gpt-small"), "h100:8", 4, "1f1b", 1.3),
        (of_zoo("unet-base"), "h100:8", 4, "auto", 1.5),
        (of_zoo("gpt-small", layers="scan"), "h100:8", 4, "auto", 1.6),
        (mlp, "v5e:2x4", 4, "1f1b", 1.2),
    ],
)
def test_compiled_steps_are_near_the_prediction(
    model, hardware, stages, schedule, most
):
    step, args, donated = model()
    plan = rhino.plan(
        step,
        *args,
        mesh={"stage": stages, "data": 8 // stages},
        microbatches=8,
        hardware=hardware,
        schedule=schedule,
        donate_argnums=donated,
    )
    with skipped_without_extra():
        found = plan.verify(step, *args, compile_for=hardware)
    assert found.out_of_memory is None
    predicted_s, compiled_s = plan.predicted.step_time_s, found.compiled.step_time_s
    peaks = plan.predicted.peak_bytes, max(found.stage_peak_bytes)
    print(
        f"\n{model.__name__}, {hardware}, {plan.schedule}: {1e3 * predicted_s:.3g} ms,"
        f" compiled {1e3 * compiled_s:.3g} ({compiled_s / predicted_s:.2f});"
        f" {peaks[0] / 2**30:.3g} GiB, compiled {peaks[1] / 2**30:.3g}"
    )
    assert 0.8 < compiled_s / predicted_s < most
    assert peaks[0] == pytest.approx(peaks[1], rel=0.15)
