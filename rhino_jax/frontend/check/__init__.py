"""Check of rules: ops run on shards as their rules state, compared with the whole op.

In: a function with arguments, or an op; the rules of `rhino_jax.frontend.registry`.
Out: a `RuleReport` of the checked strategies, or a `RuleError` with op and numbers.
Order: `shards` (the block of each device), `run` (every op with its arrays; all shards
in one compiled function), `rule` (the op on one shard, results combined, and
compared).
"""
