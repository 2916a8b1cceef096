"""A step cut into pipeline stages: tasks of stage submeshes, and what they send.

In: a closed jaxpr and its `Program`, a number of micro-batches, a stage for every
forward op.
Out: `step.StagedStep`, tasks of submeshes as functions to be traced;
`group.GroupProgram`, the tasks of a submesh as one program to be planned.
Order: `layers` and `stacks` (layer scans split by stage), `apart` (in and
outside of the loop over micro-batches), `sides` (forward and backward pass), `labels`
(which op runs where), `split_by_label` (backward scans, and sums), `after` (optimizer),
`step` and `staging` (all of these as tasks), `in_slices` (by sequence slices),
`remat`, `holding` (live values between tasks, host offload), `group`.
"""
