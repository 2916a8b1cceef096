"""From a user's request to a plan: keywords checked, mesh and hardware resolved, the
search run, cached plans and other processes taken into account.

In: a function with example arguments, and the keywords of `auto_shard`, `plan`,
`plan_together` or `audit`.
Out: what `explain.results` shows: a `Plan`, several of them, or an `Audit`.
Order: `search` (one program on meshes), `variant_search` (one variant of it), `storage`
(interleaved storage of fused weights), `deferred_reductions`, `least_memory` and `cuts`
(choice of a variant), `staging` (pipeline stages), `per_microbatch` (places by name),
`notes` (ops without a rule, arguments), `like` (layouts fixed by another plan),
`meshes`, `searched` (one mesh or stages), `options` (one program planned), `origin`
(planning again from a plan), `audit`; `joint` (programs that share state).
`rhino_jax.api` calls this.
"""
