"""Programs made into others of the same arguments and results: cuts in time, and inputs
stored in another order.

In: a `frontend.trace.Traced`, and `ir.transform.Transform`s with a choice.
Out: a `Traced` of the same call, whose program is the changed one.
Order: `interleaved` (fused weights in blocks), `microbatch` (the batch cut in time),
`chunks` (long rows cut so), `remat` (values made again, or kept on the host),
`deferred_reductions` (sums left open for longer), each by `retraced`; `apply` does them
by name. `staged` cuts a step into tasks of several groups of devices, `sequence_slices`
the sequence of what these run.

A pass is chosen by who plans; a plan says which were, and whoever runs it does them
again: each is a pure function of a closed jaxpr, its program and a choice as text.
To add one: a package here, and an entry in the table of `apply`.
"""
