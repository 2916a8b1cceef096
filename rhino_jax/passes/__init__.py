"""Program passes: rewrites of a program that keep its arguments and results.

In: a `frontend.trace.Traced`, and `ir.transform.Transform`s with a choice.
Out: a `Traced` of the same call, whose program is the rewritten one.
Order: `interleaved` (fused weights in block-cyclic storage), `microbatch`, `chunks`
(logits computed in chunks), `remat` (recompute or offload residuals),
`deferred_reductions` (unreduced values); `apply` runs them by name.
`staged` divides a step into tasks of pipeline stages, `sequence_slices` their sequence.

The planner tries what each pass finds in a program (`planner.variant_search`) and
chooses; a plan records its choices, and the runtime applies them again: each pass is a
pure function of a closed jaxpr, its program and a choice as text. To add one: a package
here, as `rewrite` says, and an entry in the table of `apply`.
"""
