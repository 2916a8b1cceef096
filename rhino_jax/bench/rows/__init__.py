"""Rows that are measured as a whole, each in a process of its own.

In: a suite that only plans, or one whose steps run and are timed.
Out: a kept result a row, and the suite's report.
Order: `row_run` (rows, one after the other), `yardstick` (how fast the machine is
now), `plan_run` (seconds and memory of planning), `pipeline_run` (of pipelines, and
what is planned), `calls` (a step's first call), `clock` (steps on emulated devices) and
`clock_run` (their report).
"""
