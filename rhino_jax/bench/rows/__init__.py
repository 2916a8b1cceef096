"""Rows that are measured as a whole, each in a separate process.

In: a suite that only plans, or one whose steps run and are timed.
Out: a saved result per row, and the suite's report.
Order: `row_run` (rows, one after the other; current speed of the machine), `plan_run`
(seconds and memory of planning), `pipeline_run` (planned pipelines), `calls` (a step's
first call), `clock` (steps on emulated devices).
"""
