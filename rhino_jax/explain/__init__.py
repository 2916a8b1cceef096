"""Why a plan is as it is, and what else there is: from the problem that gave it.

In: what a search found (`rhino_jax.planner.search.found.SearchResult`), of one mesh or
of every group of a plan in stages, and what is asked of it.
Out: `why.Why`, which shows itself; plans of recipes.
Order: `place` (what a key means: values of the program), `holding` (values held in one
layout, all else solved again), `costs` (what a solution costs, by axes and lines),
`forces` (who has a hand in a layout), `words` (sentences), `explaining` (all of these
for every layout), `why` (the answer as data, and as a table); of several stages `laid`
(groups laid out, and what is held), `where` (on which stage, and why there) and
`in_stages` (stage by stage); `recipe` (an expert's recipe as a plan).
"""
