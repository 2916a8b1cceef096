"""Audit programs that their users sharded by hand, and compare them with rhino's plan.

In: a function with shardings, constraints or `shard_map`, and its arguments.
Out: `verify.results.audit.Audit`.
Order: `hand_sharded` (its mesh, lowered as it is, and the function without its
shardings, for rhino's plan), `culprits` (the shardings that cause a collective;
communication by source line), `audit` (all of it).
"""
