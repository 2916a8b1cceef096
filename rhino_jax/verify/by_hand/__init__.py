"""Audit programs that their users sharded by hand, and compare them with rhino's plan.

In: a function with shardings, constraints or `shard_map`, and its arguments.
Out: `audit.AuditData`.
Order: `hand_sharded` (its mesh, and lowered as it is), `culprits` (the shardings that
cause a collective), `costs` (communication by source line), `unpinned` (the function
without its shardings, for rhino's plan), `audit` (all of it).
"""
