"""Which task a group runs when: families of schedules, and a search.

In: `work.StepWork`, what every stage costs.
Out: `tasks.Schedule`s, by name from `table`.
Order: `family` (what a family is), `gpipe`, `one_f_one_b`, `interleaved`,
`zero_bubble`, `sequence_slices`, `forward_only`, `listed` (by rules, as time goes),
`named` (all of these), `bound`, `searched` (the best of them, and `cpsat`'s), `table`.

To add one: a file with a function from `Work` to `Schedule`, and a line in `named`.
"""
