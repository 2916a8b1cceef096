"""Check of rules: ops run on shards as their rules state, compared with the whole op.

In: a function with arguments, or an op; the rules of `rhino_jax.frontend.registry`.
Out: a `RuleReport` of the checked strategies, or a `RuleError` with op and numbers.
Order: `walk` (every op with the arrays that it runs on), `shards` (the block of each
device), `local`, `moved` and `indexed` (the op on one shard, as an `op`), `run` (all
shards in one compiled function), `rule` (results combined, and compared).
"""
