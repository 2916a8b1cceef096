"""Experts' recipes as restrictions of the search space, costed with the same model.

In: a `model.build.MeshModel`, with the roles of its dims (batch, sequence, inner).
Out: for each recipe the options of every node that it allows; the cheapest choice of
them is a hint for the search, and a row of the plan's table.
Order: `table` (every recipe, as data), `recipes` (a recipe on one mesh, and the
strategies that it allows), `recipe_book` (all of it on one model).

To add a recipe: one entry in `table`, an `Expert` with its name, its source, and the
values that data and model axes shard. A new kind of dim to shard is a `Role`.
"""
