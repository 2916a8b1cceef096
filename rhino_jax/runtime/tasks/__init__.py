"""A plan of several stages, run: one program per task and group, in schedule's order.

In: a plan with a pipeline, and the traced function.
Out: `executable.TaskExecutable`.
Order: `held` (how values are laid out between tasks), `donated` (whose memory they
take), `programs` (what is compiled for a group), `moves` (what goes from group to
group), `offload` (what waits on hosts), `controller` (which task is dispatched when),
`stacks` (arrays over all stages, and their parts), `steps` (a plan's tasks); over
several processes `transfers`, `exchange`, `processes` and `joining`; `executable`.
"""
