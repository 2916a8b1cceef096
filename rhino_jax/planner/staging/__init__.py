"""Pipeline stages: from the user's options to stage cuts and shardings.

In: a `variant_search.Search`, the numbers of stages and micro-batches, and a schedule.
Out: a `plan.plan.PlanData` with a pipeline.
Order: `pins` (ops pinned to stages), `finds` (searches of submeshes), `shapes`
(submeshes and their speeds), `problem` (a step as `pipeline.cut` sees it), `when`
(schedules), `cuts` (stage cuts, for numbers of micro-batches), `loops` (over layers,
split), `enough` (bounds), `planned` (one submesh; `working`: its memory, `transfers`:
its costs), `groups` (all), `remat`, `assembled` (one plan), `again` (until all fit;
planned again), `fitted` (by one schedule), `slices` (of sequences), `plan` (the best),
`auto` (number of stages), `spmd_pipeline` (stages as a mesh axis).
"""
