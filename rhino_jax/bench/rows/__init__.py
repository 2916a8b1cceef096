"""Rows that are measured as a whole, each in a separate process.

In: a suite that only plans, or one whose steps run and are timed.
Out: a saved result per row, and the suite's report.
Order: `row_run` (a kind of suites, its rows one after the other, its report),
`plan_run` (seconds and memory of planning), `scale_run` (of large clusters),
`pipeline_run` (planned pipelines), `stages_run` with `stages_worker` (pipelines that
run), `calls` (a step's first call), `clock` (steps on emulated devices), `kinds`.
"""
