"""Program passes: rewrites of a program that keep its arguments and results.

In: a `frontend.trace.Traced`, and `ir.transform.Transform`s with a choice.
Out: a `Traced` of the same call, whose program is the rewritten one.
Order: `program_pass` (what a pass is), `forms` (the function traced again with other
forms), `interleaved` (block-cyclic storage), `unroll` (loops over layers), `chunks` (of
logits), `remat` (residuals), `microbatch`, `offload` (state), `experts` (tokens by
expert), `stacked` (leaves), `deferred_reductions`; `apply` has all. `region_walk`,
`ops_along`, `split_scan` serve several; `staged` divides by stage.

The planner tries what each pass finds in a program (`planner.variants`); a plan records
its choices, and the runtime applies them again: a pass is a pure function of a closed
jaxpr, its program and a choice as text. To add one: a file with a `PASS`, written as
`rewrite` says, and its entry in `apply`. None has an inverse: arguments and results
stay, and `runtime.storage` puts arrays of interleaved storage in order.
"""

from rhino_jax._compat import hide_frames


hide_frames(__path__[0])
