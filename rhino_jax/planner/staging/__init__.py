"""From wishes for stages to a plan: where to cut, and the shardings of each group.

In: a `variant_search.Search`, and how many stages, micro-batches and which schedule.
Out: a `plan.plan.PlanData` with a pipeline.
Order: `pins` (what is to be in which stage), `costs` (what ops take), `shapes` (the
groups' meshes, and how fast each is), `problem` (a step as `pipeline.cut` sees it),
`estimated` (what its chunks cost then), `when` (schedules compared by that), `counts`
(of micro-batches), `least` (what no cut has room for), `cuts` (of any number of them),
`loops` (over layers, in which parts), `planned` (a group on its own devices; `group`:
what it costs), `groups` (all), `remat` (what of them is made again), `assembled` (as
one plan), `again` (until all fits; or again, otherwise), `fitted` (by one schedule),
`slices` (of sequences), `plan` (the best of several ways), `auto`, `spmd_pipeline`
(stages as an axis of one mesh).
"""
