"""From wishes for stages to a plan: where to cut, and the shardings of each group.

In: a `planning.search.Search`, and how many stages, micro-batches and which schedule.
Out: a `plan.plan.Plan` with a pipeline.
Order: `pins` (what is to be in which stage), `priced` (what ops take), `shapes` (the
groups' meshes, and how fast each is), `problem` (a step as `pipeline.cut` sees it),
`estimated` (what its chunks cost then), `when` (schedules compared by that), `counts`
(of micro-batches), `room` (for what no cut changes), `cuts` (of any number of them),
`loops` (over layers, in which parts), `planned` (a group on its own devices; `alike`:
once for those that are; `working`: what its tasks take while they run), `groups` (all),
`remade` (what of them is made again), `costs` (of their tasks), `assembled` (as one
plan), `again` (until all fits; or again, otherwise), `fitted` (by one schedule), `plan`
(the best of several ways), `auto`; `slices` (of sequences), `one_program` (stages as an axis of one mesh).
"""
