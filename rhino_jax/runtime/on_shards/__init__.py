"""Run ops on shards in `shard_map` that XLA would gather, or partition wrongly.

In: an op, its equation, the specs of its operands and results, and arrays.
Out: its results.
Order: `cuts` (specs → which mesh axes shard each factor), `halo` (borders from
neighbours), `windows` (what a convolution's parameters are on a shard), `sums` (partial
sums, combined), `merging` (top-k, positions and running sums, merged), `parts` (an op
on shards), `kernels` (Pallas kernels).
"""
