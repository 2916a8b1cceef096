"""From a user's request to a plan: keywords checked, mesh and hardware resolved, the
search run, cached plans and other processes taken into account.

In: a traced function, and the keywords of `auto_shard`, `plan` or `plan_together`.
Out: a `plan.plan.PlanData`, which `explain.plan` shows, or several of them.
Order: `decision` (the user's, or open; its options planned one by one, the simplest
first, and why others were left), `search` (one program on meshes), `variant_search`
(its variants as options of a decision), `variants`, `least_memory` and `cuts` (choice
of a variant), `experts` (recipes of programs with experts in parts), `staging`
(stages), `corrected` (costs corrected by compiled plans), `searched` (one mesh or
stages, forms of calls), `meshes`, `notes` (ops without a rule, arguments, places by
name), `options` (one program planned), `origin` (layouts fixed by another plan, and
planning again from a plan); `joint` (programs that share state).
`rhino_jax.api` calls this.
"""
