"""Schedules of pipelines: families of task orders, and a search.

In: `work.StepWork`, the costs of every stage.
Out: `tasks.Schedule`s, by name from `searched`.
Order: `family` (tools of all families), `one_f_one_b` (and GPipe), `zero_bubble`,
`sequence_slices`, `listed` (list scheduling, and a bound), `searched` (all of these by
name, the best of them, and `cpsat`'s).

To add one: a function from `StepWork` to `Schedule`, decorated with `@family(name, …)`,
which states what it is for, in one of these files or in a new one, imported below.
"""

from __future__ import annotations

from rhino_jax.pipeline.schedules import (  # noqa: F401
    one_f_one_b,
    searched,
    sequence_slices,
    zero_bubble,
)
