"""Pipelines that really run, compared with the simulator.

In: a row with its model, micro-batches, and schedules as methods.
Out: seconds of a step measured and simulated; nothing here is a test.
Order: `records` (results of a row), `worker` (one process that runs its stages),
`run` (all processes of a row), `report`.
"""
