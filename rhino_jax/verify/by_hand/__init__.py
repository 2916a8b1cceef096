"""Audit programs that their users sharded by hand, and compare them with rhino's plan.

In: a function with shardings, constraints or `shard_map`, and its arguments.
Out: `audit.AuditData`.
Order: `hand_sharded` (its mesh, and lowered as it is), `culprits` (which of its
shardings asks for a collective), `costs` (which lines cost most), `unpinned` (the
function without its shardings, for rhino's plan), `audit` (all of it).
"""
