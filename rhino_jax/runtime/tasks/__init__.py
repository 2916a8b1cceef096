"""Run a plan of several stages: one program per task and submesh, by the schedule.

In: a plan with a pipeline, and the traced function.
Out: `executable.TaskExecutable`.
Order: `held` (shardings of values between tasks), `donated` (buffers that tasks reuse),
`programs` (compiled tasks of a submesh), `moves` (transfers between submeshes),
`offload` (residuals in host memory), `controller` (dispatch order), `stacks` (arrays
over all stages, and their parts), `steps` (a plan's tasks); over several processes
`transfers`, `exchange`, `processes` and `joining`; `executable`.
"""
