"""A step whose layers are loops over stacks, as one program whose stages are an axis.

In: a closed jaxpr with its loop over micro-batches (`passes.microbatch`), and how
many stages.
Out: what one stage does (`on_stage`), to be run inside of `shard_map` over the axis
`stage`: stacks `[L, …]` are its L/S layers, and collectives are over that axis.
Order: `found` (the loop over micro-batches, or why there is none), `body` (what a
micro-batch does: `layers`, stacks, `sums`), `step` (what is around it), `along` and
`local` (equations on a stage's layers), `run` (a micro-batch handed on every tick, and
what lies between, of which each stage does some), `spread` (values from one to the
other), `emit` (the pass).
"""

from rhino_jax.passes.spmd_pipeline.emit import AXIS as AXIS, on_stage as on_stage


__all__ = ["AXIS", "on_stage"]
