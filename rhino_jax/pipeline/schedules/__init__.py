"""Schedules of pipelines: families of task orders, and a search.

In: `work.StepWork`, the costs of every stage.
Out: `tasks.Schedule`s, by name from `searched`.
Order: `family` (tools of all families), `gpipe`, `one_f_one_b`, `interleaved`,
`zero_bubble`, `sequence_slices`, `listed` (list scheduling, and a bound), `searched`
(all of these by name, the best of them, and `cpsat`'s).

To add one: a file with a function from `StepWork` to `Schedule`, and a line in
`searched`.
"""
