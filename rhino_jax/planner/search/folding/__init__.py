"""Repeated structure, such as the layers of a model, solved once.

In: the problem of one mesh, with its costs (`rhino_jax.planner.search.mesh_problem`).
Out: its solution, with a choice for every node.
Order: `symmetry` (equivalent nodes in equivalent surroundings share a choice), `fold`
(one node represents all of them), `minimum` (the choice with the smallest peak),
`solve_folded`, `unfold` (repeated nodes that choose differently, where memory binds).
"""
