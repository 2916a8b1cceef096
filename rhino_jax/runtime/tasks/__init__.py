"""Run a plan of several stages: one program per task and submesh, by the schedule.

In: a plan with a pipeline, and the traced function.
Out: `executable.TaskExecutable`.
Order: `programs` (compiled tasks of a submesh; shardings of values between tasks, and
buffers that they reuse), `moves` (transfers between submeshes, and residuals in host
memory), `controller` (dispatch order); over several processes `transfers` and
`processes`; `executable` (a plan's tasks; arrays over all stages, and their parts).
"""
