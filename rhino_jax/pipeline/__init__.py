"""Pipelines as data: where to cut, what runs when, and how long it takes.

In: seconds and bytes of ops or stages, links between groups of devices, their memory.
Out: `cut.ops.StageCut`s, `tasks.Schedule`s, and `simulation.Simulation`s of them;
nothing here traces, compiles or runs anything.
Order: `tasks`, `work` (what stages cost) and `graph` (their tasks), `schedules`,
`simulator` (with `waiting`, `memory`, `times`, `simulation`, `timeline`, `trace`),
`ticks` (stages of one program), `offload` (what waits on hosts), `check`, `written`
(orders as text), `jitter` (noise, slow devices), `tera` (slices of sequences), `cut`.
"""
