"""Schedules of pipelines: families of task orders, and a search.

In: `work.StepWork`, the costs of every stage.
Out: `tasks.Schedule`s, by name from `table`.
Order: `family` (tools of all families), `gpipe`, `one_f_one_b`, `interleaved`,
`zero_bubble`, `sequence_slices`, `forward_only`, `listed` (list scheduling), `named`
(all of these), `bound`, `searched` (the best of them, and `cpsat`'s), `table`.

To add one: a file with a function from `StepWork` to `Schedule`, and a line in `named`.
"""
