"""What experts would type: restrictions of the search space, costed as it is.

In: a `model.build.MeshModel`, with the roles of its dims (batch, sequence, inner).
Out: for each recipe the options of every node that it allows; the cheapest choice
within starts the search and stands in the plan's table.
Order: `table` (every recipe, as data), `recipes` (a recipe on one mesh, and what it
allows of strategies), `recipe_book` (all of it on one model).

To add a recipe: one entry in `table`, an `Expert` with its name, its source, and what
data and model axes cut. A new kind of dim to cut is a `Role` in `recipes`.
"""
