"""Where rhino cuts models, beside cuts into as many layers for every stage.

`pytest -m slow -s tests/planner/test_equal_layers.py` prints the ratios, and what they
would be by 1F1B with stages that all take as long, and without any bubble: more than
that no cut into as many stages makes of them, whatever the schedule.
"""

from __future__ import annotations

import re

import jax
import pytest

import rhino_jax as rhino
from rhino_jax import models


STAGES, COUNT = 4, 16
BLOCKS = {
    "unet-base": (
        r"params\['down'\]\[\d+\]\['stages'\]\[\d+\]",
        r"params\['middle'\]\['(?:first|attention|second)'\]",
        r"params\['up'\]\[\d+\]\['stages'\]\[\d+\]",
    ),
    "t5-large": (r"params\['encoder'\]\[\d+\]", r"params\['decoder'\]\[\d+\]"),
}
"""Of every model the paths of its layers, in the order in which they run."""

OPTIONS = {"t5-large": {"layers": "unroll", "num_layers": 8}}


def place(block, kind):
    """Of a layer among its kind: numbers in its path, and of a U-Net's middle its
    name."""
    names = ("first", "attention", "second")
    named = [names.index(n) for n in names if f"['{n}']" in block]
    return kind, *map(int, re.findall(r"\[(\d+)\]", block)), *named


def equal_layers(model, params):
    """Path → stage."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    paths = [f"params{jax.tree_util.keystr(path)}" for path, _ in leaves]
    found = {
        (place(match[0], kind), match[0])
        for kind, pattern in enumerate(BLOCKS[model])
        for path in paths
        if (match := re.match(pattern, path))
    }
    blocks = [block for _, block in sorted(found)]
    return {f"{b}*": i * STAGES // len(blocks) for i, b in enumerate(blocks)}


@pytest.mark.slow
@pytest.mark.parametrize("model", BLOCKS)
def test_no_cut_into_equal_layers_is_faster_and_none_is_by_much(model):
    workload = models.get(model, **OPTIONS.get(model, {}))
    args = workload.abstract_args()

    def planned(**options):
        return rhino.plan(
            workload.step,
            *args,
            mesh={"stage": STAGES, "data": 2},
            hardware="h100:8",
            microbatches=COUNT,
            schedule="1f1b",
            donate_argnums=workload.donate_argnums,
            **options,
        )

    pins = equal_layers(model, args[0])
    assert len({*pins.values()}) == STAGES
    plan = planned()
    best, equal = (p.predicted.step_time_s for p in (plan, planned(pins=pins)))
    whole = sum(plan.pipeline.busy_s) / STAGES  # without a bubble
    even = whole * (COUNT + STAGES - 1) / COUNT
    print(
        f"{model}: {best * 1e3:.1f} ms, equal layers {equal / best:.3f} of it; were"
        f" stages even {equal / even:.3f}, without a bubble {equal / whole:.3f}"
    )
    assert best <= equal
    assert best <= 1.1 * even
