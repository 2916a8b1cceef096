"""Stages that are an axis of one mesh, and do the same program each.

In: a `variant_search.Search` of the whole step, how many stages and micro-batches.
Out: a `plan.plan.PlanData` of one program; what can plan it again is its `origin`.
Order: `stage` (the search of what one stage does), `timed` (its ticks), `whole` (from
the plan of one stage to that of all), `again` (what gave a plan, to ask it and plan it
again), `recomputed` (what its loops had better make again), `planned` (the best of some
numbers of micro-batches), `compared` (or stages that run as tasks).
"""
