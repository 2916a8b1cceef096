"""A step cut into stages: the tasks that groups of devices run, and what they send.

In: a closed jaxpr and its `Program`, micro-batches, a stage for every forward op.
Out: `step.DeviceStep`, tasks of groups as functions to be traced; `group.GroupProgram`,
the tasks of a group as one program to be planned.
Order: `layers`, `parts` and `stacks` (loops over layers in parts), `apart` (before, in
and after the loop over micro-batches), `lines` (equations to be run in parts), `sides`
(forward and backward pass, and what belongs together), `labels` (which op runs where),
`loops` (in two) and `shared_sums`, `between` (what couples micro-batches), `after` and
`updates` (what follows them), `names`, `staging` (all of these as a `step` of tasks),
`in_slices` (the same, slice by slice of its sequences), `remat` (what is made again),
`holding` (what a group holds between them, and what may wait on its host), `group`.
"""
