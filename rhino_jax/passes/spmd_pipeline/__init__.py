"""A step with scans over layers as an SPMD pipeline, whose stages are a mesh axis.

In: a closed jaxpr with its loop over micro-batches (`passes.microbatch`), and the
number of stages.
Out: the function of one stage (`on_stage`), to run inside of `shard_map` over the axis
`stage`: stacks `[L, …]` are its L/S layers, and collectives are over that axis.
Order: `body` (a micro-batch: its layers, stacks, sums), `step` (the loop over
micro-batches, or why there is none; ops around it; the pass), `along` (ops on a stage's
layers, permutes between stages), `run` (micro-batches in ticks, and what lies between
scans, divided among stages).
"""

from rhino_jax.passes.spmd_pipeline.step import AXIS, PASS, on_stage


__all__ = ["AXIS", "PASS", "on_stage"]
