"""From what users ask for to plans: keywords read, mesh and hardware found, the search
called, kept plans and other processes minded.

In: a function with example arguments, and the keywords of `auto_shard`, `plan`,
`plan_together` or `audit`.
Out: what `explain.results` shows: a `Plan`, several of them, or an `Audit`.
Order: `search` (one program on meshes), `variant_search` (one variant of it), `storage`
(fused weights in blocks), `deferred_reductions`, `least_memory` and `cuts` (which
variant), `staging` (several stages), `per_microbatch` (places by name), `notes` (on ops
without a rule or left out, and on arguments), `like` (what stays as in another plan),
`meshes`, `searched` (one mesh or stages), `options` (one program planned), `origin`
(planned again), and `audit`; `joint` (several programs that share state).
`rhino_jax.api` calls this.
"""
