"""Source and sentences for a plan with a mesh axis of stages (SPMD pipeline)."""

from __future__ import annotations

from rhino_jax.plan.plan import PlanData
from rhino_jax.plan.stages import STAGE_AXIS


PIPELINED = '''

COUNT = {count}  # micro-batches


def pipelined(layer, stacks, x):
    """`jax.lax.scan(layer, x, stacks)[0]`, its layers over `stage`, in micro-batches.

    For the loop over layers of a step that is jitted as above; `jax.grad` goes through.

    Args:
      layer: (x, weights of one layer) -> (x, None); rows of x do not meet in it.
      stacks: weights [layers, ...], cut over `stage`.
      x: [rows, ...].
    """
    stages = mesh.shape["stage"]

    def on_stage(stacks, rows):
        stage = jax.lax.axis_index("stage")

        def tick(received, t):
            own = rows[jax.numpy.clip(t - stage, 0, COUNT - 1)]
            y, _ = jax.lax.scan(
                layer, jax.numpy.where(stage == 0, own, received), stacks
            )
            to = [(i, i + 1) for i in range(stages - 1)]
            return jax.lax.ppermute(y, "stage", to), y

        ticks = jax.numpy.arange(COUNT + stages - 1)
        _, made = jax.lax.scan(tick, jax.numpy.zeros_like(rows[0]), ticks)
        ends = made[stages - 1 :]  # of the last stage
        return jax.lax.psum(jax.numpy.where(stage == stages - 1, ends, 0), "stage")

    rows = x.reshape(COUNT, -1, *x.shape[1:])
    run = jax.shard_map(
        on_stage,
        mesh=mesh,
        axis_names={"stage"},
        in_specs=(P("stage"), P()),
        out_specs=P(),
        check_vma=False,
    )
    return run(stacks, rows).reshape(x.shape)
'''
"""Source of a pipelined loop over layers, as a user would write it.

Source: GPipe (arXiv 1811.06965) as an SPMD pipeline: `shard_map` and `ppermute`.
"""


def stages_text(plan: PlanData) -> tuple[str, ...]:
    """Return sentences on the layers and tasks of each stage; empty for other plans."""
    if not plan.is_one_program:
        return ()
    places = dict(plan.mesh_axes)
    others = [f"`{n}`" for n in places if n != STAGE_AXIS and places[n] > 1]
    held = "; ".join(
        f"stage {i}: layers "
        + " and ".join(f"{a} to {b - 1}" for a, b in stage.layers)
        + f" on {len(stage.devices)} device{'s' if len(stage.devices) > 1 else ''}"
        for i, stage in enumerate(plan.stages)
    )
    beside = f", cut over {', '.join(others)} as said below" if others else ""
    ticks = plan.microbatches + plan.num_stages - 1
    return (
        f"stages are places along `{STAGE_AXIS}`: {held}; by dim 0 of stacks of layers."
        f" What is in no layer lies on all stages{beside}.",
        f"a step takes {ticks} ticks forward and as many back: on tick t, stage s does"
        f" its layers for micro-batch t - s of {plan.microbatches}, and hands on what"
        " they make. `pipelined` below does that for a loop over layers: put it in"
        " place of the `lax.scan`. Without it `jit` makes no pipeline.",
        "NOT here: what the plan does beyond: it shares what is in no layer among"
        " stages, which compute all of it with `pipelined`, and chooses what the"
        " backward pass makes again.",
    )


def pipelined(plan: PlanData) -> str:
    """Return the source of a loop over layers in stages; empty for other plans."""
    if not plan.is_one_program:
        return ""
    return PIPELINED.replace("{count}", str(plan.microbatches))
