"""Explanations of a plan from its search problem: reasons, alternatives and recipes.

In: a search result (`rhino_jax.planner.search.found.SearchResult`), of one mesh or of
every submesh of a plan in stages, and the key of a value.
Out: `why.Why`, which shows itself; plans of recipes; the `plan.Plan` that users get.
Order: `place` (key → values of the program, fixed to one layout, the rest solved
again), `words` (cost of a solution by axes and source lines, and sentences),
`explaining` (constraints on a layout, and all of these for every layout), `why` (the
result as data, and as a table); of several stages `where` (the stage of a value, and
its reason); `questions` (all of it from a plan, stage by stage where it has several,
and experts' recipes as plans); `diff` (two plans); `plan` (the data of a plan, with
methods, each of which calls a function of another package). `report` makes text and
HTML of all results.
"""
