"""Pipelines as data: stage cuts, schedules, and simulated step times.

In: seconds and bytes of ops or stages, links between stage devices, their memory.
Out: `cut.ops.StageCut`s, `tasks.Schedule`s, and `simulation.Simulation`s of them;
nothing here traces, compiles or runs anything.
Order: `tasks`, `work` (costs of stages) and `graph` (their tasks), `schedules`,
`simulator` (and checks), `simulation` (its result, with drawings and traces), `memory`,
`offload` (residuals on hosts), `of_plan` (ticks of SPMD pipelines too), `jitter`
(noise, slow devices), `tera` (sequence slices), `cut`.
"""
