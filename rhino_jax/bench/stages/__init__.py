"""Pipelines that really run, compared with the simulator.

In: a row with its model, micro-batches, and schedules as methods.
Out: seconds of a step measured and simulated; nothing here is a test.
Order: `worker` (one process that runs its stages), `run` (all processes of a row, and
its results), `report`.
"""
