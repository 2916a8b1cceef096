"""Whether rules are true: ops run on shards as their rules say, against the whole.

In: a function with arguments, or an op; the rules of `rhino_jax.frontend.registry`.
Out: a `RuleReport` of what was tried, or a `RuleError` with op, cut and numbers.
Order: `walk` (every op with the arrays that it runs on), `shards` (which block each
device has), `local` and `indexed` (the op on one shard, as an `op`), `run` (all shards
in one compiled function), `rule` (combined, and compared).
"""
