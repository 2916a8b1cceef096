"""Run ops on shards in `shard_map` that XLA would gather, or partition wrongly.

In: an op, its equation, the specs of its operands and results, and arrays.
Out: its results.
Order: `windows` (specs → which mesh axes shard each factor; borders from neighbours; a
convolution's parameters on a shard), `parts` (an op on shards; partial sums, top-k,
positions and running sums, merged), `kernels` (Pallas kernels).
"""
