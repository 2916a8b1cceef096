"""Programs that their users sharded by hand: their communication and memory use, next
to rhino's plan of the same function.

In: a function with shardings, constraints or `shard_map`, and its arguments.
Out: `audit.AuditData`.
Order: `hand_sharded` (its mesh, and lowered as it is), `culprits` (which of its
shardings asks for a collective), `costs` (which lines cost most), `unpinned` (the
function without its shardings, for rhino's plan), `audit` (all of it).
"""
